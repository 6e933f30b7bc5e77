"""Recorded traffic, whatever wrote it, as a workload: `read(path)`.

The format is seen from the content. Every reader streams, keeps no text, and names file, line and field
of what it cannot use.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from sumibi.bench.traces import access_log, azure, bailian, mooncake, recording, weka
from sumibi.bench.traces.lines import TraceError, read_lines, trace_error
from sumibi.sim.workload import Workload

__all__ = ["FORMATS", "TraceError", "read", "read_all"]

Reader = Callable[[Path, Iterable[tuple[int, bytes]]], Workload]

FORMATS: dict[str, tuple[Callable[[dict[str, object]], bool], Reader]] = {
    "weka": (weka.matches, weka.read),
    "mooncake": (mooncake.matches, mooncake.read),
    "bailian": (bailian.matches, bailian.read),
    "access-log": (access_log.matches, access_log.read),
    "recording": (recording.matches, recording.read),
    "azure": (lambda record: False, azure.read),
}
"""Name -> (does the first record look like it, the reader)."""


def read(path: Path, format: str | None = None) -> Workload:
    """The workload in one file (plain, .gz or .xz). `format`: one of FORMATS; None: by content.

    Raises TraceError naming file, line and field.
    """
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise trace_error(path, 0, "is empty")
    name = format or _recognise(path, *first)
    if name not in FORMATS:
        raise trace_error(path, 0, f"unknown format {name!r}; allowed: {', '.join(FORMATS)}")
    return FORMATS[name][1](path, _from(first, lines))


def read_all(paths: list[Path], format: str | None = None) -> Workload:
    """Several files as one workload: their sessions one after another. Raises TraceError."""
    first, *others = (read(path, format) for path in paths)
    for each in (first, *others):
        for session in each.sessions:
            # where another file's requests carry session ids, this one's still do not
            session.named = bool(each.session_id(session))
    first.names_sessions = any(each.names_sessions for each in (first, *others))
    for path, other in zip(paths[1:], others, strict=True):
        if other.block_tokens != first.block_tokens:
            raise trace_error(path, 0, f"has blocks of {other.block_tokens} tokens, {paths[0]} of"
                              f" {first.block_tokens}: replay them one by one")  # fmt: skip
        first.sessions += other.sessions
    return first


def _from(first: tuple[int, bytes], lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    return chain((first,), lines)


def _recognise(path: Path, number: int, line: bytes) -> str:
    if azure.matches_header(line):
        return "azure"
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        record = None
    if isinstance(record, dict):
        for name, (matches, _) in FORMATS.items():
            if matches(record):
                return name
    raise trace_error(path, number, f"is of no known format; --format names one of {', '.join(FORMATS)}")
