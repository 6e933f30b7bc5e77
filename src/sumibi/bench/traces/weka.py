"""WEKA agent traces (kv-cache-tester): one recorded Claude Code session a line, or a file.

Blocks have ids of the session's own; of each prompt the full blocks only. Sub-agents nest in the session
and share its ids. The format has no text. Optional in the data, so here: `api_time`, `think_time`.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from sumibi.bench.traces.lines import BlockId, Clock, OutputTokens, PromptTokens, decode, trace_error
from sumibi.sim.workload import Session, Turn, Workload

MAX_GAP_S = 300.0
"""Longer pauses (the person went for lunch) are cut to this, by the clock and by the gaps alike."""


class _Entry(msgspec.Struct, tag_field="type"):
    t: Clock
    """Seconds since the session's start, in a sub-agent since the sub-agent's."""


class _Request(_Entry):
    input_tokens: PromptTokens = msgspec.field(name="in")
    output_tokens: OutputTokens = msgspec.field(name="out")
    hash_ids: list[BlockId]
    api_time: Clock | None = None
    think_time: Clock | None = None
    """Seconds between the end of the request before and this one."""


class _Plain(_Request, tag="n"):
    pass


class _Streamed(_Request, tag="s"):
    pass


class _Subagent(_Entry, tag="subagent"):
    agent_id: str
    requests: list[_Plain | _Streamed]


class _Session(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    requests: list[_Plain | _Streamed | _Subagent]
    tool_tokens: OutputTokens = 0
    system_tokens: OutputTokens = 0


_decoder = msgspec.json.Decoder(_Session)


def matches(record: dict[str, object]) -> bool:
    """True if the first record of a file is of this format."""
    return "requests" in record and "block_size" in record


def read(path: Path, lines: Iterable[tuple[int, bytes]], *, shared_prefix: bool = False) -> Workload:
    """All sessions of a file, to be played by users in a closed loop.

    `shared_prefix`: assume that sessions with equal token counts of their tools (and of their system
    prompt) have the same tools (and system prompt). The ids are local to a session, so a trace cannot tell.
    """
    # Claude Code sends the id of its session with every request.
    workload = Workload(path.name.partition(".")[0], 0, names_sessions=True)
    for number, line in lines:
        recorded = decode(_decoder, path, number, line)
        if workload.block_tokens not in (0, recorded.block_size):
            raise trace_error(path, number, f"`block_size` is {recorded.block_size}, others' is"
                              f" {workload.block_tokens}; read them as files of their own")  # fmt: skip
        workload.block_tokens = recorded.block_size
        workload.sessions.append(_session(path, number, recorded, shared_prefix))
    return workload


class _Keys:
    """Routing keys of one session's blocks, and where each is in `Session.keys`."""

    def __init__(self, recorded: _Session, *, shared_prefix: bool) -> None:
        self.keys: list[int] = []
        self._at: dict[int, int] = {}
        self._seed = xxh3_64_intdigest(recorded.id.encode())
        self._prefix: array[int] = array("I")
        if shared_prefix:
            tool, system = recorded.tool_tokens, recorded.system_tokens
            size = recorded.block_size
            for j in range((tool + system) // size):
                whose = f"tools {tool}" if (j + 1) * size <= tool else f"tools {tool}, system {system}"
                self.keys.append(
                    xxh3_64_intdigest(j.to_bytes(8, "little"), xxh3_64_intdigest(whose.encode()))
                )
            self._prefix = array("I", range(len(self.keys)))

    def blocks(self, ids: Sequence[int], *, main: bool) -> "array[int]":
        """A prompt's blocks as indexes into `keys`, those never seen before added."""
        shared = self._prefix[: len(ids)] if main else array("I")
        if shared:
            ids = ids[len(shared) :]
        at = self._at
        for block in [one for one in ids if one not in at]:
            if block not in at:
                at[block] = len(self.keys)
                self.keys.append(xxh3_64_intdigest(block.to_bytes(8, "little", signed=True), self._seed))
        return shared + array("I", map(at.__getitem__, ids))


def _session(path: Path, number: int, recorded: _Session, shared_prefix: bool) -> Session:
    keys = _Keys(recorded, shared_prefix=shared_prefix)
    turns: list[Turn] = []
    for entry, agent, after, delay_s, offset_ms in _in_order(recorded.requests):
        full = entry.input_tokens // recorded.block_size
        if not full <= len(entry.hash_ids) <= full + 1:
            raise trace_error(path, number, f"a request of {entry.input_tokens} tokens (`in`) has"
                              f" {len(entry.hash_ids)} `hash_ids`, {full} are allowed")  # fmt: skip
        blocks = keys.blocks(entry.hash_ids[:full], main=not agent)
        turns.append(
            Turn(
                blocks=blocks,
                prompt_tokens=entry.input_tokens,
                output_tokens=entry.output_tokens,
                after=after,
                delay_s=delay_s,
                offset_ms=offset_ms,
                agent=agent,
            )
        )
    return Session(name=recorded.id, keys=keys.keys, turns=turns)


_Placed = tuple[_Request, str, int | None, float, int]
"""A request, its sub-agent, the turn it waits for, from whose end how long, its offset by the clock."""


def _in_order(entries: Sequence[_Plain | _Streamed | _Subagent]) -> Iterator[_Placed]:
    """Requests in file order, sub-agents' where their entry is.

    A sub-agent runs beside the main thread: its first request waits for the main request before its entry,
    the others for one another; the main thread does not wait for it.
    """
    clock = _Clock(0)
    last: _Request | None = None
    last_index: int | None = None
    index = 0
    for entry in entries:
        offset_ms = clock.at(entry.t)
        if isinstance(entry, _Subagent):
            inner = _Clock(offset_ms)
            before, before_index = last, last_index
            for request in entry.requests:
                first = request is entry.requests[0]
                t = entry.t + request.t if first else request.t
                delay_s = _gap_s(before, t, None if first else request.think_time)
                yield request, entry.agent_id, before_index, delay_s, inner.at(request.t)
                before, before_index = request, index
                index += 1
        else:
            yield entry, "", last_index, _gap_s(last, entry.t, entry.think_time), offset_ms
            last, last_index = entry, index
            index += 1


def _gap_s(before: _Request | None, t: float, think_time: float | None) -> float:
    """Think or tool time: as recorded, else from the start of the one before and how long that took."""
    if before is None:
        return 0.0 if think_time is None else _clip(think_time)
    if think_time is not None:
        return _clip(think_time)
    return _clip(t - before.t - (before.api_time or 0.0))


def _clip(gap_s: float) -> float:
    return min(max(gap_s, 0.0), MAX_GAP_S)


class _Clock:
    """Recorded arrivals with long gaps cut, whole milliseconds."""

    def __init__(self, start_ms: int) -> None:
        self._offset_ms = start_ms
        self._last_ms: int | None = None

    def at(self, t: float) -> int:
        """Offset of the arrival recorded at `t` seconds."""
        ms = round(1000 * t)
        if self._last_ms is not None:
            self._offset_ms += min(ms - self._last_ms, round(1000 * MAX_GAP_S))
        self._last_ms = ms
        return self._offset_ms
