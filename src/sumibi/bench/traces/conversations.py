"""From single requests to conversations, for logs that hold requests in any order and name no turns.

A request continues a conversation if it names the same one, or, where nothing is named, if its prompt
begins with the whole prompt of a conversation's latest turn, is longer, and came after that turn's end.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from sumibi.sim.workload import Session, Turn, Workload


@dataclass(slots=True)
class Asked:
    """One request of a log."""

    start_s: float
    """Arrival on the log's clock."""
    keys: list[int]
    """Chained keys of its full blocks."""
    prompt_tokens: int
    output_tokens: int | None
    """None: the log does not say."""
    end_s: float | None = None
    conversation: str = ""
    """As named by the client; empty: to be recognised."""
    max_tokens: int | None = None
    model: str = "model"
    tenant: str = ""
    priority: int = 0


class SessionBlocks:
    """A session that grows, and where each of its blocks is in `Session.keys`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._at: dict[int, int] = {}

    def blocks(self, keys: Sequence[int]) -> "array[int]":
        """Indexes of these keys, new ones added."""
        at, known = self._at, self.session.keys
        for key in keys:
            if key not in at:
                at[key] = len(known)
                known.append(key)
        return array("I", map(at.__getitem__, keys))


@dataclass(slots=True)
class _Open:
    """A conversation that may go on."""

    blocks: SessionBlocks
    began_s: float
    latest: Asked
    latest_blocks: int = 0


@dataclass(slots=True)
class Conversations:
    """Collects requests; `workload` puts them together."""

    asked: list[Asked] = field(default_factory=list)

    def workload(self, name: str, block_tokens: int) -> Workload:
        """Conversations as sessions of an open loop, from the first arrival on.

        Output lengths that the log does not have are taken to be the mean of the others. Policies get the
        session ids that clients gave, and none where they gave none.
        """
        self.asked.sort(key=lambda one: one.start_s)
        known = [one.output_tokens for one in self.asked if one.output_tokens is not None]
        usual = round(sum(known) / len(known)) if known else 1
        carried = any(one.conversation for one in self.asked)
        workload = Workload(name, block_tokens, names_sessions=carried)
        by_name: dict[str, _Open] = {}
        by_end: dict[int, _Open] = {}
        for one in self.asked:
            found = by_name.get(one.conversation) if one.conversation else _continued(by_end, one)
            if found is None:
                start_s = one.start_s - self.asked[0].start_s
                session = Session(
                    name=one.conversation or f"conversation-{len(workload.sessions) + 1}",
                    keys=[],
                    turns=[],
                    start_s=start_s,
                    model=one.model,
                    tenant=one.tenant,
                    priority=one.priority,
                    named=bool(one.conversation),
                )
                workload.sessions.append(session)
                found = _Open(SessionBlocks(session), one.start_s, one)
                if one.conversation:
                    by_name[one.conversation] = found
            _append(found, one, usual)
            if one.keys and not one.conversation:
                by_end[one.keys[-1]] = found
        return workload


def _continued(by_end: dict[int, _Open], one: Asked) -> _Open | None:
    for blocks in range(len(one.keys) - 1, 0, -1):
        found = by_end.get(one.keys[blocks - 1])
        if found is not None and found.latest_blocks == blocks:
            end_s = found.latest.end_s
            if one.start_s >= (found.latest.start_s if end_s is None else end_s):
                return found
    return None


def _append(found: _Open, one: Asked, usual_output_tokens: int) -> None:
    session, before = found.blocks.session, found.latest
    delay_s, offset_ms = 0.0, 0
    if session.turns:
        delay_s = one.start_s - (before.start_s if before.end_s is None else before.end_s)
        offset_ms = round(1000 * (one.start_s - found.began_s))
    session.turns.append(
        Turn(
            blocks=found.blocks.blocks(one.keys),
            prompt_tokens=one.prompt_tokens,
            output_tokens=usual_output_tokens if one.output_tokens is None else one.output_tokens,
            after=len(session.turns) - 1 if session.turns else None,
            delay_s=max(delay_s, 0.0),
            offset_ms=offset_ms,
            max_tokens=one.max_tokens,
        )
    )
    found.latest, found.latest_blocks = one, len(one.keys)
