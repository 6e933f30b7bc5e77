"""Bailian traces (qwen-bailian-usagetraces-anon): chats whose turns name the one before, blocks of 16 tokens.

Ids hold for the whole trace. When an answer was complete is not recorded: a turn follows the end of its
parent by the time between both arrivals, a little later than in life.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from sumibi.bench.traces.conversations import SessionBlocks
from sumibi.bench.traces.lines import BlockId, Clock, OutputTokens, PromptTokens, decode
from sumibi.bench.traces.mooncake import one_turn
from sumibi.sim.workload import Session, Workload

BLOCK_TOKENS = 16


class _Request(msgspec.Struct):
    chat_id: int | str
    timestamp: Clock
    """Seconds."""
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[BlockId]
    parent_chat_id: int | str | None = None
    """-1 or nothing: the first turn."""


_decoder = msgspec.json.Decoder(_Request)


def matches(record: dict[str, object]) -> bool:
    """True if the first record of a file is of this format."""
    return {"chat_id", "input_length", "hash_ids"} <= record.keys()


def read(path: Path, lines: Iterable[tuple[int, bytes]]) -> Workload:
    """All chats of a file; their first turns in an open loop. A turn whose parent is not in the file is a
    first one.
    """
    workload = Workload(path.name.partition(".")[0], BLOCK_TOKENS)
    turns: dict[int | str, tuple[SessionBlocks, int, float, float]] = {}
    """Of each chat id: its session, its turn's index there, its arrival, its session's."""
    first_s: float | None = None
    for number, line in lines:
        request = decode(_decoder, path, number, line)
        first_s = request.timestamp if first_s is None else first_s
        turn, keys = one_turn(path, number, request.hash_ids, request.input_length, BLOCK_TOKENS)
        turn.output_tokens = request.output_length
        parent = None if request.parent_chat_id is None else turns.get(request.parent_chat_id)
        if parent is None:
            start_s = max(request.timestamp - first_s, 0.0)
            session = Session(name=f"chat-{request.chat_id}", keys=[], turns=[], start_s=start_s)
            workload.sessions.append(session)
            blocks, began_s = SessionBlocks(session), request.timestamp
        else:
            blocks, turn.after, parent_s, began_s = parent
            session = blocks.session
            turn.delay_s = max(request.timestamp - parent_s, 0.0)
            turn.offset_ms = max(round(1000 * (request.timestamp - began_s)), 0)
        every = blocks.blocks(keys)
        turn.blocks, tail = every[: len(turn.blocks)], turn.tail
        turn.tail = None if tail is None else every[-1]
        session.turns.append(turn)
        turns[request.chat_id] = (blocks, len(session.turns) - 1, request.timestamp, began_s)
    return workload
