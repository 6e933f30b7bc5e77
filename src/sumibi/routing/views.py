"""What the router shows: its endpoints, and what it counted. Plain data, made on request."""

import msgspec

from sumibi.core.latency import LatencyModel
from sumibi.routing.counters import Counters
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Grade, Role
from sumibi.routing.fleet import Fleet
from sumibi.routing.gate import Gate
from sumibi.routing.index import BlockIndex
from sumibi.routing.lower import TierView

__all__ = ["Counters", "EndpointView", "counted", "view"]


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
    overhead_s: float
    """Learnt: of a request beside its prefill (HTTP, tokenizing, the step under way when it arrives)."""
    role: Role = Role.BOTH
    revision: str = ""
    coming: int = 0
    """Our requests that will decode there and whose prompt another endpoint is computing."""
    transfer_factor: float = 1.0
    """Learnt: on the seconds in which KV comes there by what is known of its link."""
    tiers: list[TierView] = []
    """Below its device."""


def view(e: Endpoint, t: float, block_tokens: int) -> EndpointView:
    """`e` as it is known at `t`; `block_tokens` is the routing block of its model."""
    running, waiting = e.foreign(t)
    resident = e.resident_blocks()
    free = None
    if e.kv_tokens is not None:
        free = max(0, e.kv_tokens - resident * block_tokens - e.load.prefill_tokens)
    scraped = e.signals
    return EndpointView(
        endpoint=e.name,
        models=list(e.models),
        up=e.up,
        grade=e.grade,
        suspect=e.suspect,
        reachable=e.unreachable_t is None,
        epoch=e.epoch,
        has_events=e.has_events,
        last_sequence=e.feed.sequence.last if e.feed is not None else None,
        blocks=resident,
        block_tokens=block_tokens,
        kv_tokens=e.kv_tokens,
        free_tokens=free,
        max_sequences=e.max_sequences,
        inflight=e.load.inflight,
        prefilling=len(e.load.prefills),
        decoding=e.load.decodes,
        prefill_tokens=e.load.prefill_tokens,
        wait_s=e.prefill_left_s(t),
        foreign_running=running,
        foreign_waiting=waiting,
        running=scraped.running if scraped else None,
        waiting=scraped.waiting if scraped else None,
        kv_usage=scraped.kv_usage if scraped else None,
        scraped_t=scraped.scraped_t if scraped else None,
        dispatched=e.dispatched,
        latency=e.learner.model,
        fixed_factor=e.learner.fixed_factor,
        work_factor=e.learner.work_factor,
        decode_factor=e.learner.decode_factor,
        overhead_s=e.learner.overhead_s,
        role=e.role,
        revision=e.revision,
        coming=e.load.coming,
        transfer_factor=e.transfers.factor,
        tiers=e.view_tiers(),
    )


def counted(
    count: Counters, requests: int, waiting: int, gate: Gate, index: BlockIndex, fleet: Fleet, t: float
) -> Counters:
    """A copy of `count`, with what is so at `t`: `requests` are known, `waiting` of them for an endpoint."""
    feeds = [e.feed for e in fleet.endpoints.values() if e.feed is not None]
    return msgspec.structs.replace(
        count,
        refused=dict(count.refused),
        finished=dict(count.finished),
        disagg={kind: dict(reasons) for kind, reasons in count.disagg.items()},
        requests_now=requests,
        waiting_now=waiting,
        held_now=gate.held_now(),
        saturation_now=gate.saturation(t),
        jain_now=gate.jain(t),
        index_blocks_now=len(index),
        index_bytes_now=index.estimated_bytes,
        index_refused_blocks=index.refused_blocks,
        orphan_blocks_now=sum(feed.source.orphan_blocks for feed in feeds),
    )
