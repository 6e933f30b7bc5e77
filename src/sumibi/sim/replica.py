"""One simulated engine: waiting queue, chunked prefill, continuous batching, prefix cache, preemption.

Time passes in *phases*: one step in which chunks of prompts are computed (with whatever decodes beside), or
any number of steps in which sequences only decode. The second kind costs the same however many steps it has:
their times form an arithmetic series, as every context grows by one token a step. A phase ends when a
sequence ends or device memory is used up; an arrival cuts it at the end of the step under way.

Scheduling is that of engines in use: sequences that decode first, then prompts in the order they were
admitted, then the waiting queue in order of arrival, as long as the step's token budget, a place in the
batch and memory for the whole prompt last. When memory for output runs out, the sequence admitted last loses
its place and is computed again later.

A prompt's full blocks are resident, and in use, from the end of the step that computed them. Output and the
partial last block take memory but are not found by later prompts: it is counted in tokens plus half a page a
sequence, its mean waste (engines hand out pages of 16 tokens, whatever the block of the router's keys).
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from random import Random

from sumibi.routing.events import Change, KeysAdded, KeysCopied, KeysRemoved
from sumibi.sim.cache import PrefixCache, Segment
from sumibi.sim.fleet import Group
from sumibi.sim.histogram import Histogram
from sumibi.sim.host import HostCache

DEVICE, HOST = "gpu", "cpu"
PAGE_TOKENS = 16


class Job:
    """One request inside an engine."""

    __slots__ = (
        "cached_tokens",
        "computed",
        "end_step",
        "generated",
        "hold",
        "host_tokens",
        "keys",
        "output_tokens",
        "owner",
        "place",
        "prompt_tokens",
        "restore_tokens",
        "state",
        "target",
        "token_s",
    )

    def __init__(self, owner: object, keys: Sequence[int], prompt_tokens: int, output_tokens: int) -> None:
        self.owner = owner
        """The caller's."""
        self.keys = keys
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens: int | None = None
        """Of the prompt, found in a cache when it was first admitted."""
        self.host_tokens = 0
        """Of these, in host memory."""
        self.restore_tokens = 0
        """To be fetched from host memory before its first chunk."""
        self.computed = 0
        """Tokens whose KV is on the device, of `target`."""
        self.target = prompt_tokens
        """Tokens to compute before the next one can be generated: more than the prompt after a preemption."""
        self.generated = 0
        self.end_step = 0
        self.hold: Segment | None = None
        self.place = 0
        """Order of admission."""
        self.state = WAITING
        self.token_s = 0.0
        """When its last token came, if it was preempted since."""


WAITING, RESTORING, PREFILL, DECODE, OVER = range(5)


class Replica:
    """One engine. The caller calls `advance` at `due_s`, and takes `first`, `done` and `changes` after it."""

    def __init__(
        self, name: str, group: Group, block_tokens: int, *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.name = name
        self.group = group
        self.block_tokens = block_tokens
        self.times = group.times()
        self.slowness = 1.0
        """Of a fault: steps take so many times as long."""
        self.cache = PrefixCache(group.kv_tokens // block_tokens)
        self.host = HostCache(group.host.tokens // block_tokens) if group.host else None
        self.due_s = inf
        """End of the phase under way."""
        self.first: list[Job] = []
        """Jobs whose first token has come; to be emptied by the caller, like the next two."""
        self.done: list[Job] = []
        self.changes: list[Change] = []
        """Of its caches, as its KV events tell them."""
        self.intervals = Histogram()
        """Between two tokens of a sequence."""
        self.busy_s: dict[int, float] = {}
        """Seconds in which it worked, by minute."""
        self.prefill_tokens = 0
        """Prompt tokens computed so far, again after preemptions included."""
        self.preemptions = 0
        self.waiting: deque[Job] = deque()
        self.restoring: list[tuple[float, int, Job]] = []
        """(when its blocks are back, order, job)."""
        self.prefilling: dict[Job, None] = {}
        self._decoding: list[tuple[int, int, Job]] = []
        """Heap of (end step, order, job); jobs in another state than DECODE left it."""
        self.sequences = 0
        """That decode."""
        self._contexts = 0
        """Sum of the contexts of those in the next step."""
        self._private = 0
        """Tokens of output and partial blocks on the device."""
        self._reserved = 0
        """Blocks that admitted prompts have yet to compute."""
        self._arriving = 0
        """Of these, blocks that come from host memory: room was made for them."""
        self._steps = 0
        self._order = 0
        self._noise = noise
        self._random = Random(seed)
        self._chunks: list[tuple[Job, int]] = []
        self._phase_s = 0.0
        """Start of the phase under way."""
        self._phase_steps = 0
        self._step_s = 0.0
        """Its first step."""
        self._growth_s = 0.0

    # --- what the caller does ---

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether such a request can ever be served here."""
        return prompt_tokens + output_tokens + self.block_tokens <= self.cache.capacity * self.block_tokens

    def submit(self, job: Job, t: float) -> None:
        """A request arrives. `due_s` may have changed afterwards."""
        blocked = bool(self.waiting)
        self.waiting.append(job)
        if self.due_s == inf:
            self._begin(t)
        elif not blocked:
            self._cut(t)

    def advance(self, t: float) -> None:
        """The phase under way is over (t is `due_s`): count it, begin the next."""
        self._finish(t)
        self._begin(t)

    def abort(self, job: Job, t: float) -> None:
        """The client is gone. What is being computed for it in this very step is in vain."""
        if job.state == WAITING:
            self.waiting.remove(job)
        elif job.state != OVER:
            self._cut(t)
            self._leave(job)
        job.state = OVER

    def slow(self, factor: float, t: float) -> None:
        """Steps take `factor` times as long from the end of the step under way."""
        self._cut(t)
        self.slowness = factor

    def die(self) -> list[Job]:
        """The process ends: every request in it is lost, so are its caches. Returns the requests."""
        lost = [*self.waiting, *(job for _, _, job in self.restoring), *self.prefilling]
        lost += [job for end, _, job in self._decoding if job.state == DECODE and job.end_step == end]
        for job in lost:
            job.state = OVER
            job.hold = None
        self.waiting.clear()
        self.restoring.clear()
        self.prefilling.clear()
        self._decoding.clear()
        self._chunks.clear()
        self.sequences = self._contexts = self._private = self._reserved = self._arriving = 0
        self._phase_steps = 0
        self.cache.clear()
        if self.host is not None:
            self.host.clear()
        self.changes.clear()
        self.due_s = inf
        return lost

    @property
    def running(self) -> int:
        """Requests admitted."""
        return self.sequences + len(self.prefilling)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self.waiting) + len(self.restoring)

    @property
    def kv_blocks(self) -> int:
        """Device blocks in use by requests."""
        return self.cache.pinned + self._own_blocks()

    # --- phases ---

    def _begin(self, t: float) -> None:
        """Choose what the next phase computes."""
        self._restored(t)
        budget = self.group.chunk_tokens - self.sequences
        chunks = self._chunks
        chunks_s = 0.0
        for job in self.prefilling:
            if budget <= 0:
                break
            tokens = min(job.target - job.computed, budget)
            budget -= tokens
            chunks.append((job, tokens))
            chunks_s += self.times.chunk_s(tokens, job.computed)
        while self.waiting and budget > 0 and self.running < self.group.max_sequences:
            job = self.waiting[0]
            if not self._admit(job, t):
                break
            self.waiting.popleft()
            if job.state == PREFILL:
                tokens = min(job.target - job.computed, budget)
                budget -= tokens
                chunks.append((job, tokens))
                chunks_s += self.times.chunk_s(tokens, job.computed)
        self._make_room(t)
        if self._chunks:
            self._phase_steps = 1
            self._step_s = self.times.step_s(chunks_s, self.sequences, self._contexts) * self._factor()
            self._growth_s = 0.0
        elif self.sequences:
            factor = self._factor()
            step_s, growth_s = self.times.decode_line(self.sequences, self._contexts)
            self._step_s, self._growth_s = step_s * factor, growth_s * factor
            self._phase_steps = self._steps_possible()
            if self.restoring:
                self._phase_steps = min(self._phase_steps, self._steps_until(t, self.restoring[0][0]))
        else:
            self._phase_steps = 0
            self.due_s = self.restoring[0][0] if self.restoring else inf
            self._phase_s = t
            return
        self._phase_s = t
        self.due_s = t + self._lasts(self._phase_steps)

    def _finish(self, t: float) -> None:
        """Count the phase that ends now."""
        steps, sequences = self._phase_steps, self.sequences
        if not steps:
            return
        lasted_s = t - self._phase_s
        self._busy(self._phase_s, t)
        self._steps += steps
        if sequences:
            tokens = sequences * steps
            self._contexts += tokens
            self._private += tokens
            self.intervals.add(lasted_s / steps, tokens)
        for job, tokens in self._chunks:
            if job.state == PREFILL:
                self._computed(job, tokens, t)
        self._chunks.clear()
        decoding, now = self._decoding, self._steps
        while decoding and decoding[0][0] <= now:
            end_step, _, job = heappop(decoding)
            if job.state == DECODE and job.end_step == end_step:
                job.generated = job.output_tokens
                self._leave(job)
                self._over(job)
        self._evict(0)

    def _busy(self, start: float, end: float) -> None:
        """Count a stretch of time in which it worked."""
        minute = int(start // 60)
        while end > (minute + 1) * 60:
            self.busy_s[minute] = self.busy_s.get(minute, 0.0) + (minute + 1) * 60 - start
            minute += 1
            start = minute * 60
        self.busy_s[minute] = self.busy_s.get(minute, 0.0) + end - start

    def _lasts(self, steps: int) -> float:
        return steps * (self._step_s + self._growth_s * (steps - 1) / 2)

    def _steps_until(self, start: float, t: float) -> int:
        """Steps of the phase that began at `start`, until the first that ends at `t` or later."""
        left_s = t - start
        if left_s <= 0:
            return 1
        half = self._growth_s / 2
        first = self._step_s - half
        exact = 2 * left_s / (first + sqrt(first * first + 4 * half * left_s))
        return max(1, ceil(exact - 1e-9))

    def _cut(self, t: float) -> None:
        """End a phase of many steps with the step that is under way at `t`."""
        if self._phase_steps > 1:
            steps = self._steps_until(self._phase_s, t)
            if steps < self._phase_steps:
                self._phase_steps = steps
                self.due_s = self._phase_s + self._lasts(steps)
        elif not self._phase_steps and self.due_s > t:
            self.due_s = t

    def _factor(self) -> float:
        if not self._noise:
            return self.slowness
        return self.slowness * (1.0 + self._noise * (2.0 * self._random.random() - 1.0))

    # --- requests ---

    def _admit(self, job: Job, t: float) -> bool:
        """Give it memory for its whole prompt, if there is enough; it may first wait for a restore."""
        block, keys, cache = self.block_tokens, job.keys, self.cache
        most = min(len(keys), (job.target - 1) // block)
        on_device = min(cache.match(keys), most)
        in_host = self.host.match(keys, on_device, most) if self.host is not None else 0
        job.hold = cache.pin(keys, on_device)
        new = len(keys) - on_device
        private = job.target - len(keys) * block
        # A page more for everyone who decodes, or the newcomer would be thrown out again at once.
        needed = new + ceil((private + (self.sequences + 1) * PAGE_TOKENS) / block)
        if cache.capacity - cache.pinned - self._own_blocks() < needed:
            cache.unpin(job.hold)
            job.hold = None
            return False
        self._order += 1
        job.place = self._order
        self._reserved += new
        self._private += private
        job.computed = on_device * block
        if job.cached_tokens is None:
            job.cached_tokens = (on_device + in_host) * block
            job.host_tokens = in_host * block
        if in_host:
            self._restore(job, on_device, in_host, t)
        else:
            job.state = PREFILL
            self.prefilling[job] = None
        return True

    def _restore(self, job: Job, on_device: int, blocks: int, t: float) -> None:
        """Blocks come back from host memory, one restore after the other."""
        host, tier = self.host, self.group.host
        assert host is not None
        assert tier is not None
        keys = job.keys[on_device : on_device + blocks]
        host.take(keys)
        self.changes.append(KeysRemoved(HOST, list(keys)))
        size = blocks * self.block_tokens * self.group.kv_bytes_per_token
        host.free_at_s = max(host.free_at_s, t) + tier.latency_s + size / (tier.gb_per_s * 1e9)
        job.state = RESTORING
        job.restore_tokens = blocks * self.block_tokens
        heappush(self.restoring, (host.free_at_s, job.place, job))
        # The room is taken now, though the blocks are found only when they have come.
        self._arriving += blocks
        self._evict(0)

    def _restored(self, t: float) -> None:
        while self.restoring and self.restoring[0][0] <= t:
            _, _, job = heappop(self.restoring)
            if job.state == RESTORING:
                self._arriving -= job.restore_tokens // self.block_tokens
                self._resident(job, job.computed + job.restore_tokens)
                job.state = PREFILL
                self.prefilling[job] = None

    def _resident(self, job: Job, computed: int) -> None:
        """Its prompt is on the device up to `computed` tokens."""
        keys, block = job.keys, self.block_tokens
        before = min(len(keys), job.computed // block)
        after = min(len(keys), computed // block)
        job.computed = computed
        if after > before:
            self._reserved -= after - before
            job.hold = self.cache.extend(job.hold, keys, after)
            parent = keys[before - 1] if before else None
            new = list(keys[before:after])
            self.changes.append(KeysAdded(DEVICE, parent, new))
            if self.host is not None:
                # Computed again although it was there, behind a gap.
                twice = self.host.take(new)
                if twice:
                    self.changes.append(KeysRemoved(HOST, twice))

    def _computed(self, job: Job, tokens: int, t: float) -> None:
        """A chunk of it is done; with the last one comes a token."""
        self.prefill_tokens += tokens
        self._resident(job, job.computed + tokens)
        if job.computed < job.target:
            return
        del self.prefilling[job]
        if not job.generated:
            self.first.append(job)
        elif job.token_s:
            self.intervals.add(t - job.token_s, 1)
            job.token_s = 0.0
        job.generated += 1
        self._private += 1
        if job.generated >= job.output_tokens:
            self._drop(job, job.target + 1)
            self._over(job)
            return
        job.state = DECODE
        job.end_step = self._steps + job.output_tokens - job.generated
        heappush(self._decoding, (job.end_step, job.place, job))
        self.sequences += 1
        self._contexts += job.target + 1

    def _generated(self, job: Job) -> int:
        """Tokens that a decoding job has generated by the end of the last phase counted."""
        return job.output_tokens - (job.end_step - self._steps)

    def _leave(self, job: Job) -> None:
        """It gives up its place and its memory."""
        if job.state == DECODE:
            context = job.prompt_tokens + self._generated(job)
            self.sequences -= 1
            self._contexts -= context
            self._drop(job, context)
        elif job.state == PREFILL:
            del self.prefilling[job]
            self._drop(job, job.target)
        elif job.state == RESTORING:
            self._arriving -= job.restore_tokens // self.block_tokens
            self._drop(job, job.target)

    def _drop(self, job: Job, context: int) -> None:
        """Give back its memory: shared blocks become the youngest unused ones, the rest is free."""
        blocks = len(job.keys)
        self._private -= context - blocks * self.block_tokens
        self._reserved -= blocks - min(blocks, job.computed // self.block_tokens)
        self.cache.unpin(job.hold)
        job.hold = None

    def _over(self, job: Job) -> None:
        job.state = OVER
        self.done.append(job)

    # --- memory ---

    def _own_blocks(self) -> int:
        """Blocks that are taken or promised and have no key: output, partial blocks, prompts to compute."""
        return self._output_blocks() + self._reserved

    def _output_blocks(self) -> int:
        running = self.sequences + len(self.prefilling) + len(self.restoring)
        return -(-(self._private + running * PAGE_TOKENS // 2) // self.block_tokens)

    def _steps_possible(self) -> int:
        """Steps until a sequence ends or memory is used up: 1 at least (there is room for one, see below)."""
        decoding = self._decoding
        while decoding[0][2].state != DECODE or decoding[0][2].end_step != decoding[0][0]:
            heappop(decoding)
        steps = decoding[0][0] - self._steps
        free = (self.cache.capacity - self.cache.pinned - self._own_blocks()) * self.block_tokens
        return max(1, min(steps, free // self.sequences))

    def _make_room(self, t: float) -> None:
        """Preempt until a step's output fits, and evict what its chunks displace."""
        while True:
            own = self._own_blocks()
            free = self.cache.capacity - self.cache.pinned - own
            if free * self.block_tokens >= self.sequences or self.running <= 1:
                break
            self._preempt(t)
        block = self.block_tokens
        new = sum((job.computed + n) // block - job.computed // block for job, n in self._chunks)
        self._evict(new)

    def _preempt(self, t: float) -> None:
        """The sequence admitted last is thrown out: it is computed again, from what is still cached."""
        decoding = [job for _, _, job in self._decoding if job.state == DECODE]
        job = max([*decoding, *self.prefilling], key=lambda job: job.place)
        if job.state == DECODE:
            job.generated = self._generated(job)
            job.token_s = t
        self._leave(job)
        self._chunks = [(other, n) for other, n in self._chunks if other is not job]
        job.target = job.prompt_tokens + job.generated
        job.computed = 0
        job.state = WAITING
        self.waiting.appendleft(job)
        self.preemptions += 1

    def _evict(self, new: int) -> None:
        """Evict until `new` more blocks fit beside what is resident and what output takes."""
        taken = self.cache.blocks + self._output_blocks() + self._arriving
        over = taken + new - self.cache.capacity
        if over > 0:
            self.cache.evict(over)
            self._tell()

    def _tell(self) -> None:
        """Turn evictions into KV events; what the device lets go of goes to host memory if there is any."""
        cache, host = self.cache, self.host
        for keys in cache.removed:
            gone = list(keys)
            if host is not None:
                host.store(gone)
                self.changes.append(KeysCopied(HOST, gone))
            self.changes.append(KeysRemoved(DEVICE, gone))
        cache.removed.clear()
        if host is not None and host.removed:
            self.changes.append(KeysRemoved(HOST, list(host.removed)))
            host.removed.clear()
