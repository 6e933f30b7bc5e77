"""Order in one engine's stream of KV event batches: what to apply, what to ask for again, when to forget.

Batches carry a sequence number that starts at 0 with the engine process, and a digest. The stream may lose
batches, repeat them, and come from another process than before without saying so. This machine lets only
batches through that continue what was applied before, or says that the past is void:

| happening | answer |
|---|---|
| first connect, replay available | ask from 0, hold live batches back until the end mark |
| first connect, no replay | apply; complete only if the first batch is number 0 |
| next number | apply |
| same number and digest as before | drop |
| numbers missing, replay available | hold back, ask from the last one seen (its digest tells who answers) |
| numbers missing, no replay | apply, no longer complete |
| live numbers go back, or another digest under a known number | another process: forget, ask from 0 |
| the last one seen is absent from the replay | forget, go on from what is there |
| ... or differs | another process: forget, ask from 0 |
| replay fails (after some tries) | forget, follow the live batches, later ask for all of it again |
| more held back than allowed | drop those, the gap is noticed later |
| suspicion (broken connection, ...) | ask from the last one seen |
| the device cache is cleared | whatever was missed before no longer matters: complete |

It knows neither keys nor the index, only batches; who applies them clears first if told so.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from sumibi.routing.config import RouterConfig
from sumibi.routing.counters import Counters
from sumibi.routing.events import EngineBatch

REMEMBERED: Final = 256
"""Digests kept, to tell a repeated batch from another process's."""
REPLAY_LIMIT_S: Final = 120.0
"""A replay without end mark counts as failed after this time."""


NOT_HEARD: Final = "no KV events have come yet"


class Forget(Enum):
    """What a step says of the blocks known before it."""

    NOTHING = "nothing"
    BLOCKS = "blocks"
    """They can no longer be vouched for."""
    LIFE = "life"
    """Another process answers: they are gone, and with them whatever ran there."""


@dataclass(slots=True)
class Step:
    """What to do, in this order: forget, apply, ask, wake."""

    forget: Forget = Forget.NOTHING
    cause: str = ""
    apply: list[EngineBatch] = field(default_factory=list)
    ask_from: int | None = None
    wake_at: float | None = None
    trusted: bool = False
    """The process that answers is the one known (or a new one was begun with): suspicion is over."""
    replay_over: bool = False
    """Parents that have not come by now will not come."""


class Sequence:
    """The state of one source. Every method returns the `Step` that follows."""

    __slots__ = (
        "_ask_from_start",
        "_config",
        "_count",
        "_deadline_t",
        "_doubted",
        "_failures",
        "_held",
        "_missed",
        "_newest_live",
        "_rebuild",
        "_recent",
        "_retry_t",
        "_verified",
        "last",
        "replay",
    )

    def __init__(self, config: RouterConfig, count: Counters) -> None:
        self._config = config
        self._count = count
        self.replay = False
        """Batches can be asked for again."""
        self._deadline_t: float | None = None
        self._ask_from_start = False
        self._clear()

    def _clear(self) -> None:
        self.last: int | None = None
        """The last batch applied; -1: none, and none was missed; None: none, and unknown what was missed."""
        self._missed = NOT_HEARD
        self._doubted = False
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._held: dict[int, EngineBatch] = {}
        self._newest_live = -1
        self._verified = True
        self._rebuild = False
        self._failures = 0
        self._retry_t: float | None = None

    @property
    def gap(self) -> str:
        """Why what was applied may not be all that matters; empty: the index equals the cache."""
        if self.replaying:
            return "its KV events are being replayed"
        if self._doubted:
            return "it may be another process, and its KV events cannot be asked for again"
        return self._missed

    @property
    def replaying(self) -> bool:
        """Live batches are held back until a replay is over."""
        return self._deadline_t is not None or (self._retry_t is not None and not self._following)

    @property
    def _following(self) -> bool:
        """Given up on a replay for now: live batches are applied as they come."""
        return self._failures >= self._config.replay_attempts

    def start(self, t: float, *, cause: str = "", restarted: bool = False) -> Step:
        """Begin with a process of which nothing is known; `restarted`: another was known before."""
        asking = self._deadline_t is not None
        self._clear()
        step = Step(forget=Forget.LIFE if restarted else Forget.NOTHING, cause=cause, trusted=restarted)
        if asking:
            self._ask_from_start = True
        elif self.replay:
            self._ask(None, t, step)
        return step

    def doubt(self, t: float, *, back: bool = False) -> Step:
        """Something smells of a restart: ask who is there. `back`: it answers again, failures are past."""
        step = Step()
        if not self.replay:
            self._doubted = True
        elif self._deadline_t is None and (back or not self.replaying):
            self._failures = 0
            self._retry_t = None
            self._ask(self.last, t, step)
        return step

    def cleared(self) -> None:
        """The device cache was emptied by an event just applied."""
        self._missed = ""

    def live(self, event: EngineBatch) -> Step:
        """A batch from the subscription."""
        t, seq = event.t, event.batch.seq
        known = self._recent.get(seq)
        if known is None and seq in self._held:
            known = self._held[seq].digest
        if known == event.digest:
            self._count.batches_repeated += 1
            return Step()
        missing = self.replaying and (self.last is None or seq > self.last)
        if known is not None or (seq <= self._newest_live and not missing):
            return self._begin_with(event, "the event sequence went back")
        self._newest_live = max(self._newest_live, seq)
        if self.last is not None and seq <= self.last:
            self._count.batches_repeated += 1
            return Step()
        step = Step()
        if self.replaying:
            self._hold(event)
        elif self.last is None:
            self._missed = _missed_before(seq)
            self._apply(event, step)
            step.trusted = True
        elif seq == self.last + 1:
            self._apply(event, step)
            self._doubted = False
            step.trusted = True
        elif self.replay and not self._following:
            self._hold(event)
            self._ask(self.last, t, step)
        else:
            self._missed = f"KV event batches between {self.last} and {seq} were missed"
            self._apply(event, step)
        return step

    def replayed(self, event: EngineBatch) -> Step:
        """A batch from the replay that was asked for."""
        step = Step()
        seq = event.batch.seq
        if self._deadline_t is None or self._ask_from_start:
            self._count.stale_events += 1
            return step
        if self._rebuild:
            self._rebuild = False
            self._forget_blocks(step, "all events are replayed")
        if not self._verified and self.last is not None and seq >= self.last:
            self._verified = True
            if seq > self.last:
                self._forget_blocks(step, f"batch {self.last} is no longer known to the engine")
            elif event.digest != self._recent.get(seq):
                self._forget_life(step, f"batch {seq} is another one now")
                self._ask_from_start = True
                return step
        if self.last is None:
            self._missed = _missed_before(seq)
            self._apply(event, step)
        elif seq <= self.last:
            self._count.batches_repeated += 1
        elif seq == self.last + 1:
            self._apply(event, step)
        else:
            self._hold(event)
        return step

    def replay_ended(self, t: float, ok: bool) -> Step:
        """The end mark of the replay that was asked for (`ok`), or its failure."""
        step = Step()
        if self._deadline_t is None:
            self._count.stale_events += 1
            return step
        self._deadline_t = None
        if self._ask_from_start:
            self._ask(None, t, step)
        elif not ok:
            self._failed(t, step)
        elif not self._verified and self.last is not None and self.last >= 0:
            self._forget_life(step, f"batch {self.last} is unknown to the engine")
            self._ask(None, t, step)
        else:
            if self._rebuild:
                self._rebuild = False
                self._forget_blocks(step, "the engine has published no events")
            if self.last is None:
                self.last = -1
                self._missed = ""
            step.trusted = True
            self._release(t, step)
        return step

    def tick(self, t: float) -> Step:
        """Time passed: retries and limits."""
        step = Step()
        if self._deadline_t is not None and t >= self._deadline_t:
            return self.replay_ended(t, ok=False)
        if self._retry_t is not None and t >= self._retry_t:
            self._retry_t = None
            if self._following:
                self._failures = 0
                self._rebuild = True
            self._ask(self.last, t, step)
        return step

    # --- steps ---

    def _apply(self, event: EngineBatch, step: Step) -> None:
        step.apply.append(event)
        self.last = event.batch.seq
        self._recent[event.batch.seq] = event.digest
        if len(self._recent) > REMEMBERED:
            self._recent.popitem(last=False)

    def _hold(self, event: EngineBatch) -> None:
        if len(self._held) >= self._config.max_buffered_batches:
            self._count.batches_dropped += len(self._held)
            self._held.clear()
        self._held[event.batch.seq] = event

    def _ask(self, seq: int | None, t: float, step: Step) -> None:
        """Ask for all batches from the last one applied on, or from 0 if there is none."""
        self._ask_from_start = False
        self._deadline_t = step.wake_at = t + REPLAY_LIMIT_S
        self._verified = self._rebuild or seq is None or seq < 0
        self._count.replays_asked += 1
        step.ask_from = 0 if self._verified else seq

    def _begin_with(self, event: EngineBatch, cause: str) -> Step:
        """A live batch is the first that is seen of another process."""
        step = self.start(event.t, cause=cause, restarted=True)
        self._newest_live = event.batch.seq
        if self.replaying:
            self._hold(event)
        else:
            self._missed = _missed_before(event.batch.seq)
            self._apply(event, step)
        return step

    def _forget_blocks(self, step: Step, cause: str) -> None:
        step.forget, step.cause = Forget.BLOCKS, cause
        self.last = None
        self._missed = cause
        self._recent.clear()

    def _forget_life(self, step: Step, cause: str) -> None:
        self._forget_blocks(step, cause)
        step.forget = Forget.LIFE
        # Nobody knows which process sent what is held back; what matters of it is asked for again.
        self._held.clear()
        self._newest_live = -1

    def _failed(self, t: float, step: Step) -> None:
        self._count.replays_failed += 1
        self._failures += 1
        config = self._config
        if not self._following:
            self._retry_t = step.wake_at = t + config.replay_retry_s * 2 ** (self._failures - 1)
            return
        self._retry_t = step.wake_at = t + config.replay_cooldown_s
        if not self._rebuild:
            self._forget_blocks(step, "missed events could not be replayed")
        self._rebuild = False
        self._release(t, step)

    def _release(self, t: float, step: Step) -> None:
        """The replay is over: apply what was held back, as far as it continues."""
        step.replay_over = True
        for seq in sorted(self._held):
            if self.last is not None and seq <= self.last:
                del self._held[seq]
                continue
            if self.last is None:
                self._missed = _missed_before(seq)
            elif seq > self.last + 1:
                if not self._following:
                    self._failures += 1
                if not self._following:
                    self._ask(self.last, t, step)
                    return
                self._missed = f"KV event batches between {self.last} and {seq} were missed"
                self._retry_t = step.wake_at = t + self._config.replay_cooldown_s
            self._apply(self._held.pop(seq), step)
        if not self._following:
            self._failures = 0


def _missed_before(seq: int) -> str:
    """What is missing if `seq` is the first batch that was seen."""
    return f"KV event batches before {seq} were missed" if seq else ""
