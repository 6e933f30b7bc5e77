"""KV blocks below the device: host memory, local disk, a shared store, behind one object.

A block comes by `store`, which copies it and returns: to host memory at once, to disk and store by threads of
their own. It goes by `load`, from the fastest place that has it, checked. What does not fit, does not come in
time or is not what it should be is a miss and is counted; a miss costs a computation, never a wrong answer.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from sumibi.core.errors import ConfigError
from sumibi.tiers.blockfile import MAX_ID_BYTES, Header, checksum, namespace_digest
from sumibi.tiers.bucket import open_backend
from sumibi.tiers.catalog import Entry, Order, least_recent
from sumibi.tiers.config import TiersConfig
from sumibi.tiers.disk import DiskFiles
from sumibi.tiers.host import Bytes, HostMemory, as_bytes
from sumibi.tiers.parallel import run_together, run_until
from sumibi.tiers.store import HELPERS, SWEEP_EVERY_S, SharedStore
from sumibi.tiers.words import Buffer, Tier, TierEvent, TiersStats, TierStats
from sumibi.tiers.workers import Workers
from sumibi.tiers.writebehind import Job, WriteBehind

_READERS = 3
"""Threads that read from disk beside the caller's."""

_STAGING_BYTES = 64 << 20
_QUEUE_BYTES = 256 << 20
_EVENTS = 1 << 18
_PREFETCH_TASKS = 64
_PREFETCH_BLOCKS = 1 << 14

_Lower = DiskFiles | SharedStore


class BlockTiers:
    """Blocks of `block_bytes` bytes each, of one `namespace`: everything that makes a block's bytes what they
    are beside its content id (model, weights, dtype, layout, engine). Any thread may call anything.
    """

    def __init__(
        self, config: TiersConfig, *, block_bytes: int, namespace: str, order: Order = least_recent
    ) -> None:
        """Raises ConfigError or EnvironmentProblem."""
        if block_bytes < 1:
            raise ConfigError(f"kv tiers: block_bytes {block_bytes} is not a size; at least 1")
        if 0 < config.host_bytes < block_bytes:
            raise ConfigError(
                f"kv tiers: host_bytes {config.host_bytes} holds no block of {block_bytes} bytes; "
                "give more, or 0 for no host tier"
            )
        self.block_bytes = block_bytes
        self._namespace = namespace_digest(namespace, block_bytes)
        self._lock = threading.Lock()
        self._epoch = 0
        self._closed = False
        self._events: deque[TierEvent] = deque(maxlen=_EVENTS)
        self._events_lost = 0
        self._misses = 0
        self._keeps_host = config.host_bytes > 0
        staging = max(8, _STAGING_BYTES // block_bytes)
        self._host = HostMemory(
            config.host_bytes // block_bytes if self._keeps_host else staging,
            block_bytes,
            order,
            self._left_host,
            keep=self._keeps_host,
        )
        self._host_stats = TierStats(limit_bytes=config.host_bytes)
        self._lowers: list[_Lower] = []
        self._disk: DiskFiles | None = None
        self._store: SharedStore | None = None
        self._writers: dict[Tier, WriteBehind] = {}
        self._readers = Workers("kv-disk-read", _READERS, 256)
        self._prefetcher = Workers("kv-prefetch", 1, _PREFETCH_TASKS)
        self._prefetching: set[bytes] = set()
        self._prefetch_dropped = 0
        if config.disk:
            self._disk = DiskFiles(
                config.disk,
                self._namespace,
                block_bytes,
                lock=self._lock,
                order=order,
                announce=self._announce,
            )
        if config.store:
            try:
                self._store = SharedStore(
                    config.store,
                    open_backend(config.store, self._namespace),
                    block_bytes,
                    lock=self._lock,
                    announce=self._announce,
                    nudge=self._nudge_store,
                )
            except Exception:
                if self._disk:
                    self._disk.close()
                raise
        half = max(1, self._host.slots // 2) if self._keeps_host else self._host.slots
        waiting = min(half, max(8, _QUEUE_BYTES // block_bytes))
        if self._disk:
            self._begin(self._disk, waiting, self._disk.scan, float("inf"))
        if self._store:
            self._begin(self._store, waiting, self._store.chores, SWEEP_EVERY_S)

    def _begin(self, lower: _Lower, waiting: int, chores: Callable[[], None], every_s: float) -> None:
        self._lowers.append(lower)
        self._writers[lower.tier] = WriteBehind(
            f"kv-{lower.tier}-write", waiting, partial(self._write, lower), chores, every_s
        )

    def _nudge_store(self) -> None:
        self._writers[Tier.STORE].nudge()

    # What is there

    def match(self, ids: Sequence[bytes]) -> list[Tier]:
        """For the leading run of `ids` that lie below as far as is known: the fastest tier of each. Looks in
        memory only and changes nothing.
        """
        run: list[Tier] = []
        with self._lock:
            for content_id in ids:
                tier = self._where(content_id)
                if tier is None:
                    break
                run.append(tier)
        return run

    def find(self, ids: Sequence[bytes]) -> list[Tier]:
        """Like `match`, and asks the store about what is not known. `ids` is one chain, each the parent of
        the next. May block for the store's `timeout_s`; a store that fails is left out, and counted.
        """
        with self._lock:
            places = [self._where(content_id) for content_id in ids]
        unknown = [i for i, place in enumerate(places) if place is None]
        if unknown and self._store and not self._store.rest.resting:
            deadline_s = time.monotonic() + self._store.timeout_s
            parents = [ids[i - 1] if i else None for i in unknown]
            there = self._store.find([ids[i] for i in unknown], parents, deadline_s)
            for i in unknown[:there]:
                places[i] = Tier.STORE
        run: list[Tier] = []
        for place in places:
            if place is None:
                break
            run.append(place)
        return run

    def _where(self, content_id: bytes) -> Tier | None:
        if content_id in self._host.catalog:
            return Tier.HOST
        if self._disk and content_id in self._disk.catalog:
            return Tier.DISK
        if self._store and content_id in self._store:
            return Tier.STORE
        return None

    # Up

    def load(self, ids: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Tier | None]:
        """Fill each writable buffer of `block_bytes` with the block of the same place in `ids`, and say where
        it came from; None: it is missing, broken or late, and the buffer's bytes mean nothing. Blocks until
        done, for the store at most its `timeout_s`. What came from below is kept in host memory.
        """
        if len(ids) != len(buffers):
            raise ValueError(f"{len(ids)} ids and {len(buffers)} buffers")
        targets = [self._target(buffer) for buffer in buffers]
        results: list[Tier | None] = [None] * len(ids)
        headers: dict[int, Header] = {}
        self._load_host(ids, targets, results)
        with self._lock:
            epoch = self._epoch
        if self._disk:
            disk = self._disk

            def read(i: int) -> None:
                header = disk.read(ids[i], targets[i])
                if header:
                    results[i] = Tier.DISK
                    headers[i] = header

            missing = [partial(read, i) for i, place in enumerate(results) if place is None]
            if missing:
                run_together(self._readers, _READERS, missing)
        if self._store and not self._store.rest.resting and None in results:
            self._load_store(self._store, ids, targets, results, headers)
        self._after_load(ids, targets, results, headers, epoch)
        return results

    def _load_host(self, ids: Sequence[bytes], targets: list[Bytes], results: list[Tier | None]) -> None:
        found: list[tuple[int, Entry]] = []
        with self._lock:
            for i, content_id in enumerate(ids):
                entry = self._host.catalog.touch(content_id)
                if entry:
                    self._host.pin(entry)
                    found.append((i, entry))
        start_s = time.monotonic()
        for i, entry in found:
            np.copyto(targets[i], self._host.view(entry.place))
            results[i] = Tier.HOST
        if not found:
            return
        with self._lock:
            for _, entry in found:
                # One that found the queues full when it came is wanted below now more than it was then.
                if not entry.doomed:
                    self._write_below(entry)
                self._host.unpin(entry)
            self._host_stats.hits += len(found)
            self._host_stats.read_s += time.monotonic() - start_s
            self._used_above(Tier.HOST, [entry.content_id for _, entry in found])

    def _load_store(
        self,
        store: SharedStore,
        ids: Sequence[bytes],
        targets: list[Bytes],
        results: list[Tier | None],
        headers: dict[int, Header],
    ) -> None:
        """Into memory of our own first: what comes too late must not land in the caller's buffer."""
        gate = threading.Lock()
        over = False

        def read(i: int) -> None:
            scratch = np.empty(self.block_bytes, dtype=np.uint8)
            header = store.read(ids[i], scratch)
            if header is None:
                return
            with gate:
                if over:
                    return
                np.copyto(targets[i], scratch)
                results[i] = Tier.STORE
                headers[i] = header

        missing = [i for i, place in enumerate(results) if place is None]
        jobs = [partial(read, i) for i in missing]
        in_time = run_until(store.workers, HELPERS, jobs, store.timeout_s)
        with gate:
            over = True
        with self._lock:
            store.stats.hits += results.count(Tier.STORE)
            if not in_time:
                store.stats.late += sum(results[i] is None for i in missing)
        if not in_time:
            store.rest.failed("no answer in time")

    def _after_load(
        self,
        ids: Sequence[bytes],
        targets: list[Bytes],
        results: list[Tier | None],
        headers: dict[int, Header],
        epoch: int,
    ) -> None:
        """Throw away what `clear` made void meanwhile; keep the rest in host memory, first blocks first."""
        with self._lock:
            if epoch != self._epoch:
                results[:] = [None] * len(results)
            self._misses += results.count(None)
        if not self._keeps_host:
            return
        for i in sorted(headers):
            if results[i] and not self._keep(ids[i], headers[i].parent, targets[i], epoch):
                break

    def _keep(self, content_id: bytes, parent: bytes | None, source: Bytes, epoch: int) -> bool:
        """Copy a block into host memory; False where there is no room."""
        with self._lock:
            if content_id in self._host.catalog:
                return True
            slot = self._take_slot(parent)
        if slot is None:
            return False
        np.copyto(self._host.view(slot), source)
        with self._lock:
            if epoch != self._epoch:
                self._host.give(slot)
            elif self._host.settle(slot, content_id, parent):
                self._announce(True, content_id, parent, Tier.HOST)
        return True

    def _is_below(self, entry: Entry) -> bool:
        return any(self._is_in(lower, entry.content_id) for lower in self._lowers)

    def _take_slot(self, parent: bytes | None, spare: Callable[[Entry], bool] | None = None) -> int | None:
        """An empty slot, not at the cost of the block that the new one follows."""
        before = self._host.catalog.get(parent) if parent else None
        if before is None:
            return self._host.take(spare)
        before.pins += 1
        try:
            return self._host.take(spare)
        finally:
            before.pins -= 1

    def prefetch(self, ids: Sequence[bytes]) -> None:
        """Bring blocks up to host memory in the background, in this order. Nothing without a host tier."""
        if not self._keeps_host:
            return
        with self._lock:
            wanted = [i for i in ids if i not in self._host.catalog and i not in self._prefetching]
            room = _PREFETCH_BLOCKS - len(self._prefetching)
            self._prefetch_dropped += max(0, len(wanted) - room)
            wanted = wanted[:room]
            self._prefetching.update(wanted)
        if wanted and not self._prefetcher.submit(partial(self._bring_up, wanted)):
            with self._lock:
                self._prefetching.difference_update(wanted)
                self._prefetch_dropped += len(wanted)

    def _bring_up(self, ids: list[bytes]) -> None:
        """A few blocks at a time, as far as there are any and room for them."""
        scratch = [np.empty(self.block_bytes, dtype=np.uint8) for _ in range(min(8, len(ids)))]
        try:
            for first in range(0, len(ids), len(scratch)):
                part = ids[first : first + len(scratch)]
                if self._closed or None in self.load(part, scratch[: len(part)]):
                    return
        finally:
            with self._lock:
                self._prefetching.difference_update(ids)

    # Down

    def store(self, blocks: Iterable[tuple[bytes, bytes | None, Buffer]]) -> int:
        """Take blocks (content id, parent's id or None, bytes): copies them and returns how many were taken,
        those here already among them. Waits for no I/O: what finds no room is dropped and counted, and so are
        those of the same call that follow it.
        """
        taken = 0
        lost: set[bytes] = set()
        for content_id, parent, buffer in blocks:
            self._check_id(content_id)
            if parent is not None:
                self._check_id(parent)
            source = self._source(buffer)
            if parent in lost or not self._store_one(content_id, parent, source):
                lost.add(content_id)
                with self._lock:
                    self._host_stats.dropped += 1
            else:
                taken += 1
        return taken

    def _store_one(self, content_id: bytes, parent: bytes | None, source: Bytes) -> bool:
        with self._lock:
            if self._closed:
                return False
            epoch = self._epoch
            entry = self._host.catalog.touch(content_id)
            if entry:
                self._used_above(Tier.HOST, [content_id])
                self._write_below(entry)
                return True
            if not self._keeps_host and all(self._is_in(lower, content_id) for lower in self._lowers):
                self._used_above(Tier.HOST, [content_id])
                return True
            slot = self._take_slot(parent, self._is_below)
        if slot is None:
            return False
        np.copyto(self._host.view(slot), source)
        with self._lock:
            if epoch != self._epoch or self._closed:
                self._host.give(slot)
                return False
            entry = self._host.settle(slot, content_id, parent)
            if entry is None:
                return True
            if self._keeps_host:
                self._host_stats.stored += 1
            self._announce(True, content_id, parent, Tier.HOST)
            self._used_above(Tier.HOST, [content_id])
            self._host.pin(entry)
            queued = self._write_below(entry)
            self._host.unpin(entry)
            return self._keeps_host or queued > 0

    def _write_below(self, entry: Entry) -> int:
        """Queue a block for each slower tier that lacks it; how many took it. The lock is held."""
        queued = 0
        for lower in self._lowers:
            bit = 1 << list(Tier).index(lower.tier)
            if entry.waiting & bit or self._is_in(lower, entry.content_id):
                continue
            self._host.pin(entry)
            if not lower.rest.resting and self._writers[lower.tier].offer(Job(entry, self._epoch)):
                entry.waiting |= bit
                queued += 1
            else:
                self._host.unpin(entry)
                lower.stats.dropped += 1
        return queued

    def _write(self, lower: _Lower, jobs: list[Job]) -> None:
        """One batch, on a writing thread."""
        if isinstance(lower, SharedStore):
            lower.make_room(len(jobs))
            run_together(lower.workers, 3, [partial(self._write_one, lower, job) for job in jobs])
        else:
            for job in jobs:
                self._write_one(lower, job)

    def _write_one(self, lower: _Lower, job: Job) -> None:
        entry = job.entry
        bit = 1 << list(Tier).index(lower.tier)
        try:
            if lower.rest.resting:
                with self._lock:
                    lower.stats.dropped += 1
            elif job.epoch == self._epoch:
                payload = self._host.view(entry.place)
                if not entry.checksum:
                    entry.checksum = checksum(payload)
                lower.write(
                    Header(self._namespace, entry.content_id, entry.parent, self.block_bytes, entry.checksum),
                    payload,
                )
        finally:
            with self._lock:
                entry.waiting &= ~bit
                self._host.unpin(entry)

    def _is_in(self, lower: _Lower, content_id: bytes) -> bool:
        return content_id in (lower.catalog if isinstance(lower, DiskFiles) else lower)

    def _used_above(self, tier: Tier, ids: Sequence[bytes]) -> None:
        """What is used in a fast tier is not old in the slower ones. The lock is held."""
        if self._disk and tier is Tier.HOST:
            for content_id in ids:
                self._disk.catalog.touch(content_id)
        if self._store:
            self._store.used(ids)

    # What happened

    def drain_events(self) -> list[TierEvent]:
        """What came to and left the tiers since the last call, in order."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def stats(self) -> TiersStats:
        """Counts so far and what is held now; a copy."""
        with self._lock:
            tiers = {Tier.HOST: _copy(self._host_stats), Tier.DISK: TierStats(), Tier.STORE: TierStats()}
            if self._keeps_host:
                tiers[Tier.HOST].bytes = self._host.catalog.bytes
                tiers[Tier.HOST].blocks = len(self._host.catalog)
            if self._disk:
                tiers[Tier.DISK] = _copy(self._disk.stats)
                tiers[Tier.DISK].bytes = self._disk.catalog.bytes
                tiers[Tier.DISK].blocks = len(self._disk.catalog)
            if self._store:
                tiers[Tier.STORE] = _copy(self._store.stats)
                tiers[Tier.STORE].bytes = self._store.held_bytes
                tiers[Tier.STORE].blocks = self._store.blocks_known
            for tier, writer in self._writers.items():
                tiers[tier].queue_blocks = len(writer)
            return TiersStats(tiers, self._misses, self._events_lost, self._prefetch_dropped)

    # Ends

    def clear(self) -> None:
        """Forget and remove everything of this namespace, in the shared store too. Blocks for the I/O; what
        is being loaded meanwhile comes back as None. Raises OSError where removing fails.
        """
        with self._lock:
            self._epoch += 1
        for writer in self._writers.values():
            self._take_back(writer.drain())
        with self._lock:
            for entry in list(self._host.catalog):
                self._host.remove(entry)
                self._announce(False, entry.content_id, entry.parent, Tier.HOST)
        for lower in self._lowers:
            self._writers[lower.tier].between(lower.clear)

    def _take_back(self, jobs: list[Job]) -> None:
        with self._lock:
            for job in jobs:
                job.entry.waiting = 0
                self._host.unpin(job.entry)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the disk's files are known and all that was taken is written (or given up); False if
        that took longer than `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        return all(writer.flush(max(0.0, deadline_s - time.monotonic())) for writer in self._writers.values())

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, for at most `timeout_s`, then stop. Calls after it find and take nothing new."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.flush(timeout_s)
        for writer in self._writers.values():
            self._take_back(writer.close(timeout_s))
        self._prefetcher.close(timeout_s)
        self._readers.close(timeout_s)
        if self._store:
            self._store.workers.close(0.1 if self._store.rest.resting else timeout_s)
        if self._disk:
            self._disk.close()

    # Small things

    def _announce(self, stored: bool, content_id: bytes, parent: bytes | None, tier: Tier) -> None:
        if tier is Tier.HOST and not self._keeps_host:
            return
        if len(self._events) == _EVENTS:
            self._events_lost += 1
        self._events.append(TierEvent(stored, content_id, parent, tier))

    def _left_host(self, entry: Entry) -> None:
        if self._keeps_host:
            self._host_stats.evicted += 1
        self._announce(False, entry.content_id, entry.parent, Tier.HOST)

    def _check_id(self, content_id: bytes) -> None:
        if not 0 < len(content_id) <= MAX_ID_BYTES:
            raise ValueError(f"an id of {len(content_id)} bytes; 1 to {MAX_ID_BYTES}")

    def _source(self, buffer: Buffer) -> Bytes:
        source = as_bytes(buffer)
        if source.nbytes != self.block_bytes:
            raise ValueError(f"a buffer of {source.nbytes} bytes; a block has {self.block_bytes}")
        return source

    def _target(self, buffer: Buffer) -> Bytes:
        target = self._source(buffer)
        if not target.flags.writeable:
            raise ValueError("a buffer to load into must be writable")
        return target


def _copy(stats: TierStats) -> TierStats:
    return TierStats(**{name: getattr(stats, name) for name in TierStats.__slots__})
