"""Azure LLM traces (CSV): when requests came and how long they were; nothing of their prefixes is known.

So no block is ever seen twice: good for load, useless for caches.
"""

import csv
from array import array
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from sumibi.bench.traces.lines import MAX_TOKENS, trace_error
from sumibi.sim.workload import Session, Turn, Workload

BLOCK_TOKENS = 64
"""Any size would do."""
_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def matches_header(line: bytes) -> bool:
    """True if the first line of a file is this format's."""
    return line.strip().lstrip(b"\xef\xbb\xbf").decode("latin-1").split(",")[:3] == _COLUMNS


def read(path: Path, lines: Iterable[tuple[int, bytes]]) -> Workload:
    """All requests of a file, in an open loop."""
    workload = Workload(path.name.partition(".")[0], BLOCK_TOKENS)
    begin: datetime | None = None
    made = 0
    for number, line in lines:
        if number == 1:
            continue
        row = next(csv.reader([line.decode("latin-1")]))
        try:
            # seven decimals are written, Python reads six
            when = datetime.fromisoformat(row[0].partition("+")[0][:26])
            prompt_tokens, output_tokens = int(row[1]), int(row[2])
        except (ValueError, IndexError) as cause:
            raise trace_error(path, number, f"needs {','.join(_COLUMNS)}: {cause}") from cause
        if not 1 <= prompt_tokens <= MAX_TOKENS or not 0 <= output_tokens <= MAX_TOKENS:
            raise trace_error(path, number, f"tokens must be 1 to {MAX_TOKENS} (`GeneratedTokens` from 0)")
        begin = begin or when
        blocks = prompt_tokens // BLOCK_TOKENS
        turn = Turn(
            blocks=array("I", range(blocks)), prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )
        keys = list(range(made, made + blocks))
        made += blocks
        start_s = (when - begin).total_seconds()
        workload.sessions.append(Session(name=f"request-{number}", keys=keys, turns=[turn], start_s=start_s))
    workload.sessions.sort(key=lambda session: session.start_s or 0.0)
    return workload
