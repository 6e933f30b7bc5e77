"""What the router shows: of its fleet and of what it counted. Plain data, made on request."""

import msgspec

from sumibi.core.latency import LatencyModel
from sumibi.routing.events import Grade


class EndpointView(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint as the router knows it."""

    endpoint: str
    models: list[str]
    up: bool
    grade: Grade
    suspect: str | None
    """Why its blocks are not trusted at present."""
    reachable: bool
    """False: it refused or broke a connection and has not been heard of since."""
    epoch: int
    """Lives of its process that were seen, this one included."""
    has_events: bool
    last_sequence: int | None
    """Of its KV event batches, the last one applied."""
    blocks: int
    """Routing blocks in its device memory, as far as known."""
    block_tokens: int
    kv_tokens: int | None
    free_tokens: int | None
    """Device KV without known blocks and without what our requests are about to compute."""
    max_sequences: int | None
    inflight: int
    """Our requests there."""
    prefilling: int
    decoding: int
    prefill_tokens: int
    """Prompt tokens that our requests still have to compute there."""
    wait_s: float
    """Predicted time until a new prefill could begin."""
    foreign_running: float
    foreign_waiting: float
    running: int | None
    """As scraped last, like the next three."""
    waiting: int | None
    kv_usage: float | None
    scraped_t: float | None
    dispatched: int
    latency: LatencyModel
    """As learnt so far."""
    fixed_factor: float
    """Learnt factors on the start's coefficients: a; b and q; d0, d1 and d2."""
    work_factor: float
    decode_factor: float


class Counters(msgspec.Struct, kw_only=True):
    """Since the router was made, except where it says `now`."""

    decisions: int = 0
    retries: int = 0
    refused: dict[str, int] = {}
    """By reason."""
    finished: dict[str, int] = {}
    """Attempts by reason."""
    requests_now: int = 0
    waiting_now: int = 0
    """Requests that wait for an endpoint of their model."""
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
    replays_asked: int = 0
    replays_failed: int = 0
    lives: int = 0
    """Restarts of engines noticed."""
    suspicions: int = 0
    predicted_cached_tokens: int = 0
    """Of finished requests whose engine reported cached tokens, like the next two."""
    actual_cached_tokens: int = 0
    reported_prompt_tokens: int = 0
