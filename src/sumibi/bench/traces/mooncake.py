"""Mooncake traces: one request a line, blocks of 512 tokens with ids that hold for the whole trace.

Of each prompt the ids of all blocks are named, a partial last one among them. Which requests belong to one
conversation is not said: each is a session of its own that starts at its recorded time.
"""

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from sumibi.bench.traces.lines import BlockId, Clock, OutputTokens, PromptTokens, decode, trace_error
from sumibi.sim.workload import Session, Turn, Workload

BLOCK_TOKENS = 512


class _Request(msgspec.Struct):
    timestamp: Clock
    """Milliseconds."""
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[BlockId]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = BLOCK_TOKENS
    """Not in the published files; kvcache-simulator's dialect has it."""


_decoder = msgspec.json.Decoder(_Request)


def matches(record: dict[str, object]) -> bool:
    """True if the first record of a file is of this format."""
    return {"timestamp", "input_length", "hash_ids"} <= record.keys() and "chat_id" not in record


def read(path: Path, lines: Iterable[tuple[int, bytes]]) -> Workload:
    """All requests of a file, in an open loop."""
    workload = Workload(path.name.partition(".")[0], BLOCK_TOKENS)
    first_ms: float | None = None
    for number, line in lines:
        request = decode(_decoder, path, number, line)
        size = request.block_size
        if first_ms is None:
            first_ms = request.timestamp
            workload.block_tokens = size
        if size != workload.block_tokens:
            raise trace_error(
                path, number, f"`block_size` is {size}, the first line's {workload.block_tokens}"
            )
        start_s = (request.timestamp - first_ms) / 1000
        turn, keys = one_turn(path, number, request.hash_ids, request.input_length, size)
        turn.output_tokens = request.output_length
        workload.sessions.append(Session(name=f"request-{number}", keys=keys, turns=[turn], start_s=start_s))
    workload.sessions.sort(key=lambda session: session.start_s or 0.0)
    return workload


def one_turn(path: Path, number: int, ids: list[int], tokens: int, size: int) -> tuple[Turn, list[int]]:
    """A turn whose prompt has these global block ids (the last may be partial), and its keys."""
    full = tokens // size
    if not full <= len(ids) <= -(-tokens // size):
        raise trace_error(path, number, f"`input_length` {tokens} needs {-(-tokens // size)} `hash_ids` of"
                          f" {size} tokens, not {len(ids)}")  # fmt: skip
    keys = [xxh3_64_intdigest(block.to_bytes(8, "little", signed=True)) for block in ids]
    turn = Turn(
        blocks=array("I", range(full)),
        tail=full if len(ids) > full else None,
        prompt_tokens=tokens,
        output_tokens=0,
    )
    return turn, keys
