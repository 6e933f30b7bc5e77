"""What the router counts: one flat record, shared by its parts, copied for whoever asks."""

import msgspec


class HeldNow(msgspec.Struct, frozen=True):
    """The queue of one priority before one model's endpoints."""

    model: str
    priority: int
    requests: int
    bytes: int
    """Of their bodies, estimated."""


class Counters(msgspec.Struct, kw_only=True):
    """Since the router was made, except where it says `now`."""

    decisions: int = 0
    retries: int = 0
    disagg: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """Decisions where pairs were possible: `prefill-decode` or `decode-only`, by what decided."""
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """By reason."""
    finished: dict[str, int] = msgspec.field(default_factory=dict)
    """Attempts by reason."""
    requests_now: int = 0
    waiting_now: int = 0
    """Requests that wait for an endpoint of their model."""
    held: int = 0
    """Requests that were not placed at once, because no endpoint could begin soon."""
    held_now: list[HeldNow] = []
    saturation_now: dict[str, float] = msgspec.field(default_factory=dict)
    """By model: 0 if nothing waits at its endpoints, 1 if no request could be placed. While any is held."""
    jain_now: dict[str, float] = msgspec.field(default_factory=dict)
    """By model: how evenly its programs were served lately, 1/n to 1 (Jain's index)."""
    hints: int = 0
    """Conversations that an endpoint was told to bring up from below its host memory."""
    hints_returned: int = 0
    """Of these, those that went on afterwards."""
    stale_events: int = 0
    """Events for requests, endpoints or replays that are over: ignored."""
    index_blocks_now: int = 0
    index_bytes_now: int = 0
    """Estimate."""
    index_refused_blocks: int = 0
    """Blocks left out because the index was full."""
    batches: int = 0
    """KV event batches applied."""
    batches_repeated: int = 0
    """Seen before: ignored."""
    skipped_events: int = 0
    """KV events without effect: unknown kind, unknown block, other attention groups."""
    orphan_blocks_now: int = 0
    """Stored blocks whose parent is not known (yet)."""
    orphans_dropped: int = 0
    batches_dropped: int = 0
    """Held back during a replay, more than allowed; asked for again."""
    replays_asked: int = 0
    replays_failed: int = 0
    lives: int = 0
    """Restarts of engines noticed."""
    suspicions: int = 0
    predicted_cached_tokens: int = 0
    """Of computed prompts whose engine reported cached tokens, like the next two. Far apart means that the
    engine's tokens are not ours (template, tokenizer, salt)."""
    actual_cached_tokens: int = 0
    reported_prompt_tokens: int = 0
