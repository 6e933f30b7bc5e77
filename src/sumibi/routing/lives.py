"""The lives of endpoints: when one begins, when it is doubted, and what an engine tells of its cache.

Whether the same process still serves at an endpoint is told by its start time and by the order of its KV
events. While neither says so the endpoint is *suspect*: its blocks are kept and count for nothing.

Knows nothing of requests. What KV events changed is told to the observer as `Residency`, which in recorded
logs stands for it.
"""

from collections.abc import Callable
from typing import Final

from sumibi.routing.computing import Computing
from sumibi.routing.config import RouterConfig
from sumibi.routing.counters import Counters
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import (
    AskReplay,
    Change,
    EndpointDown,
    EndpointSuspect,
    EndpointUp,
    EngineBatch,
    Event,
    GradeChanged,
    Instruction,
    ReplayEnded,
    Residency,
    Signals,
    WakeAt,
)
from sumibi.routing.feed import Feed
from sumibi.routing.fleet import Fleet
from sumibi.routing.index import BlockIndex
from sumibi.routing.sequence import Forget, Step

SAME_START_S: Final = 0.05
"""Process start times closer than this are the same one, read twice."""
RESTARTED: Final = "the engine process was started anew"


class Lives:
    """What is heard of endpoints, and what follows for them. `emit` takes instructions to the shell."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        index: BlockIndex,
        computing: Computing,
        count: Counters,
        emit: Callable[[Instruction], None],
        observer: Callable[[Event], None] | None,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._index = index
        self._computing = computing
        self._count = count
        self._emit = emit
        self._observer = observer

    # --- health ---

    def up(self, event: EndpointUp) -> Endpoint:
        """It takes requests, from now on or again."""
        known = self._fleet.endpoints.get(event.endpoint)
        was_refused = known is not None and known.unreachable_t is not None
        endpoint = self._fleet.upsert(event)
        endpoint.up = True
        endpoint.unreachable_t = None
        self._hear_start(endpoint, event.process_start_s, event.t)
        self._follow_events(endpoint, event)
        if endpoint.suspect is not None and endpoint.feed is None:
            # Nobody can say whether it is the same process.
            if was_refused:
                endpoint.recall.clear()
            endpoint.suspect = None
        self._grade(endpoint)
        return endpoint

    def down(self, event: EndpointDown) -> Endpoint | None:
        """It takes none. None if it is not known."""
        endpoint = self._endpoint(event.endpoint)
        if endpoint is None:
            return None
        endpoint.up = False
        if event.removed:
            self._fleet.remove(endpoint)
        else:
            self.suspect(endpoint, event.cause, event.t, ask=False)
        return endpoint

    def suspected(self, event: EndpointSuspect) -> None:
        """Something speaks for another process."""
        endpoint = self._endpoint(event.endpoint)
        if endpoint is not None:
            self.suspect(endpoint, event.cause, event.t)

    def suspect(self, endpoint: Endpoint, cause: str, t: float, *, ask: bool = True) -> None:
        """Its blocks count for nothing until it is known who answers there; they are kept meanwhile."""
        self._count.suspicions += endpoint.suspect is None
        if endpoint.feed is None and endpoint.process_start_s is None:
            # It has no way to vouch for itself: forget at once.
            endpoint.recall.clear()
            return
        endpoint.suspect = cause
        if ask and endpoint.feed is not None and endpoint.has_events:
            self._take(endpoint, endpoint.feed.sequence.doubt(t), t)
        self._grade(endpoint)

    def signals(self, event: Signals) -> Endpoint | None:
        """Its metrics were scraped. None if it is not known."""
        endpoint = self._endpoint(event.endpoint)
        if endpoint is None:
            return None
        if endpoint.unreachable_t is not None and event.scraped_t >= endpoint.unreachable_t:
            endpoint.unreachable_t = None
        self._hear_start(endpoint, event.process_start_s, event.t)
        endpoint.observe_load(event)
        return endpoint

    def _hear_start(self, endpoint: Endpoint, said_s: float | None, t: float) -> None:
        """What a process start time says: another process serves there, or the same one as before."""
        known_s = endpoint.process_start_s
        if _differ(known_s, said_s):
            if endpoint.feed is not None:
                sequence = endpoint.feed.sequence
                self._take(endpoint, sequence.start(t, cause=RESTARTED, restarted=True), t)
            else:
                self._new_life(endpoint, RESTARTED)
        elif known_s is not None and said_s is not None and not _asks(endpoint):
            endpoint.suspect = None
            self._grade(endpoint)
        if said_s is not None:
            endpoint.process_start_s = said_s

    def _new_life(self, endpoint: Endpoint, cause: str) -> None:
        self._count.lives += 1
        endpoint.new_life()
        endpoint.suspect = None
        self._grade(endpoint, cause)

    def _grade(self, endpoint: Endpoint, happened: str = "") -> None:
        """Judge it anew; tell if that changes its grade, with what `happened` and what is so now."""
        endpoint.grade, why = endpoint.judge()
        if endpoint.grade is not endpoint.emitted_grade:
            endpoint.emitted_grade = endpoint.grade
            cause = why if happened in ("", why) else f"{happened}; {why}"
            self._emit(GradeChanged(endpoint=endpoint.name, grade=endpoint.grade, cause=cause))

    def _endpoint(self, name: str) -> Endpoint | None:
        endpoint = self._fleet.endpoints.get(name)
        self._count.stale_events += endpoint is None
        return endpoint

    # --- KV events ---

    def batch(self, event: EngineBatch) -> None:
        """A batch of its KV events came."""
        endpoint = self._endpoint(event.endpoint)
        if endpoint is None:
            return
        if endpoint.feed is None:
            self._count.stale_events += 1
            return
        sequence = endpoint.feed.sequence
        self._take(endpoint, sequence.replayed(event) if event.replayed else sequence.live(event), event.t)

    def replay_ended(self, event: ReplayEnded) -> None:
        """Missed batches were asked for: that is all of them."""
        endpoint = self._endpoint(event.endpoint)
        if endpoint is not None and endpoint.feed is not None:
            self._take(endpoint, endpoint.feed.sequence.replay_ended(event.t, event.ok), event.t)

    def residency(self, event: Residency) -> None:
        """What its KV events, or their end, changed."""
        endpoint = self._endpoint(event.endpoint)
        if endpoint is None or endpoint.feed is None:
            return
        known = len(endpoint.feed.tiers)
        endpoint.feed.change(event.changes)
        if len(endpoint.feed.tiers) != known:
            endpoint.see_tiers(self._fleet.tokens_of(endpoint))
        self._computing.announced(endpoint, event.t)
        self._grade(endpoint)

    def tick(self, t: float) -> None:
        """Time passed: batches that were waited for may be given up."""
        for endpoint in self._fleet.endpoints.values():
            if endpoint.feed is not None:
                step = endpoint.feed.sequence.tick(t)
                if step != Step():
                    self._take(endpoint, step, t)

    def _follow_events(self, endpoint: Endpoint, event: EndpointUp) -> None:
        """Begin to follow its KV events, or take them up again."""
        t = event.t
        resumed = event.has_events and not endpoint.has_events
        endpoint.has_events = event.has_events and bool(event.models)
        feed = endpoint.feed
        if feed is not None:
            feed.sequence.replay = event.has_replay
            self._changed(endpoint, feed.source.serve(list(event.models)), t)
        if not endpoint.has_events:
            return
        model = self._fleet.key_name(event.models[0])
        block_tokens = self._fleet.block_tokens(event.models[0])
        if feed is None or (feed.source.model, feed.source.block_tokens) != (model, block_tokens):
            feed = Feed(self._index, self._config, self._count, model, list(event.models), block_tokens)
            feed.sequence.replay = event.has_replay
            endpoint.attach(feed)
            if endpoint.lower is not None:
                endpoint.see_tiers(block_tokens)
            self._take(endpoint, feed.sequence.start(t), t)
        elif resumed or endpoint.suspect is not None:
            self._take(endpoint, feed.sequence.doubt(t, back=True), t)
        if resumed:
            endpoint.recall.clear()

    def _take(self, endpoint: Endpoint, step: Step, t: float) -> None:
        """Carry out what the order of its batches calls for."""
        feed = endpoint.feed
        assert feed is not None
        if step.forget is Forget.LIFE:
            self._new_life(endpoint, step.cause)
            endpoint.process_start_s = None
        elif step.forget is Forget.BLOCKS:
            feed.forget()
        changes = []
        for event in step.apply:
            changes += feed.read(event.batch)
        if step.replay_over:
            feed.source.drop_orphans()
        if step.ask_from is not None:
            self._emit(AskReplay(endpoint=endpoint.name, from_seq=step.ask_from))
        if step.wake_at is not None:
            self._emit(WakeAt(at=step.wake_at))
        if step.trusted:
            endpoint.suspect = None
        self._changed(endpoint, changes, t)
        self._grade(endpoint, step.cause)

    def _changed(self, endpoint: Endpoint, changes: list[Change], t: float) -> None:
        """Take over what KV events, or their end, changed; in recorded logs this stands for it."""
        if changes:
            residency = Residency(t=t, endpoint=endpoint.name, changes=changes)
            if self._observer is not None:
                self._observer(residency)
            self.residency(residency)


def _asks(endpoint: Endpoint) -> bool:
    """Whether missed events can be asked for: the answer says more than a start time does."""
    feed = endpoint.feed
    return feed is not None and endpoint.has_events and feed.sequence.replay


def _differ(known_s: float | None, said_s: float | None) -> bool:
    """Whether two process start times are of two processes. Not if one is unknown."""
    return known_s is not None and said_s is not None and abs(said_s - known_s) > SAME_START_S
