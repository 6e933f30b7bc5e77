"""Blocks go down: into host memory at once, from there to disk and store by threads of their own."""

from collections.abc import Callable
from functools import partial

import numpy as np

from sumibi.tiers.blockfile import Header, checksum
from sumibi.tiers.books import Books, Lower, has
from sumibi.tiers.catalog import Entry
from sumibi.tiers.host import Bytes
from sumibi.tiers.parallel import run_together
from sumibi.tiers.store import SWEEP_EVERY_S, SharedStore
from sumibi.tiers.words import Tier
from sumibi.tiers.writebehind import Job, WriteBehind

_QUEUE_BYTES = 256 << 20


class Down:
    """Writes to what `books` say is there. Any thread may call."""

    def __init__(self, books: Books, namespace: bytes) -> None:
        self._books = books
        self._namespace = namespace
        self.writers: dict[Tier, WriteBehind] = {}

    def start(self) -> None:
        """Begin: the disk is scanned, the store looked after."""
        books = self._books
        # Half of what is kept is never full of what waits.
        room = max(1, books.host.slots - -(-books.host.keep // 2))
        waiting = min(room, max(8, _QUEUE_BYTES // books.block_bytes))
        if books.disk:
            self._begin(books.disk, waiting, books.disk.scan, float("inf"))
        if books.store:
            self._begin(books.store, waiting, books.store.chores, SWEEP_EVERY_S)

    def _begin(self, lower: Lower, waiting: int, chores: Callable[[], None], every_s: float) -> None:
        self.writers[lower.tier] = WriteBehind(
            f"kv-{lower.tier}-write", waiting, partial(self._write, lower), chores, every_s
        )

    def store(self, content_id: bytes, parent: bytes | None, source: Bytes) -> bool:
        """Take one block; False where it finds no room."""
        books = self._books
        with books.lock:
            if books.closed:
                return False
            epoch = books.epoch
            entry = books.host.catalog.touch(content_id)
            if entry:
                books.used_in_host([content_id])
                self.queue(entry)
                return True
            if not books.keeps_host and all(has(lower, content_id) for lower in books.lowers):
                books.used_in_host([content_id])
                return True
            slot = books.take_slot(parent, to_write=bool(books.lowers))
        if slot is None:
            return False
        np.copyto(books.host.view(slot), source)
        with books.lock:
            if epoch != books.epoch or books.closed:
                books.host.give(slot)
                return False
            entry = books.host.settle(slot, content_id, parent)
            if entry is None:
                return True
            if books.keeps_host:
                books.host_stats.stored += 1
            books.announce(True, content_id, parent, Tier.HOST)
            books.used_in_host([content_id])
            books.host.pin(entry)
            queued = self.queue(entry)
            books.host.unpin(entry)
            return queued > 0 or content_id in books.host.catalog

    def queue(self, entry: Entry) -> int:
        """Queue a block of host memory for each slower tier that lacks it; how many took it.

        The lock is held.
        """
        books = self._books
        queued = 0
        for lower in books.lowers:
            bit = _bit(lower)
            if entry.waiting & bit or has(lower, entry.content_id):
                continue
            books.host.pin(entry)
            if not lower.rest.resting and self.writers[lower.tier].offer(Job(entry, books.epoch)):
                entry.waiting |= bit
                queued += 1
            else:
                books.host.unpin(entry)
                lower.stats.dropped += 1
        return queued

    def take_back(self, jobs: list[Job]) -> None:
        """What was queued will not be written."""
        books = self._books
        with books.lock:
            for job in jobs:
                job.entry.waiting = 0
                books.host.unpin(job.entry)

    def _write(self, lower: Lower, jobs: list[Job]) -> None:
        """One batch, on a writing thread."""
        if isinstance(lower, SharedStore):
            lower.make_room(len(jobs))
            run_together(lower.workers, 3, [partial(self._write_some, lower, [job]) for job in jobs])
        else:
            self._write_some(lower, jobs)

    def _write_some(self, lower: Lower, jobs: list[Job]) -> None:
        books = self._books
        try:
            if lower.rest.resting:
                with books.lock:
                    lower.stats.dropped += len(jobs)
            else:
                lower.write([self._block(job.entry) for job in jobs if job.epoch == books.epoch])
        finally:
            with books.lock:
                for job in jobs:
                    job.entry.waiting &= ~_bit(lower)
                    books.host.unpin(job.entry)

    def _block(self, entry: Entry) -> tuple[Header, Bytes]:
        payload = self._books.host.view(entry.place)
        if not entry.checksum:
            entry.checksum = checksum(payload)
        header = Header(
            self._namespace, entry.content_id, entry.parent, self._books.block_bytes, entry.checksum
        )
        return header, payload


def _bit(lower: Lower) -> int:
    return 1 << list(Tier).index(lower.tier)
