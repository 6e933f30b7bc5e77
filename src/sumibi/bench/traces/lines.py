"""Opening a trace: plain, gzip or xz, a line at a time, with errors that name file, line and field."""

import gzip
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, TypeVar, cast

import msgspec

from sumibi.core.errors import BadRequest

T = TypeVar("T")

_MAX_LINE_BYTES = 256 * 1024 * 1024
"""A session of 3,000 turns with a million tokens each is one WEKA line of some 200 MB."""


MAX_TOKENS = 100_000_000
"""Of one prompt or answer; more is a mistake in the file, and would take the memory of this machine."""

PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
BlockId = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Clock = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""A time or duration, in whatever unit."""


class TraceError(BadRequest):
    """A trace cannot be read; the message names file, line, field and what to do."""

    code = "bad_trace"


def trace_error(path: Path, line: int, problem: str) -> TraceError:
    """An error of one line (from 1); line 0: of the file."""
    where = f"{path}, line {line}" if line else str(path)
    return TraceError(f"{where}: {problem}")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a file with their numbers (from 1), decompressed on the way; empty ones are left out.

    A file that is one JSON document over several lines comes as one line. Raises TraceError.
    """
    try:
        with _open(path) as file:
            yield from _lines(path, file)
    except FileNotFoundError:
        raise trace_error(path, 0, "there is no such file") from None
    except IsADirectoryError:
        raise trace_error(path, 0, "is a directory; name the files in it (for example DIR/*.json)") from None
    except (OSError, EOFError, lzma.LZMAError) as cause:
        raise trace_error(path, 0, f"cannot be read: {cause}") from cause


def decode(decoder: "msgspec.json.Decoder[T]", path: Path, number: int, line: bytes) -> T:
    """One record. Raises TraceError with the field that does not fit."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as cause:
        raise trace_error(path, number, str(cause)) from cause
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise trace_error(path, number, f"is not JSON: {cause}") from cause


def _open(path: Path) -> IO[bytes]:
    """By content, not by name: xz and gzip start with marks of their own."""
    with path.open("rb") as file:
        start = file.read(6)
    if start == b"\xfd7zXZ\x00":
        return lzma.open(path, "rb")
    if start[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(_MAX_LINE_BYTES):
        number += 1
        if len(line) == _MAX_LINE_BYTES:
            raise trace_error(path, number, f"is longer than {_MAX_LINE_BYTES} bytes")
        if number == 1 and line.strip() == b"{":
            document = line + file.read(_MAX_LINE_BYTES)
            if len(document) > _MAX_LINE_BYTES:
                raise trace_error(path, 1, f"one document of more than {_MAX_LINE_BYTES} bytes")
            yield 1, document
            return
        if line.strip():
            yield number, line
