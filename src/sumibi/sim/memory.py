"""The memory of one simulated engine: prefix cache, output, and what lies below the device.

A prompt's full blocks are resident, and in use, from the end of the step that computed them. Output and the
partial last block take memory but are not found by later prompts: it is counted in tokens plus half a page
a job, its mean waste (engines hand out pages of 16 tokens, whatever the block of the router's keys).

Below the device: host memory of the replica, with every block in one of the two; a disk of the replica, and a
store that replicas share, to which every computed block is written and from which a copy can be read. What is
*brought up* goes from there to host memory before anybody asks for it.
"""

from collections.abc import Sequence
from math import ceil

from sumibi.core.prefixcache import PrefixCache
from sumibi.routing.events import Change, KeysAdded, KeysCopied, KeysRemoved
from sumibi.sim.fleet import Group, LinkSpec
from sumibi.sim.job import Job
from sumibi.sim.tiers import Blocks, Link

DEVICE, HOST, DISK = "gpu", "cpu", "storage"
PAGE_TOKENS = 16
BROUGHT_AT_ONCE = 8
"""Blocks that are brought up before somebody who waits goes first, as in the embedded engine."""


class Memory:
    """Blocks and tokens of one replica. `changes` collects what its KV events tell."""

    __slots__ = (
        "_arriving",
        "_group",
        "_jobs",
        "_private",
        "_promised",
        "_reads",
        "block_tokens",
        "brought",
        "brought_up",
        "brought_used",
        "cache",
        "changes",
        "disk",
        "host",
        "link",
        "store",
    )

    def __init__(
        self, group: Group, block_tokens: int, store: Blocks | None, reads: Link | None = None
    ) -> None:
        """`reads`: this replica's own way to the store, where it has less than all have together."""
        self._group = group
        self.block_tokens = block_tokens
        self.cache = PrefixCache(group.kv_tokens // block_tokens)
        tier = group.host
        self.host = Blocks(tier.tokens // block_tokens, Link(tier.gb_per_s, tier.latency_s)) if tier else None
        disk = group.disk
        self.disk = Blocks(disk.tokens // block_tokens, Link(disk.gb_per_s, disk.latency_s)) if disk else None
        self.store = store
        self._reads = reads
        self.brought: set[int] = set()
        """Blocks in host memory that were brought up, and not used since."""
        self.brought_up = 0
        """Blocks brought up so far."""
        self.brought_used = 0
        """Of these, those that were used before they were evicted."""
        link = group.link or LinkSpec()
        self.link = Link(link.gb_per_s, link.setup_s)
        """Over which KV comes from other replicas and goes to them."""
        self.changes: list[Change] = []
        self._private = 0
        """Tokens of output and partial blocks on the device."""
        self._promised = 0
        """Blocks that admitted prompts have yet to compute or fetch."""
        self._arriving = 0
        """Of these, blocks on their way from elsewhere: their room is made."""
        self._jobs = 0
        """That hold memory."""

    # --- room ---

    def output_blocks(self) -> int:
        """Blocks of what has no key: output and partial blocks."""
        return -(-(self._private + self._jobs * PAGE_TOKENS // 2) // self.block_tokens)

    def in_use(self) -> int:
        """Blocks used by jobs or promised to them."""
        return self.cache.pinned + self.output_blocks() + self._promised

    def free_tokens(self) -> int:
        """Tokens of output for which there is room, evicting whatever is not in use."""
        return (self.cache.capacity - self.in_use()) * self.block_tokens

    def fits(self, tokens: int) -> bool:
        """Whether a job that ends with so many tokens can run, alone if need be."""
        return tokens + self.block_tokens <= self.cache.capacity * self.block_tokens

    # --- jobs ---

    def admit(self, job: Job, decoding: int, t: float) -> float | None:
        """Give it memory for its whole prompt beside `decoding` sequences. None: there is not enough.

        Returns when what has to be fetched is there (`t`: nothing has).
        """
        block, keys, cache = self.block_tokens, job.keys, self.cache
        most = min(len(keys), (job.target - 1) // block)
        on_device = min(cache.match(keys), most)
        job.held = cache.pin(keys, on_device)
        new = len(keys) - on_device
        private = job.target - len(keys) * block
        # Beside the next token of everyone who decodes.
        needed = new + ceil((private + PAGE_TOKENS + decoding) / block)
        if cache.capacity - self.in_use() < needed:
            cache.unpin(job.held)
            job.held = None
            return None
        self._promised += new
        self._private += private
        self._jobs += 1
        job.computed = on_device * block
        lower, ready_s = self._fetch(job, on_device, most, t)
        if job.cached_tokens is None:
            job.cached_tokens = (on_device + lower) * block
            job.lower_tokens = lower * block
        if ready_s > t:
            self._arriving += job.fetched // block - on_device
            self.evict(0)
        return ready_s

    def _fetch(self, job: Job, on_device: int, most: int, t: float) -> tuple[int, float]:
        """Ask for what lies elsewhere. Returns (blocks found below the device, when all is there)."""
        block, keys, at, ready_s = self.block_tokens, job.keys, on_device, t
        block_bytes = block * self._group.kv_bytes_per_token
        if self.host is not None:
            found = self.host.match(keys, at, most)
            if found:
                # Their room in host memory is free at once, so that what makes way for them finds it.
                taken = self.host.take(keys[at : at + found])
                self.changes.append(KeysRemoved(HOST, taken))
                if self.brought:
                    self.brought_used += len(self.brought.intersection(taken))
                    self.brought.difference_update(taken)
                ready_s = self.host.link.transfer(found * block_bytes, t)
                at += found
        if self.disk is not None:
            found = self.disk.match(keys, at, most)
            if found:
                ready_s = max(ready_s, self.disk.link.transfer(found * block_bytes, t))
                at += found
            self.disk.use(keys[:most])
        if self.store is not None:
            found = self.store.match(keys, at, most)
            if found:
                ready_s = max(ready_s, self._read(self.store, found * block_bytes, t))
                at += found
        lower = at - on_device
        job.fetched = at * block
        if job.imported:
            missing = job.target - 1 - at * block
            if missing > 0:
                size = missing * self._group.kv_bytes_per_token
                ready_s = max(ready_s, self.link.transfer(size, t))
                if job.source is not None:
                    ready_s = max(ready_s, job.source.transfer(size, t))
                job.fetched = job.target - 1
            job.imported = False
        return lower, ready_s

    def _read(self, lower: Blocks, size_bytes: float, t: float) -> float:
        """When so many bytes of the disk or the store are here."""
        ready_s = lower.link.transfer(size_bytes, t)
        if lower is self.store and self._reads is not None:
            ready_s = max(ready_s, self._reads.transfer(size_bytes, t))
        return ready_s

    def arrived(self, job: Job) -> None:
        """What it waited for is on the device."""
        self.lost(job)
        if job.fetched > job.computed:
            self.computed(job, job.fetched)

    def lost(self, job: Job) -> None:
        """What it waited for is on its way no more."""
        self._arriving -= max(0, (job.fetched - job.computed) // self.block_tokens)

    def computed(self, job: Job, computed: int) -> None:
        """Its prompt is on the device up to `computed` tokens. Their room was made (`evict`)."""
        keys, block = job.keys, self.block_tokens
        before = min(len(keys), job.computed // block)
        after = min(len(keys), computed // block)
        job.computed = computed
        if after == before:
            return
        self._promised -= after - before
        job.held = self.cache.extend(job.held, keys, after)
        new = list(keys[before:after])
        self.changes.append(KeysAdded(DEVICE, keys[before - 1] if before else None, new))
        if self.host is not None:
            # Computed again although it was there, behind a gap.
            twice = self.host.take(new)
            if twice:
                self.changes.append(KeysRemoved(HOST, twice))
        if self.disk is not None:
            self.disk.store(new)
            self.changes.append(KeysCopied(DISK, new))
            if self.disk.removed:
                self.changes.append(KeysRemoved(DISK, list(self.disk.removed)))
                self.disk.removed.clear()
        if self.store is not None:
            self.store.store(new)
            self.store.removed.clear()

    # --- brought up ---

    def bring_up(self, keys: Sequence[int], t: float) -> tuple[list[int], float] | None:
        """Begin to read the first of this chain that is neither on the device nor in host memory: (blocks,
        when they are there, for `came_up`). None: nothing more of it can be had.
        """
        assert self.host is not None
        at = self.cache.match(keys)
        at += self.host.match(keys, at, len(keys))
        for lower in (self.disk, self.store):
            found = lower.match(keys, at, len(keys)) if lower is not None else 0
            if lower is not None and found:
                found = min(found, BROUGHT_AT_ONCE)
                size = found * self.block_tokens * self._group.kv_bytes_per_token
                return list(keys[at : at + found]), self._read(lower, size, t)
        return None

    def came_up(self, keys: Sequence[int], chain: Sequence[int]) -> None:
        """They were read: those of `chain` that the device has by now are not kept twice."""
        assert self.host is not None
        on_device = set(chain[: self.cache.match(chain)])
        new = [key for key in keys if key not in on_device and key not in self.host]
        self.host.store(new)
        self.brought.update(new)
        self.brought_up += len(new)
        self.changes.append(KeysCopied(HOST, new))
        self._host_lost()

    def _host_lost(self) -> None:
        """KV events of what host memory had no room for."""
        if self.host is not None and self.host.removed:
            self.changes.append(KeysRemoved(HOST, list(self.host.removed)))
            self.brought.difference_update(self.host.removed)
            self.host.removed.clear()

    def generated(self, tokens: int) -> None:
        """So many tokens of output more."""
        self._private += tokens

    def drop(self, job: Job, context: int) -> None:
        """A job with `context` tokens gives back its memory: shared blocks stay, the youngest unused ones."""
        blocks = len(job.keys)
        self._private -= context - blocks * self.block_tokens
        self._promised -= blocks - min(blocks, job.computed // self.block_tokens)
        self._jobs -= 1
        self.cache.unpin(job.held)
        job.held = None

    # --- eviction ---

    def evict(self, new: int) -> None:
        """Evict until `new` more blocks fit beside what is resident, on its way, or output."""
        over = self.cache.blocks + self.output_blocks() + self._arriving + new - self.cache.capacity
        if over > 0:
            self.cache.evict(over)
            self._tell()

    def _tell(self) -> None:
        """KV events of evictions; what the device lets go of goes to host memory if there is any."""
        cache, host = self.cache, self.host
        for keys in cache.removed:
            gone = list(keys)
            if host is not None:
                host.store(gone)
                self.changes.append(KeysCopied(HOST, gone))
            self.changes.append(KeysRemoved(DEVICE, gone))
        cache.removed.clear()
        self._host_lost()

    def clear(self) -> None:
        """The process died. A store lives on; so does a disk, but nobody tells of it."""
        self.cache.clear()
        self.brought.clear()
        if self.host is not None:
            self.host.clear()
        self.changes.clear()
        self._private = self._promised = self._arriving = self._jobs = 0
