"""Blocks come up: from host memory, disk and store into a caller's buffers; host memory keeps them."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from sumibi.tiers.books import Books
from sumibi.tiers.catalog import Entry
from sumibi.tiers.disk import DiskFiles, Stretch
from sumibi.tiers.down import Down
from sumibi.tiers.host import Bytes
from sumibi.tiers.landing import Landing
from sumibi.tiers.parallel import run_unless_stuck, run_until
from sumibi.tiers.store import HELPERS, SharedStore
from sumibi.tiers.words import Tier
from sumibi.tiers.workers import Workers

_READERS = 4
"""Threads that read from disk: enough that it does not wait for sums and copies (docs/decisions/0019)."""
_STUCK_S = 5.0
"""A disk that gives no block for so long is taken to hang."""


class Up:
    """Reads what `books` say is there. Any thread may call."""

    def __init__(self, books: Books, down: Down) -> None:
        self._books = books
        self._down = down
        self._local = threading.local()
        self._readers = Workers("kv-disk-read", _READERS, 256)
        self.loading = 0
        """Callers who wait for blocks."""

    def prepare(self) -> None:
        """Have memory ready for what will be read."""
        if self._books.disk:
            self._books.disk.prepare(_READERS)

    def load(self, ids: Sequence[bytes], targets: Sequence[Bytes]) -> list[Tier | None]:
        """See `BlockTiers.load`."""
        with self._books.lock:
            self.loading += 1
        try:
            return self.read(ids, targets)
        finally:
            with self._books.lock:
                self.loading -= 1

    def read(self, ids: Sequence[bytes], targets: Sequence[Bytes]) -> list[Tier | None]:
        """The same, for somebody whom nobody waits for."""
        books = self._books
        landing = Landing(targets)
        with books.lock:
            epoch = books.epoch
        keeping = _Keeping(books, ids, landing, epoch)
        self._from_host(ids, landing)
        if books.disk and not books.disk.stuck.resting and landing.missing:
            self._from_disk(books.disk, ids, landing, keeping.go_on)
        if books.store and not books.store.rest.resting and landing.missing:
            self._from_store(books.store, ids, landing)
        with books.lock:
            if epoch != books.epoch:  # `clear` made void what came
                landing.tiers[:] = [None] * len(ids)
            books.misses += len(landing.missing)
        keeping.finish()
        return landing.tiers

    def close(self, timeout_s: float) -> None:
        """Stop the threads; one that hangs in a read is left behind."""
        stuck = self._books.disk is not None and self._books.disk.stuck.resting
        self._readers.close(0.1 if stuck else timeout_s)

    def _from_host(self, ids: Sequence[bytes], landing: Landing) -> None:
        books = self._books
        found: list[tuple[int, Entry]] = []
        with books.lock:
            for i, content_id in enumerate(ids):
                entry = books.host.catalog.touch(content_id)
                if entry:
                    books.host.pin(entry)
                    found.append((i, entry))
        start_s = time.monotonic()
        for i, entry in found:
            np.copyto(landing.targets[i], books.host.view(entry.place))
            landing.tiers[i] = Tier.HOST
        if not found:
            return
        with books.lock:
            for _, entry in found:
                if entry.content_id in books.brought:
                    books.brought.discard(entry.content_id)
                    books.prefetch_used += 1
                # One that found the queues full when it came is wanted below now more than it was then.
                if not entry.doomed:
                    self._down.queue(entry)
                books.host.unpin(entry)
            books.host_stats.hits += len(found)
            books.host_stats.read_s += time.monotonic() - start_s
            books.used_in_host([entry.content_id for _, entry in found])

    def _from_disk(
        self, disk: DiskFiles, ids: Sequence[bytes], landing: Landing, keep: Callable[[], None]
    ) -> None:
        def read(stretch: Stretch) -> None:
            for i, header, payload in disk.read(stretch):
                landing.put(i, payload, Tier.DISK, header)

        books = self._books
        with books.lock:
            stretches = disk.stretches(ids, landing.missing)
        if not stretches:
            return
        there = [i for stretch in stretches for i, _ in stretch.wanted]
        jobs = [partial(read, stretch) for stretch in stretches]
        done = run_unless_stuck(self._readers, _READERS, jobs, _STUCK_S, keep)
        if not done:
            landing.close()
        with books.lock:
            came = [ids[i] for i in there if landing.tiers[i]]
            disk.stats.hits += len(came)
            books.used_outside(came)
            if not done:
                disk.stats.late += len(there) - len(came)
        if done:
            disk.stuck.worked()
        else:
            disk.stuck.failed(f"no block in {_STUCK_S:g} s")

    def _from_store(self, store: SharedStore, ids: Sequence[bytes], landing: Landing) -> None:
        """Into memory of the reading threads first: what is late must not land in the caller's buffer."""

        def read(i: int) -> None:
            scratch = self._scratch()
            if header := store.read(ids[i], scratch):
                landing.put(i, scratch, Tier.STORE, header)

        missing = landing.missing
        done = run_until(store.workers, HELPERS, [partial(read, i) for i in missing], store.timeout_s)
        if not done:
            landing.close()
        with self._books.lock:
            store.stats.hits += landing.tiers.count(Tier.STORE)
            if not done:
                store.stats.late += len(landing.missing)
        if not done:
            store.rest.failed("no answer in time")

    def _scratch(self) -> Bytes:
        """Memory of the calling thread for one block, used again in its next call."""
        memory: Bytes | None = getattr(self._local, "memory", None)
        if memory is None:
            memory = self._local.memory = np.empty(self._books.block_bytes, dtype=np.uint8)
        return memory


class _Keeping:
    """Copies what comes from below into host memory, first blocks first, while later ones are still read."""

    def __init__(self, books: Books, ids: Sequence[bytes], landing: Landing, epoch: int) -> None:
        self._books = books
        self._ids = ids
        self._landing = landing
        self._epoch = epoch
        self._next = 0
        self._full = not books.keeps_host

    def go_on(self) -> None:
        """Keep what has come without a gap."""
        tiers = self._landing.tiers
        while self._next < len(tiers) and tiers[self._next] is not None and not self._full:
            self._keep(self._next)
            self._next += 1

    def finish(self) -> None:
        """Nothing more comes: keep what lies behind gaps too."""
        for i in range(self._next, len(self._ids)):
            if self._landing.tiers[i] is not None and not self._full:
                self._keep(i)

    def _keep(self, i: int) -> None:
        header = self._landing.headers.get(i)
        if header is None:  # it was in host memory
            return
        books, content_id = self._books, self._ids[i]
        with books.lock:
            if content_id in books.host.catalog:
                return
            slot = books.take_slot(header.parent)
        if slot is None:
            self._full = True
            return
        np.copyto(books.host.view(slot), self._landing.targets[i])
        with books.lock:
            if self._epoch != books.epoch:
                books.host.give(slot)
            elif books.host.settle(slot, content_id, header.parent):
                books.announce(True, content_id, header.parent, Tier.HOST)
