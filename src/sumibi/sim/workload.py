"""What is asked of a fleet: sessions of turns, with the blocks of every prompt and no text.

A workload is either *closed* (a number of users, each runs one session after another; a turn follows the
end of an earlier one after a think or tool time) or *open* (sessions start at given times, whatever the
fleet does). Trace readers and generators make workloads; the simulator and the cache arithmetic play them.
"""

from array import array
from dataclasses import dataclass, field

import msgspec


class Turn(msgspec.Struct, gc=False, kw_only=True):
    """One request of a session."""

    blocks: "array[int]"
    """Full blocks of its prompt in order, as indexes into `Session.keys` (typecode "I")."""
    tail: int | None = None
    """The partial last block, for traces that name it: cache arithmetic lets it take its place."""
    prompt_tokens: int
    output_tokens: int
    """What the engine will generate. No policy may see it."""
    after: int | None = None
    """Index of the turn of the session whose end it waits for; None: the session's start."""
    delay_s: float = 0.0
    """From that end (or start) to its arrival: think or tool time."""
    offset_ms: int = 0
    """Arrival after the session's start by the recorded clock, for arithmetic without a fleet."""
    agent: str = ""
    """Sub-agent that it belongs to; empty: the main thread."""
    max_tokens: int | None = None
    """The client's own limit on output."""


@dataclass(slots=True)
class Session:
    """One agent conversation, its sub-agents included."""

    name: str
    keys: list[int]
    """Routing keys of its distinct blocks. Sessions that share a block have the same key for it."""
    turns: list[Turn]
    start_s: float | None = None
    """When it starts (open loop); None: when a user is free (closed loop)."""
    model: str = "model"
    tenant: str = ""
    priority: int = 0
    stage: int = 0
    """Open loop: its `start_s` counts from the start of this stage, which begins when all requests of the
    stage before are over and a pause has passed.
    """
    named: bool = True
    """Its name is what its requests carry as a session id, where the workload `names_sessions`. False: the
    client gave none, and the name is a reader's.
    """

    def prompt_keys(self, turn: Turn) -> list[int]:
        """Routing keys of the turn's full blocks."""
        return list(map(self.keys.__getitem__, turn.blocks))


@dataclass(slots=True)
class Workload:
    """Sessions to play, in the order in which users take them."""

    name: str
    block_tokens: int
    sessions: list[Session] = field(default_factory=list)
    stage_gap_s: float = 30.0
    """Pause between two stages."""
    users: int | None = None
    """Closed loop: how many play it unless somebody says otherwise."""
    start_spread_s: float = 600.0
    """Closed loop: users start one after another within this time, in even steps."""
    pause_s: float = 30.0
    """Closed loop: a user's, between two sessions."""
    names_sessions: bool = False
    """Requests of `named` sessions carry a session id, as those of coding agents do. Else no policy may know
    it.
    """

    @property
    def requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(s.turns) for s in self.sessions)

    def session_id(self, session: Session) -> str:
        """What requests of this session carry; empty: nothing."""
        return session.name if self.names_sessions and session.named else ""
