"""Blocks in a store that several engines on several hosts read and write: a shared directory or a bucket.

What is there is known by asking; `known` remembers answers, no more. The bytes are bounded by everyone who
writes: who has written a few hundredths of the limit lists the store and removes the oldest blocks if it is
over. So with n writers it may be over by about n times that share, for as long as a listing takes.
"""

import errno
import random
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.tiers.blockfile import HEADER_BYTES, MAX_ID_BYTES, Corrupt, Header, checksum
from sumibi.tiers.config import StoreTier
from sumibi.tiers.directory import Found, Missing
from sumibi.tiers.disk import MARK_EVERY_S, Announce
from sumibi.tiers.parallel import run_until
from sumibi.tiers.rest import Rest
from sumibi.tiers.s3words import silence
from sumibi.tiers.words import Buffer, Refused, Tier, TierStats
from sumibi.tiers.workers import Workers

HELPERS = 8
SWEEP_EVERY_S = 600.0
_KNOWN_BLOCKS = 1 << 17
_MARKS = 4096
_SWEEP_TO = 0.9
_TEMPORARY_OLD_S = 3600.0
_NOT_OURS = (Refused, PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError)
"""Of what fails at the start, beside a read-only file system, what waiting does not mend."""


class Backend(Protocol):
    """What keeps the blocks. All calls block and raise OSError when it cannot be reached or fails."""

    @property
    def namespace(self) -> bytes:
        """Whose blocks are read and written."""

    def prepare(self) -> None:
        """Make what is needed once."""

    def write(self, header: Header, payload: Buffer) -> int:
        """Put a block whole or not at all; the bytes that it takes."""

    def read(self, content_id: bytes, into: Buffer) -> Header:
        """Fill `into`, checked. Raises Missing or Corrupt too."""

    def exists(self, content_id: bytes) -> bool:
        """Is there such a name?"""

    def touch(self, content_id: bytes) -> None:
        """Mark as used now, where that is cheap."""

    def remove(self, content_id: bytes) -> None:
        """Take it away; absent is as good."""

    def listing(self, *, temporary_older_than_s: float | None) -> Iterator[Found]:
        """All blocks of all namespaces."""

    def discard(self, found: Sequence[Found]) -> None:
        """Take listed blocks away; absent is as good."""

    def clear(self) -> None:
        """Take the namespace away."""


@dataclass(slots=True)
class _Known:
    parent: bytes | None
    marked_s: float


class SharedStore:
    """`lock` is the lock of the tiers: held here around what is known, never around I/O."""

    tier = Tier.STORE

    def __init__(
        self,
        config: StoreTier,
        backend: Backend,
        block_bytes: int,
        *,
        lock: threading.Lock,
        announce: Announce,
        nudge: Callable[[], None],
    ) -> None:
        self.file_bytes = HEADER_BYTES + block_bytes
        if config.bytes < self.file_bytes:
            raise ConfigError(
                f"kv tiers: store.bytes {config.bytes} holds no block of {self.file_bytes} bytes; give more"
            )
        self._backend = backend
        self._url = config.url
        self._limit_bytes = config.bytes
        self.timeout_s = config.timeout_s
        self._lock = lock
        self._announce = announce
        self._nudge = nudge
        self.workers = Workers("kv-store", HELPERS, 1024)
        self.rest = Rest(f"store {config.url}")
        self.stats = TierStats(limit_bytes=config.bytes)
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._marks: deque[bytes] = deque(maxlen=_MARKS)
        self._bytes = 0
        self._unswept_bytes = 0
        self._sweep_after_bytes = self._next_sweep()

    def __contains__(self, content_id: bytes) -> bool:
        """Is it believed to be there? The caller holds the lock."""
        return content_id in self._known

    @property
    def blocks_known(self) -> int:
        """How many blocks it is believed to have for us."""
        return len(self._known)

    @property
    def held_bytes(self) -> int:
        """All namespaces' bytes at the last listing and what was written here since."""
        return self._bytes

    def try_out(self) -> None:
        """Write a block and take it away again. Raises EnvironmentProblem where this process may not. A
        store that is down, or gives no answer in `timeout_s`, is no reason not to start: it rests, as it
        will later.
        """
        failures: list[OSError] = []
        nothing = b"\0"
        header = Header(
            self._backend.namespace, secrets.token_bytes(MAX_ID_BYTES), None, len(nothing), checksum(nothing)
        )

        def put() -> None:
            try:
                self._backend.prepare()
                self._backend.write(header, nothing)
                self._backend.remove(header.content_id)
            except OSError as error:
                failures.append(error)

        in_time = run_until(self.workers, 1, [put], self.timeout_s)
        if in_time and not failures:
            return
        why = failures[0] if failures else silence(self._url)
        if isinstance(why, _NOT_OURS) or why.errno == errno.EROFS:
            fix = why.fix if isinstance(why, Refused) else "give a directory that this user may write to"
            raise EnvironmentProblem(
                f"kv tiers: store.url {self._url!r} cannot be written: {why}; {fix} (every engine writes to"
                " its store)"
            ) from why
        self.rest.failed(why)
        with self._lock:
            self.stats.errors += 1

    def find(self, ids: Sequence[bytes], parents: Sequence[bytes | None], deadline_s: float) -> int:
        """How many leading `ids` are there, as far as is known by `deadline_s` (monotonic). Those are one
        chain, so a few questions at once narrow it down: a gap in it is found by `read`.
        """
        low, high = 0, len(ids)  # ids[:low] are there, ids[high:] are not
        while low < high:
            probes = sorted({low + (high - low) * k // HELPERS for k in range(HELPERS)})
            answers: dict[int, bool] = {}
            jobs = [self._asking(i, ids[i], answers) for i in probes]
            in_time = run_until(self.workers, HELPERS, jobs, deadline_s - time.monotonic())
            if not in_time or len(answers) < len(probes):
                with self._lock:
                    self.stats.errors += 1
                    self.stats.late += not in_time
                if not in_time:
                    self.rest.failed("no answer in time")
                break
            for i in probes:
                if not answers[i]:
                    high = i
                    break
                low = i + 1
        with self._lock:
            for content_id, parent in zip(ids[:low], parents, strict=False):
                self._learn(content_id, parent)
        return low

    def read(self, content_id: bytes, into: Buffer) -> Header | None:
        """Fill `into` with a block, checked; None where it is not there, broken or cannot be read."""
        start_s = time.monotonic()
        header = None
        corrupt = failed = False
        backend = self._backend
        try:
            header = backend.read(content_id, into)
            self.rest.worked()
        except Missing:
            pass
        except Corrupt:
            corrupt = True
            with suppress(OSError):
                backend.remove(content_id)
        except OSError as error:
            failed = True
            self.rest.failed(error)
        with self._lock:
            self.stats.read_s += time.monotonic() - start_s
            self.stats.corrupt += corrupt
            self.stats.errors += failed
            if header:
                self._learn(content_id, header.parent)
                self.used([content_id])
            elif not failed:
                self._forget(content_id)
        return header

    def write(self, blocks: Iterable[tuple[Header, Buffer]]) -> None:
        """Put blocks; what fails is counted. On the writing thread and its helpers."""
        for header, payload in blocks:
            self._write(header, payload)

    def _write(self, header: Header, payload: Buffer) -> None:
        with self._lock:
            if header.content_id in self._known:
                return
            full = self._bytes + self.file_bytes > self._limit_bytes
        start_s = time.monotonic()
        written = 0
        there = False
        try:
            there = self._backend.exists(header.content_id)
            if not there and not full:
                written = self._backend.write(replace(header, namespace=self._backend.namespace), payload)
            self.rest.worked()
        except OSError as error:
            self.rest.failed(error)
            with self._lock:
                self.stats.errors += 1
        with self._lock:
            self.stats.write_s += time.monotonic() - start_s
            if written or there:
                self._learn(header.content_id, header.parent)
                self.used([header.content_id])
            if written:
                self.stats.stored += 1
                self._bytes += written
                self._unswept_bytes += written
            elif not there:
                self.stats.dropped += 1
            due = full or self._unswept_bytes > self._sweep_after_bytes
        if due:
            self._nudge()

    def make_room(self, blocks: int) -> None:
        """Before `blocks` are written, on the writing thread: list the store if they would not fit."""
        with self._lock:
            fits = self._bytes + blocks * self.file_bytes <= self._limit_bytes
        if not fits:
            self.chores(blocks)

    def used(self, ids: Sequence[bytes]) -> None:
        """Blocks were used, here or in a faster tier: mark them and what they follow, so that others see it
        (not more often than every minute). The caller holds the lock.
        """
        now_s = time.monotonic()
        for content_id in ids:
            at: bytes | None = content_id
            while at is not None:
                known = self._known.get(at)
                if known is None or now_s - known.marked_s < MARK_EVERY_S:
                    break
                known.marked_s = now_s
                self._marks.append(at)
                at = known.parent

    def chores(self, blocks: int = 1) -> None:
        """Mark what was used; list the store, and bound it so that `blocks` fit. On the writing thread."""
        if self.rest.resting:
            return
        try:
            self._backend.prepare()
            # What a block follows was queued after it, and is so marked later: it goes later.
            for _ in range(len(self._marks)):
                self._backend.touch(self._marks.popleft())
            self._sweep(blocks * self.file_bytes)
            self.rest.worked()
        except OSError as error:
            self.rest.failed(error)
            with self._lock:
                self.stats.errors += 1

    def clear(self) -> None:
        """Remove this namespace's blocks, for everyone. Raises OSError."""
        with self._lock:
            for content_id in list(self._known):
                self._forget(content_id)
        self._backend.clear()
        self._backend.prepare()

    def leave(self, backend: Backend) -> None:
        """Go on with another namespace: what is there stays for others and is not found here any more. Not
        while `write` runs; the caller holds the lock. Nothing is announced, for nothing has gone.
        """
        self._backend = backend
        self._known.clear()
        self._marks.clear()

    def _asking(self, index: int, content_id: bytes, answers: dict[int, bool]) -> Callable[[], None]:
        def ask() -> None:
            try:
                answers[index] = self._backend.exists(content_id)
                self.rest.worked()
            except OSError as error:
                self.rest.failed(error)

        return ask

    def _learn(self, content_id: bytes, parent: bytes | None) -> None:
        if content_id in self._known:
            self._known.move_to_end(content_id)
            return
        if len(self._known) >= _KNOWN_BLOCKS:
            self._forget(next(iter(self._known)))
        self._known[content_id] = _Known(parent, float("-inf"))
        self._announce(True, content_id, parent, self.tier)

    def _forget(self, content_id: bytes) -> None:
        known = self._known.pop(content_id, None)
        if known:
            self._announce(False, content_id, known.parent, self.tier)

    def _next_sweep(self) -> int:
        # Writers that began together should not list together for ever.
        return int(self._limit_bytes * random.uniform(0.01, 0.03))

    def _sweep(self, more_bytes: int) -> None:
        found = list(self._backend.listing(temporary_older_than_s=_TEMPORARY_OLD_S))
        total = sum(f.size_bytes for f in found)
        doomed: list[Found] = []
        if total + more_bytes > self._limit_bytes:
            found.sort(key=lambda f: f.modified_s)
            for file in found:
                if total <= min(self._limit_bytes * _SWEEP_TO, self._limit_bytes - more_bytes):
                    break
                doomed.append(file)
                total -= file.size_bytes
            self._backend.discard(doomed)
        with self._lock:
            self._bytes = total
            self._unswept_bytes = 0
            self._sweep_after_bytes = self._next_sweep()
            self.stats.evicted += len(doomed)
            ours = self._backend.namespace.hex()
            for file in doomed:
                if file.namespace == ours:
                    self._forget(file.content_id)
