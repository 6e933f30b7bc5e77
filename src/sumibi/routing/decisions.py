"""Decision records: every candidate's cost, the pick, and enough to compute the pick again.

A record holds every candidate's score, the least of which was picked, and nothing of the prompt but lengths.
`policies.rerun` applies the same policy to records read back (is the pick reproduced?) or another one (what
would it have done, decision by decision, with everything else as it was?).
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.routing.events import FinishReason, Grade

EXPLANATION_BYTES: Final = 2048
"""Limit of `explain`: an explanation fits into a response header."""


class Candidate(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One endpoint as the policies saw it. Seconds are predictions for this request there: zero for those
    that were not picked by a policy that looks at no seconds.

    A pair has `prefill`: then `matched_tokens`, `pending_tokens`, `wait_s`, `pending_s` and `compute_s` are
    of that endpoint, `room_s` of `endpoint`, the rest of both.
    """

    endpoint: str
    grade: Grade
    matched_tokens: int
    """Prompt tokens whose KV is there, on the device."""
    pending_tokens: int
    """Further ones that another request is computing there."""
    wait_s: float
    """Until the endpoint can begin with this prefill."""
    pending_s: float
    """Until the pending ones are computed."""
    room_s: float
    """Until those who run there leave enough of the KV cache to it."""
    compute_s: float
    """Prefill of what is neither there nor pending."""
    delay_s: float
    """Added to requests that are decoding there: by this prefill, and by one more sequence in the batch."""
    evict_s: float
    """To recompute, later, what this request pushes out of the cache."""
    balance_s: float
    """For the work itself, more where more than its share was computed lately, less where less; and for those
    who will follow a new prompt, where more settled than elsewhere."""
    total_s: float
    inflight: float
    """Requests there, foreign ones (a fading estimate) included."""
    prefill_tokens: int
    """Prompt tokens that our requests there still have to compute."""
    dispatched: int
    """Requests sent there so far."""
    host_tokens: int = 0
    """Further prompt tokens that it fetches from its host's memory."""
    disk_tokens: int = 0
    """From another tier of its own."""
    store_tokens: int = 0
    """From a store that it shares with others."""
    fetch_s: float = 0.0
    """Until all these have come: before what is left is computed."""
    prefill: str = ""
    """The endpoint that is to compute the prompt; empty: `endpoint` itself."""
    local_tokens: int = 0
    """Of a pair: prompt tokens whose KV need not be moved, for it is at `endpoint`, or another request's is
    on its way there."""
    transfer_s: float = 0.0
    """Of a pair: from the end of the prefill to the first token, a place and room at `endpoint` given."""

    @property
    def fetched_tokens(self) -> int:
        """Prompt tokens whose KV comes from below the device."""
        return self.host_tokens + self.disk_tokens + self.store_tokens

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that need not be computed: what the engine should report as cached."""
        return self.matched_tokens + self.fetched_tokens + self.pending_tokens

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        if self.prefill:
            ready_s = max(self.wait_s, self.pending_s) + self.fetch_s + self.compute_s
            return max(ready_s, self.room_s) + self.transfer_s
        return max(self.wait_s, self.pending_s, self.room_s) + self.fetch_s + self.compute_s


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One choice among candidates."""

    id: str
    t: float
    request: str
    attempt: int
    model: str
    tenant: str
    policy: str
    number: int
    """How many decisions were made for the model before this one (round-robin's state)."""
    prompt_tokens: int
    candidates: list[Candidate]
    scores: list[float] = []
    """One for each candidate, in the unit of the policy: the least was picked, ties by the request's id."""
    pick: int
    """Index into `candidates`."""
    left_out: int = 0
    """Endpoints of a large fleet that could not be the pick and are not among the candidates."""
    legs: list[Candidate] = []
    """Where pairs are possible: the prefill endpoints by themselves. Each pair among the candidates is the
    best of its `endpoint` with any of these."""
    reason: str = ""
    """Where pairs are possible: what decided for a pair or against one (`disagg.reason`)."""

    @property
    def picked(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[self.pick]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a dispatched attempt, beside what was predicted. None: not seen or not reported."""

    decision: str
    t: float
    request: str
    attempt: int
    model: str
    endpoint: str
    reason: FinishReason
    prompt_tokens: int
    predicted_cached_tokens: int
    cached_tokens: int | None
    predicted_ttft_s: float
    ttft_s: float | None
    """Dispatch to first token; None for requests that do not stream."""
    output_tokens: int | None
    prefill: str = ""
    """Of a pair: where the prompt was computed."""


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded decision, decided again."""

    decision: str
    request: str
    policy: str
    recorded: str
    """Endpoint picked then."""
    rerun: str
    """Endpoint picked now."""

    @property
    def same(self) -> bool:
        """True if the pick is the recorded one."""
        return self.recorded == self.rerun


def read_decisions(lines: Iterable[bytes | str]) -> Iterable[Decision]:
    """Decision records from JSON lines; empty lines are skipped. Raises BadRequest naming line and field."""
    decoder = msgspec.json.Decoder(Decision)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            decision = decoder.decode(line)
        except msgspec.MsgspecError as cause:
            raise BadRequest(f"line {number} is not a decision record: {cause}") from cause
        if not 0 <= decision.pick < len(decision.candidates):
            raise BadRequest(
                f"line {number}: pick {decision.pick} names none of its candidates", param="pick"
            )
        yield decision


def explain(decision: Decision) -> bytes:
    """The decision as JSON in at most 2 KB: the pick, then the other candidates by score as space allows."""
    scores = decision.scores or [c.total_s for c in decision.candidates]
    order = sorted(range(len(decision.candidates)), key=lambda i: (i != decision.pick, scores[i]))
    summary: dict[str, object] = {
        "decision": decision.id,
        **({"reason": decision.reason} if decision.reason else {}),
        "policy": decision.policy,
        "prompt_tokens": decision.prompt_tokens,
        "endpoint": decision.picked.endpoint,
        "candidates": [],
        "left_out": len(order) + decision.left_out,
    }
    shown: list[dict[str, object]] = []
    text = msgspec.json.encode(summary)
    for i in order:
        shown.append(_brief(decision.candidates[i], scores[i]))
        summary["candidates"], summary["left_out"] = shown, len(order) - len(shown) + decision.left_out
        longer = msgspec.json.encode(summary)
        if len(longer) > EXPLANATION_BYTES:
            break
        text = longer
    return text


def _brief(c: Candidate, score: float) -> dict[str, object]:
    seconds = {
        "wait_s": c.wait_s,
        "pending_s": c.pending_s,
        "room_s": c.room_s,
        **({"fetch_s": c.fetch_s} if c.fetched_tokens else {}),
        "compute_s": c.compute_s,
        "delay_s": c.delay_s,
        "evict_s": c.evict_s,
        "balance_s": c.balance_s,
        "total_s": c.total_s,
    }
    priced = c.compute_s > 0
    if c.prefill:
        seconds["transfer_s"] = c.transfer_s
    return {
        "endpoint": c.endpoint,
        **({"prefill": c.prefill} if c.prefill else {}),
        "score": round(score, 4),
        "grade": c.grade,
        "matched_tokens": c.matched_tokens,
        "pending_tokens": c.pending_tokens,
        **({"fetched_tokens": c.fetched_tokens} if c.fetched_tokens else {}),
        **{name: round(value, 4) for name, value in seconds.items() if priced},
        "inflight": round(c.inflight, 1),
    }
