"""Who asks what when: sessions played turn by turn, by users or by the clock."""

from array import array
from collections.abc import Callable, Iterable
from random import Random

from sumibi.core.errors import ConfigError
from sumibi.sim.workload import Session, Turn, Workload


class Playing:
    """A session under way."""

    __slots__ = ("_last", "followers", "left", "session", "stage")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.left = len(session.turns)
        self.stage = session.stage
        self.followers: dict[int | None, list[int]] = {}
        """Turns by the turn whose end they wait for."""
        for i, turn in enumerate(session.turns):
            self.followers.setdefault(turn.after, []).append(i)
        self._last: dict[str, tuple[array[int], list[int]]] = {}
        """Of each agent: blocks and keys of its last prompt."""

    def prompt_keys(self, turn: Turn) -> list[int]:
        """Routing keys of the turn's full blocks; those it shares with the turn before are not looked up."""
        blocks, same = turn.blocks, 0
        last = self._last.get(turn.agent)
        if last is None:
            keys = self.session.prompt_keys(turn)
        else:
            before, known = last
            same = min(len(blocks), len(before))
            while same and blocks[:same] != before[:same]:
                same //= 2
            keys = known[:same]
            keys.extend(map(self.session.keys.__getitem__, blocks[same:]))
        self._last[turn.agent] = (blocks, keys)
        return keys


class Player:
    """Starts sessions and turns. `arrive(t, playing, turn index)` is told of arrivals as they get known,
    `t` never before the present.
    """

    def __init__(
        self,
        workload: Workload,
        users: int | None,
        seed: int,
        arrive: Callable[[float, Playing, int], None],
    ) -> None:
        self._arrive = arrive
        self.left = sum(len(session.turns) for session in workload.sessions)
        """Turns that are not over."""
        waiting = [s for s in workload.sessions if s.start_s is None]
        if waiting and not users:
            raise ConfigError(f"workload {workload.name!r} is played by users: say how many")
        self._workload = workload
        self._stages: dict[int, list[Session]] = {}
        self._stage_left: dict[int, int] = {}
        for session in workload.sessions:
            if session.start_s is not None and session.turns:
                self._stages.setdefault(session.stage, []).append(session)
                left = self._stage_left.get(session.stage, 0)
                self._stage_left[session.stage] = left + len(session.turns)
        self._queue = waiting
        if seed:
            Random(seed).shuffle(self._queue)
        self._queue.reverse()
        self._users = users or 0

    def begin(self) -> None:
        """Start what starts by itself: the users, and the first stage."""
        for user in range(min(self._users, len(self._queue))):
            self._next_session(user * self._workload.start_spread_s / self._users)
        self._next_stage(0.0)

    def over(self, t: float, playing: Playing, index: int) -> None:
        """A turn ended, well or badly: whoever waited for it goes on."""
        self.left -= 1
        playing.left -= 1
        self._follow(t, playing, index)
        session = playing.session
        if session.start_s is None:
            if not playing.left:
                self._next_session(t + self._workload.pause_s)
            return
        left = self._stage_left[session.stage] = self._stage_left[session.stage] - 1
        if not left:
            del self._stage_left[session.stage]
            self._next_stage(t + self._workload.stage_gap_s)

    def _follow(self, t: float, playing: Playing, index: int | None) -> None:
        for follower in playing.followers.get(index, ()):
            turn: Turn = playing.session.turns[follower]
            self._arrive(t + turn.delay_s, playing, follower)

    def _next_session(self, t: float) -> None:
        while self._queue:
            session = self._queue.pop()
            if session.turns:
                self._follow(t, Playing(session), None)
                return

    def _next_stage(self, t: float) -> None:
        if self._stages:
            sessions: Iterable[Session] = self._stages.pop(min(self._stages))
            for session in sessions:
                assert session.start_s is not None
                self._follow(t + session.start_s, Playing(session), None)
