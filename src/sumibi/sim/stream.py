"""One engine's KV events on their way to the router: numbered, delayed, lost, asked for again.

The router gets them as recorded logs hold them: a batch with its number and no events, followed by what the
batch meant for the index (`Residency`), so that no token ids need to exist. While a replay is under way the
router holds live batches back; what they mean is told when it has taken them.
"""

from collections import deque
from collections.abc import Callable
from math import inf

from sumibi.core.kvevents import EventBatch
from sumibi.routing.events import Change, EngineBatch, Event, ReplayEnded, Residency

KEPT_BATCHES = 10_000
"""For replays, by the engine: the oldest are forgotten."""

Batch = tuple[int, float, list[Change]]
"""(sequence number, time of the step's end, what changed)."""


class Stream:
    """The events of one endpoint. `tell` gives the router an event; `last_taken` says which batch of this
    endpoint it has applied last (None: none).
    """

    __slots__ = (
        "_applied",
        "_asked",
        "_kept",
        "_last_taken",
        "_next",
        "_pending",
        "_tell",
        "endpoint",
        "life",
        "lost_until_s",
    )

    def __init__(
        self,
        endpoint: str,
        replayable: bool,
        tell: Callable[[Event], None],
        last_taken: Callable[[str], int | None],
    ) -> None:
        self.endpoint = endpoint
        self.life = 0
        """Of the process: numbers start anew with it."""
        self.lost_until_s = -inf
        """Batches sent until then do not arrive."""
        self._tell, self._last_taken = tell, last_taken
        self._kept: deque[Batch] = deque(maxlen=KEPT_BATCHES if replayable else 0)
        self._next = 0
        self._asked = 0
        """Replays asked for and not yet answered."""
        self._pending: dict[int, list[Change]] = {}
        """Batches told of whose meaning the router has not been told."""
        self._applied = -1

    def restart(self) -> None:
        """Another process."""
        self.life += 1
        self._next = 0
        self._applied = -1
        self._kept.clear()
        self._pending.clear()

    def publish(self, changes: list[Change], t: float) -> Batch | None:
        """A batch to be delivered; None if it gets lost."""
        batch = (self._next, t, changes)
        self._next += 1
        self._kept.append(batch)
        return batch if t >= self.lost_until_s else None

    def deliver(self, batch: Batch, t: float) -> None:
        """A live batch arrives."""
        self._give(batch, t, replayed=False)
        if self._asked:
            self._pending[batch[0]] = batch[2]
        else:
            self._applied = batch[0]
            self._tell(Residency(t=t, endpoint=self.endpoint, changes=batch[2]))

    def asked(self) -> None:
        """The router wants a replay."""
        self._asked += 1

    def replay(self, from_seq: int, t: float, *, alive: bool) -> None:
        """The answer to a replay: all that is kept from `from_seq` on, and the end mark if it is alive."""
        kept = [batch for batch in self._kept if batch[0] >= from_seq] if alive else []
        for batch in kept:
            self._give(batch, t, replayed=True)
            self._pending.setdefault(batch[0], batch[2])
        self._asked -= 1
        self._tell(ReplayEnded(t=t, endpoint=self.endpoint, ok=alive))
        last = self._last_taken(self.endpoint)
        if last is None:
            return
        for number in sorted(number for number in self._pending if number <= last):
            changes = self._pending.pop(number)
            if number > self._applied:
                self._applied = number
                self._tell(Residency(t=t, endpoint=self.endpoint, changes=changes))

    def _give(self, batch: Batch, t: float, *, replayed: bool) -> None:
        number, sent_s, _ = batch
        self._tell(
            EngineBatch(
                t=t,
                endpoint=self.endpoint,
                batch=EventBatch(seq=number, ts=sent_s, events=[]),
                digest=self.life << 40 | number,
                replayed=replayed,
            )
        )
