"""Blocks on a local disk: one process's alone, bounded over all namespaces, found again after a restart."""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

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
        self.file_bytes = HEADER_BYTES + block_bytes
        if config.bytes < self.file_bytes:
            raise ConfigError(
                f"kv tiers: disk.bytes {config.bytes} holds no block of {self.file_bytes} bytes; give more"
            )
        self._files = BlockDirectory(config.path, namespace)
        self._lock = lock
        self._announce = announce
        self._reads = DirectReads(self.file_bytes, f"disk {config.path}")
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

    def scan(self) -> None:
        """Learn what an earlier life left, newest first; remove what is no block, and what is too much."""
        listed = sorted(
            self._files.listing(temporary_older_than_s=None), key=lambda f: f.modified_s, reverse=True
        )
        for age, found in enumerate(listed, 1):
            ours = found.namespace == self._files.namespace.hex()
            header = self._files.header_of(found) if ours else None
            if ours and header is None:
                with suppress(OSError):
                    os.unlink(found.path)
                with self._lock:
                    self.stats.corrupt += 1
                continue
            # Other namespaces' blocks count and go like ours but are found under no content id: a path is
            # longer than any of those.
            name, parent = (header.content_id, header.parent) if header else (_foreign(found), None)
            with self._lock:
                if name in self.catalog:
                    continue
                self.catalog.add(name, parent, found.size_bytes, used=-age)
                if header:
                    self._announce(True, name, parent, self.tier)
        self._make_room(0)

    def write(self, header: Header, payload: Buffer) -> None:
        """Put one block, pushing others out as needed; what fails is counted. On the writing thread."""
        with self._lock:
            if self.catalog.touch(header.content_id):
                return
            parent = header.parent and self.catalog.get(header.parent)
            if parent:
                parent.pins += 1
        start_s = time.monotonic()
        written = 0
        try:
            if self._make_room(self.file_bytes):
                written = self._write_or_make_more_room(header, payload)
        except OSError as error:
            self.rest.failed(error)
            with self._lock:
                self.stats.errors += 1
        with self._lock:
            self.stats.write_s += time.monotonic() - start_s
            if parent:
                parent.pins -= 1
            if not written:
                self.stats.dropped += 1
                return
            self.catalog.add(header.content_id, header.parent, written)
            self.stats.stored += 1
            self._announce(True, header.content_id, header.parent, self.tier)
        self.rest.worked()

    def read(self, content_id: bytes) -> tuple[Header, Bytes] | None:
        """A block, checked, in memory that the calling thread's next read fills anew; None where it is not
        there, broken or cannot be read.
        """
        with self._lock:
            if content_id not in self.catalog:
                return None
        start_s = time.monotonic()
        found = None
        corrupt = failed = False
        try:
            found = self._files.read_direct(content_id, self._reads)
        except Missing:
            pass
        except Corrupt:
            corrupt = True
        except OSError as error:
            failed = True
            self.rest.failed(error)
        mark = False
        with self._lock:
            self.stats.read_s += time.monotonic() - start_s
            self.stats.corrupt += corrupt
            self.stats.errors += failed
            if found:
                entry = self.catalog.touch(content_id)
                if entry and time.monotonic() - entry.marked_s > MARK_EVERY_S:
                    entry.marked_s = time.monotonic()
                    mark = True
            elif not failed:
                self._forget(content_id)
        with suppress(OSError):
            if mark:
                self._files.touch(content_id)
            elif corrupt:
                self._files.remove(content_id)
        return found

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
            self._announce(False, content_id, entry.parent, self.tier)
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
            self.stats.evicted += 1
        if _is_foreign(entry.content_id):
            with suppress(FileNotFoundError):
                os.unlink(os.fsdecode(entry.content_id))
        else:
            self._files.remove(entry.content_id)
        return True

    def _write_or_make_more_room(self, header: Header, payload: Buffer) -> int:
        """The device may be fuller than our limit says, by others' files: give back some of ours, once."""
        try:
            return self._files.write(header, payload)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            with self._lock:
                self.stats.errors += 1
            for _ in range(4):
                self._evict_one()
            return self._files.write(header, payload)


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _foreign(found: Found) -> bytes:
    return os.fsencode(found.path)


def _is_foreign(name: bytes) -> bool:
    # The path of a block file has 32 digits of namespace in it, so it is longer than the longest id.
    return len(name) > 32
