"""A bounded log of records, one JSON object a line, written in batches off the hot path.

Bounded twice: records waiting to be written (the newest are dropped and counted beyond the limit), and
bytes on disk (a full file is renamed to `.1`, older ones move up, the oldest goes). A disk that fails
loses records, is counted and logged once, and never disturbs serving.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any, Final

import msgspec

_FLUSH_S: Final = 1.0
_MAX_WAITING: Final = 50_000

log = logging.getLogger(__name__)


class JsonlLog:
    """Appends records to `path`. `append` only remembers; `run` (a task) writes once a second."""

    def __init__(self, path: Path, *, max_file_bytes: int = 64 * 1024 * 1024, keep_files: int = 4) -> None:
        self.path = path
        self.written = 0
        self.dropped = 0
        """Records lost: too many were waiting, or the disk failed."""
        self._max_file_bytes = max_file_bytes
        self._keep_files = keep_files
        self._encoder = msgspec.json.Encoder()
        self._waiting: list[Any] = []
        self._failing = False

    def append(self, record: Any) -> None:
        """Remember one record (anything msgspec encodes); it must not be changed afterwards."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(record)
        else:
            self.dropped += 1

    async def run(self) -> None:
        """Write what is waiting once a second, until cancelled; call `flush` after that."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            if self._waiting:
                writing = asyncio.ensure_future(asyncio.to_thread(self._write, self._take()))
                try:
                    await asyncio.shield(writing)
                except asyncio.CancelledError:
                    await writing  # or what `flush` writes next would stand before it
                    raise

    def flush(self) -> None:
        """Write what is waiting now. Never raises for a disk that fails."""
        if self._waiting:
            self._write(self._take())

    def _take(self) -> list[Any]:
        records, self._waiting = self._waiting, []
        return records

    def _write(self, records: list[Any]) -> None:
        try:
            data = self._encoder.encode_lines(records)
            self._make_room(len(data))
            with self.path.open("ab") as file:
                file.write(data)
        except OSError as cause:
            self.dropped += len(records)
            if not self._failing:
                self._failing = True
                log.error("cannot write %s: %s; its records are lost until that is mended", self.path, cause)
        else:
            self.written += len(records)
            self._failing = False

    def _make_room(self, wanted_bytes: int) -> None:
        """Rotate if the file would grow over its limit."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return
        if size + wanted_bytes <= self._max_file_bytes or size == 0:
            return
        for number in range(self._keep_files - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self.path if number == 0 else self.path.with_name(f"{self.path.name}.{number}")
