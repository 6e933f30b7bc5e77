"""Blocks on a local disk: one process's alone, bounded over all namespaces, found again after a restart.

Blocks of a chain that come together lie in one file: a device gives long stretches faster than short ones
(docs/decisions/0019). They are used and go together, which costs little as long as a file is a small part of
the tier.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.tiers.blockfile import HEADER_BYTES, Corrupt, Header
from sumibi.tiers.catalog import Catalog, Entry, Order
from sumibi.tiers.config import DiskTier
from sumibi.tiers.direct import DirectReads
from sumibi.tiers.directory import BlockDirectory, Found, Missing
from sumibi.tiers.host import Bytes
from sumibi.tiers.rest import Rest
from sumibi.tiers.words import Buffer, Tier, TierStats

Announce = Callable[[bool, bytes, bytes | None, Tier], None]
"""(stored, content id, parent, tier); the caller holds the lock of the tiers."""

MARK_EVERY_S = 60.0
"""A used file's time is set at most this often."""
RUN_BYTES = 4 << 20
"""A file of several blocks has at most so many: here `dd`'s speed is reached (docs/decisions/0019)."""
SMALL_PART = 64
"""A file of several blocks is at most this part of the tier."""
_WARN_EVERY_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Stretch:
    """Blocks that lie near each other in one file, to be read at once."""

    entry: Entry
    first: int
    """Where in the file it begins, in blocks."""
    end: int
    """Where it ends: the block before is its last."""
    wanted: list[tuple[int, int]]
    """Of each block that is wanted: its place in what was asked for, and in the file."""


class DiskFiles:
    """`lock` is the lock of the tiers: held here around what the catalog says, never around I/O."""

    tier = Tier.DISK

    def __init__(
        self,
        config: DiskTier,
        namespace: bytes,
        block_bytes: int,
        *,
        lock: threading.Lock,
        order: Order,
        announce: Announce,
    ) -> None:
        """Raises ConfigError (too small, in use) or EnvironmentProblem (cannot be made)."""
        self.block_bytes = HEADER_BYTES + block_bytes
        """Of a block with its header."""
        if config.bytes < self.block_bytes:
            raise ConfigError(
                f"kv tiers: disk.bytes {config.bytes} holds no block of {self.block_bytes} bytes; give more"
            )
        self.run_blocks = max(1, min(RUN_BYTES, config.bytes // SMALL_PART) // self.block_bytes)
        """A file has at most so many blocks."""
        self._path = config.path
        self._files = BlockDirectory(config.path, namespace)
        self._lock = lock
        self._announce = announce
        self._warned_s = float("-inf")
        self._reads = DirectReads(self.block_bytes, self.run_blocks, f"disk {config.path}")
        self.rest = Rest(f"disk {config.path}")
        self.stuck = Rest(f"disk {config.path}, reading")
        """From reads that did not end. Other failures are over when the call is."""
        self.stats = TierStats(limit_bytes=config.bytes)
        self.catalog = Catalog(config.bytes, order)
        try:
            self._files.prepare()
            self._owner = os.open(self._files.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as cause:
            raise EnvironmentProblem(
                f"kv tiers: disk.path {config.path!r} cannot be used: {cause}; give a directory that "
                "this user may write to"
            ) from cause
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            os.close(self._owner)
            raise ConfigError(
                f"kv tiers: disk.path {config.path!r} is in use by another process; give each engine its "
                "own, or share a directory as store.url"
            ) from cause

    def prepare(self, threads: int) -> None:
        """Have memory ready for so many threads that will `read`."""
        self._reads.prepare(threads)

    def scan(self) -> None:
        """Learn what an earlier life left, newest first; remove what is no block, and what is too much."""
        listed = sorted(
            self._files.listing(temporary_older_than_s=None), key=lambda f: f.modified_s, reverse=True
        )
        for age, found in enumerate(listed, 1):
            if found.namespace != self._files.namespace.hex():
                # Other namespaces' blocks count and go like ours but are found under no content id: a path
                # is longer than any of those.
                with self._lock:
                    self.catalog.add(_foreign(found), None, found.size_bytes, used=-age)
                continue
            headers = self._files.headers_of(found, self.block_bytes)
            with self._lock:
                self.stats.corrupt += not headers
                # Nobody writes a block that is here already; what somebody copied here may have it twice.
                if headers and not any(header.content_id in self.catalog for header in headers):
                    self._add(headers, found.size_bytes, used=-age)
                    continue
            with suppress(OSError):
                os.unlink(found.path)
        self._make_room(0)

    def write(self, blocks: Iterable[tuple[Header, Buffer]]) -> None:
        """Put blocks, pushing others out as needed; what fails is counted. On the writing thread."""
        with self._lock:
            new = [block for block in blocks if not self.catalog.touch(block[0].content_id)]
        for run in runs(new, self.run_blocks):
            if self.rest.resting:
                with self._lock:
                    self.stats.dropped += len(run)
            else:
                self._write_run(run)

    def _write_run(self, run: list[tuple[Header, Buffer]]) -> None:
        headers = [header for header, _ in run]
        with self._lock:
            parent = headers[0].parent and self.catalog.get(headers[0].parent)
            if parent:
                parent.pins += 1
        start_s = time.monotonic()
        written = 0
        try:
            if self._make_room(len(run) * self.block_bytes):
                written = self._write_or_make_more_room(run)
        except OSError as error:
            self.rest.failed(error)
            with self._lock:
                self.stats.errors += 1
        with self._lock:
            self.stats.write_s += time.monotonic() - start_s
            if parent:
                parent.pins -= 1
            if not written:
                self.stats.dropped += len(run)
                return
            self._add(headers, written)
            self.stats.stored += len(run)
        self.rest.worked()

    def stretches(self, ids: Sequence[bytes], wanted: Iterable[int]) -> list[Stretch]:
        """Those of `ids` at the places `wanted` that are here, by where they lie. The lock is held."""
        by_file: dict[bytes, list[tuple[int, int, Entry]]] = {}
        for i in wanted:
            if entry := self.catalog.get(ids[i]):
                at = entry.ids.index(ids[i])
                by_file.setdefault(entry.content_id, []).append((at, i, entry))
        found: list[Stretch] = []
        for blocks in by_file.values():
            blocks.sort(key=lambda block: block[0])
            stretch = None
            for at, i, entry in blocks:
                if stretch is None or at - stretch.first >= self.run_blocks:
                    found.append(stretch := Stretch(entry, at, at, []))
                stretch.end = at + 1
                stretch.wanted.append((i, at))
        return found

    def read(self, stretch: Stretch) -> list[tuple[int, Header, Bytes]]:
        """The blocks of a stretch by their place in what was asked for, checked, in memory that the calling
        thread's next read fills anew; without those that are gone, broken or cannot be read.
        """
        entry = stretch.entry
        start_s = time.monotonic()
        found: list[tuple[Header, Bytes] | None] = []
        missing = failed = False
        try:
            found = self._files.read_run(entry.ids, stretch.first, stretch.end, self._reads)
        except Missing:
            missing = True
        except Corrupt:
            found = [None] * (stretch.end - stretch.first)
        except OSError as error:
            failed = True
            self.rest.failed(error)
        broken = found.count(None)
        mark = False
        with self._lock:
            self.stats.read_s += time.monotonic() - start_s
            self.stats.errors += failed
            # A file that was taken away meanwhile may have been followed by another of its name.
            known = self.catalog.get(entry.content_id) is entry
            if known and (missing or broken):
                self.stats.corrupt += broken
                self._forget(entry.content_id)
            elif known and not failed:
                self.catalog.touch(entry.content_id)
                if time.monotonic() - entry.marked_s > MARK_EVERY_S:
                    entry.marked_s = time.monotonic()
                    mark = True
        with suppress(OSError):
            if mark:
                self._files.touch(entry.content_id)
            elif known and broken:
                self._files.remove(entry.content_id)
                self._warn(broken)
        places = [(i, found[at - stretch.first]) for i, at in stretch.wanted] if found else []
        return [(i, *block) for i, block in places if block]

    def _warn(self, broken: int) -> None:
        if time.monotonic() - self._warned_s > _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            _log.warning(
                "kv tier disk %s: %d blocks of a file were not what was written; it was removed and they are"
                " computed again; look after the device if that goes on (%d so far)",
                self._path,
                broken,
                self.stats.corrupt,
            )

    def _add(self, headers: list[Header], size_bytes: int, used: int | None = None) -> None:
        first, *more = headers
        self.catalog.add(
            first.content_id,
            first.parent,
            size_bytes,
            used=used,
            more=tuple(header.content_id for header in more),
        )
        for header in headers:
            self._announce(True, header.content_id, header.parent, self.tier)

    def clear(self) -> None:
        """Remove this namespace's blocks. Not while `write` runs."""
        with self._lock:
            for content_id in [e.content_id for e in self.catalog if not _is_foreign(e.content_id)]:
                self._forget(content_id)
        self._files.clear()
        self._files.prepare()

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._owner)

    def _forget(self, content_id: bytes) -> Entry | None:
        entry = self.catalog.remove(content_id)
        if entry and not _is_foreign(content_id):
            parent = entry.parent
            for each in entry.ids:
                self._announce(False, each, parent, self.tier)
                parent = each
        return entry

    def _make_room(self, more_bytes: int) -> bool:
        """Remove blocks until `more_bytes` fit; False when nothing is left that may go."""
        while True:
            with self._lock:
                if self.catalog.bytes + more_bytes <= self.catalog.limit_bytes:
                    return True
            if not self._evict_one():
                return False

    def _evict_one(self) -> bool:
        with self._lock:
            entry = self.catalog.victim()
            if entry is None:
                return False
            self._forget(entry.content_id)
            self.stats.evicted += len(entry.ids)
        if _is_foreign(entry.content_id):
            with suppress(FileNotFoundError):
                os.unlink(os.fsdecode(entry.content_id))
        else:
            self._files.remove(entry.content_id)
        return True

    def _write_or_make_more_room(self, run: list[tuple[Header, Buffer]]) -> int:
        """The device may be fuller than our limit says, by others' files: give back some of ours, once."""
        try:
            return self._files.write_run(run)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            with self._lock:
                self.stats.errors += 1
            for _ in range(4):
                self._evict_one()
            return self._files.write_run(run)


def runs(blocks: Iterable[tuple[Header, Buffer]], most: int) -> list[list[tuple[Header, Buffer]]]:
    """Blocks parted into pieces of chains, each block the parent of the next: at most `most` in each, and of
    one chain about as many in each.
    """
    chains: list[list[tuple[Header, Buffer]]] = []
    ends: dict[bytes, list[tuple[Header, Buffer]]] = {}
    for block in blocks:
        chain = ends.pop(block[0].parent or b"", None)
        if chain is None:
            chains.append(chain := [])
        chain.append(block)
        ends[block[0].content_id] = chain
    parted = []
    for chain in chains:
        parts = -(-len(chain) // most)
        cuts = [len(chain) * part // parts for part in range(parts + 1)]
        parted += [chain[start:end] for start, end in pairwise(cuts)]
    return parted


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _foreign(found: Found) -> bytes:
    return os.fsencode(found.path)


def _is_foreign(name: bytes) -> bool:
    # The path of a block file has 32 digits of namespace in it, so it is longer than the longest id.
    return len(name) > 32
