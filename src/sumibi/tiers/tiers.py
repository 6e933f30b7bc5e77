"""KV blocks below the device: host memory, local disk, a shared store, behind one object.

A block comes by `store`, which copies it and returns: to host memory at once, to disk and store by threads of
their own (`down`). It goes by `load`, from the fastest place that has it, checked (`up`). What does not fit,
does not come in time or is not what it should be is a miss and is counted; a miss costs a computation, never
a wrong answer.
"""

import threading
import time
from collections.abc import Iterable, Sequence

from sumibi.core.errors import ConfigError
from sumibi.core.priority import give_way
from sumibi.tiers.blockfile import MAX_ID_BYTES, namespace_digest
from sumibi.tiers.books import Books
from sumibi.tiers.bucket import open_backend
from sumibi.tiers.catalog import Order, least_recent
from sumibi.tiers.config import TiersConfig
from sumibi.tiers.disk import DiskFiles
from sumibi.tiers.down import Down
from sumibi.tiers.host import Bytes, as_bytes
from sumibi.tiers.prefetch import Prefetch
from sumibi.tiers.store import SharedStore
from sumibi.tiers.up import Up
from sumibi.tiers.words import Buffer, Tier, TierEvent, TiersStats

POPULATING = "kv-host-memory"
"""Name of the thread that has the system find memory; it ends when that is done."""


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
        self._config = config
        self._named = namespace
        self._namespace = namespace_digest(namespace, block_bytes)
        self._books = books = Books(
            config.host_bytes, block_bytes, order, below=bool(config.disk or config.store)
        )
        self._down = Down(books, self._namespace)
        self._up = Up(books, self._down)
        self._prefetch = Prefetch(books, self._up)
        if config.disk:
            books.disk = DiskFiles(
                config.disk,
                self._namespace,
                block_bytes,
                lock=books.lock,
                order=order,
                announce=books.announce,
            )
        if config.store:
            try:
                books.store = SharedStore(
                    config.store,
                    open_backend(config.store, self._namespace),
                    block_bytes,
                    lock=books.lock,
                    announce=books.announce,
                    nudge=self._nudge_store,
                )
                books.store.try_out()
            except Exception:
                if books.store:
                    books.store.workers.close(0.1)
                if books.disk:
                    books.disk.close()
                raise
        self._down.start()
        threading.Thread(target=self._populate, name=POPULATING, daemon=True).start()

    def _populate(self) -> None:
        give_way()
        self._up.prepare()
        if self._books.keeps_host:
            self._books.host.populate(lambda: self._books.closed)

    def _nudge_store(self) -> None:
        self._down.writers[Tier.STORE].nudge()

    # What is there

    def match(self, ids: Sequence[bytes]) -> list[Tier]:
        """For the leading run of `ids` that lie below as far as is known: the fastest tier of each. Looks in
        memory only and changes nothing.
        """
        run: list[Tier] = []
        with self._books.lock:
            for content_id in ids:
                tier = self._books.where(content_id)
                if tier is None:
                    break
                run.append(tier)
        return run

    def find(self, ids: Sequence[bytes]) -> list[Tier]:
        """Like `match`, and asks the store about what is not known. `ids` is one chain, each the parent of
        the next. May block for the store's `timeout_s`; a store that fails is left out, and counted.
        """
        self._check_ids(ids)
        with self._books.lock:
            places = [self._books.where(content_id) for content_id in ids]
        unknown = [i for i, place in enumerate(places) if place is None]
        store = self._books.store
        if unknown and store and not store.rest.resting:
            deadline_s = time.monotonic() + store.timeout_s
            parents = [ids[i - 1] if i else None for i in unknown]
            there = store.find([ids[i] for i in unknown], parents, deadline_s)
            for i in unknown[:there]:
                places[i] = Tier.STORE
        run: list[Tier] = []
        for place in places:
            if place is None:
                break
            run.append(place)
        return run

    # Up and down

    def load(self, ids: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Tier | None]:
        """Fill each writable buffer of `block_bytes` with the block of the same place in `ids`, and say where
        it came from; None: it is missing, broken or late, and the buffer's bytes mean nothing. Blocks until
        done; for the store at most its `timeout_s`, for the disk until it gives nothing for 5 s. What came
        from below is kept in host memory.
        """
        if len(ids) != len(buffers):
            raise ValueError(f"{len(ids)} ids and {len(buffers)} buffers")
        self._check_ids(ids)
        return self._up.load(ids, [self._target(buffer) for buffer in buffers])

    def prefetch(self, ids: Sequence[bytes]) -> int:
        """Bring blocks up to host memory in the background, in this order, while nobody loads; how many are
        to come. None without a host tier.
        """
        self._check_ids(ids)
        return self._prefetch.bring_up(ids)

    @property
    def prefetches(self) -> bool:
        """Whether there is host memory and something below it."""
        return self._books.keeps_host and bool(self._books.lowers)

    @property
    def prefetching(self) -> int:
        """Blocks that are still to be brought up."""
        return self._prefetch.waiting

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
            if parent in lost or not self._down.store(content_id, parent, source):
                lost.add(content_id)
                with self._books.lock:
                    self._books.host_stats.dropped += 1
            else:
                taken += 1
        return taken

    # What happened

    def drain_events(self) -> list[TierEvent]:
        """What came to and left the tiers since the last call, in order."""
        with self._books.lock:
            events = list(self._books.events.waiting)
            self._books.events.waiting.clear()
        return events

    def stats(self) -> TiersStats:
        """Counts so far and what is held now; a copy."""
        stats = self._books.stats()
        stats.prefetch_dropped = self._prefetch.dropped
        for tier, writer in self._down.writers.items():
            stats.tiers[tier].queue_blocks = len(writer)
        return stats

    # Ends

    def leave_store(self, generation: str) -> None:
        """Go on in a part of the shared store that `generation` names: what this object has put there is not
        found by it any more and stays for others, and what it puts there from now on only those find who have
        left for the same generation. What waits to be written is given up, what is being loaded comes back as
        None. Nothing where there is no store. Raises OSError where a write hangs, ConfigError or
        EnvironmentProblem as at the start.
        """
        books, config = self._books, self._config.store
        if books.store is None or config is None:
            return
        store = books.store
        backend = open_backend(
            config, namespace_digest(f"{self._named}\ngeneration {generation}", self.block_bytes)
        )

        def leave() -> None:
            with books.lock:
                books.epoch += 1  # so that nothing of before is written there
                store.leave(backend)

        self._down.writers[Tier.STORE].between(leave)

    def clear(self, *, shared: bool = True) -> None:
        """Forget and remove everything of this namespace, in the shared store too unless not `shared`. Blocks
        for the I/O; what is being loaded meanwhile comes back as None. Raises OSError where removing fails.
        """
        books = self._books
        with books.lock:
            books.epoch += 1
        for writer in self._down.writers.values():
            self._down.take_back(writer.drain())
        with books.lock:
            books.brought.clear()
            for entry in list(books.host.catalog):
                books.host.remove(entry)
                books.announce(False, entry.content_id, entry.parent, Tier.HOST)
        for lower in books.lowers:
            if shared or lower is not books.store:
                self._down.writers[lower.tier].between(lower.clear)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the disk's files are known and all that was taken is written (or given up); False if
        that took longer than `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        writers = self._down.writers.values()
        return all(writer.flush(max(0.0, deadline_s - time.monotonic())) for writer in writers)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, for at most `timeout_s`, then stop. Calls after it find and take nothing new."""
        books = self._books
        with books.lock:
            if books.closed:
                return
            books.closed = True
        self.flush(timeout_s)
        for writer in self._down.writers.values():
            self._down.take_back(writer.close(timeout_s))
        self._prefetch.close(timeout_s)
        self._up.close(timeout_s)
        if books.store:
            books.store.workers.close(0.1 if books.store.rest.resting else timeout_s)
        if books.disk:
            books.disk.close()

    # Small things

    def _check_ids(self, ids: Sequence[bytes]) -> None:
        for content_id in ids:
            self._check_id(content_id)

    def _check_id(self, content_id: bytes) -> None:
        if not isinstance(content_id, bytes):
            raise TypeError(f"an id that is {type(content_id).__name__}, not bytes: {content_id!r:.80}")
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
