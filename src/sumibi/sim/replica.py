"""One simulated engine: waiting queue, chunked prefill, continuous batching, preemption.

Time passes in *phases*: one step in which chunks of prompts are computed (with whatever decodes beside), or
any number of steps in which sequences only decode. The second kind costs the same however many steps it has:
their times form an arithmetic series, as every context grows by one token a step. A phase ends when a
sequence ends or memory is used up; an arrival cuts it at the end of the step under way.

Scheduling is that of engines in use: sequences that decode first, then prompts in the order they were
admitted, then the waiting queue in order of arrival, as long as the step's token budget, a place in the
batch and memory for the whole prompt last. When memory for the step's output runs out, the sequence admitted
last loses its place and is computed again later; nobody is admitted in that step.

Data-parallel ranks of one engine are replicas that step together (`join`): a step lasts as long as that of
the slowest, and while one computes prompts the others' decodes advance one token a step.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from random import Random

from sumibi.sim.fleet import Group
from sumibi.sim.histogram import Histogram
from sumibi.sim.job import Job, State
from sumibi.sim.memory import Memory
from sumibi.sim.tiers import Adapters, Blocks, Link

DECODE, HELD, OVER, PREFILL, WAITING = (
    State.DECODE,
    State.HELD,
    State.OVER,
    State.PREFILL,
    State.WAITING,
)


class Replica:
    """One engine. The caller calls `advance` at `due_s`, and takes `first`, `done`, `imported` and the
    memory's `changes` after it, of all `peers`.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        block_tokens: int,
        *,
        noise: float = 0.0,
        seed: int = 0,
        store: Blocks | None = None,
        reads: Link | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.times = group.times()
        self.memory = Memory(group, block_tokens, store, reads)
        self.adapters = Adapters(group.adapter_slots, group.adapter_load_s)
        self.peers: list[Replica] = [self]
        """Those that step together, this one included."""
        self.slowness = 1.0
        """Of a fault: steps take so many times as long."""
        self.due_s = inf
        """End of the phase under way; of all peers alike."""
        self.first: list[Job] = []
        """Jobs whose first token has come; to be emptied by the caller, like the next."""
        self.done: list[Job] = []
        self.imported: list[Job] = []
        """Jobs whose KV has come from another replica."""
        self.intervals = Histogram()
        """Between two tokens of a sequence."""
        self.busy_s: dict[int, float] = {}
        """Seconds in which it worked, by minute."""
        self.prefill_tokens = 0
        """Prompt tokens computed so far, again after preemptions included."""
        self.preemptions = 0
        self.changed = 0
        """Counts up whenever what a metrics page says may have changed."""
        self.waiting: deque[Job] = deque()
        self.fetching: list[tuple[float, int, Job]] = []
        """Heap of (when all has come, order, job)."""
        self.prefilling: dict[Job, None] = {}
        self._admitted: dict[Job, None] = {}
        """All that hold memory, in the order of their admission."""
        self._decoding: list[tuple[int, int, Job]] = []
        """Heap of (end step, order, job). An entry counts if the job decodes and ends then."""
        self.sequences = 0
        """That decode."""
        self._contexts = 0
        """Sum of the contexts of those in the next step."""
        self._steps = 0
        self._order = 0
        self._noise = noise
        self._random = Random(seed)
        self._chunks: list[tuple[Job, int]] = []
        self._phase_s = 0.0
        """Start of the phase under way."""
        self._phase_steps = 0
        """Its steps; 0: nothing to do."""
        self._step_s = 0.0
        """Its first step."""
        self._growth_s = 0.0
        """By which each further one is longer."""

    # --- what the caller does ---

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether such a request can ever be served here."""
        return self.memory.fits(prompt_tokens + output_tokens)

    def submit(self, job: Job, t: float) -> None:
        """A request arrives. `due_s` may have changed afterwards."""
        blocked = bool(self.waiting)
        self.waiting.append(job)
        self.changed += 1
        if self.due_s == inf:
            self._begin(t)
        elif not blocked:
            self._cut(t)

    def advance(self, t: float) -> None:
        """The phase under way is over (t is `due_s`): count it, begin the next."""
        for peer in self.peers:
            peer._finish(t)
        self._begin(t)

    def abort(self, job: Job, t: float) -> None:
        """The client is gone. What is being computed for it in this very step is in vain."""
        self.changed += 1
        if job.state is WAITING:
            self.waiting.remove(job)
        elif job.state is not OVER:
            self._cut(t)
            self._leave(job)
        job.state = OVER

    def release(self, job: Job, t: float) -> None:
        """What was kept of a job (`Job.keep`) has been fetched."""
        if job.state is HELD:
            self.abort(job, t)
            if self.due_s == inf:
                self._begin(t)

    def slow(self, factor: float, t: float) -> None:
        """Steps take `factor` times as long from the end of the step under way."""
        self._cut(t)
        self.slowness = factor

    def kept(self) -> list[Job]:
        """Jobs that are over, their KV kept."""
        return [job for job in self._admitted if job.state is HELD]

    def die(self) -> list[Job]:
        """The process ends: every request in it is lost, so are its caches. Returns the requests.

        Data-parallel ranks are one process: the caller lets all peers die.
        """
        lost = [*self.waiting, *(job for job in self._admitted if job.state is not HELD)]
        for job in (*lost, *self._admitted):
            job.state = OVER
            job.held = None
        self.waiting.clear()
        self.fetching.clear()
        self.prefilling.clear()
        self._admitted.clear()
        self._decoding.clear()
        self._chunks.clear()
        self.imported.clear()
        self.sequences = self._contexts = self._phase_steps = 0
        self.memory.clear()
        self.adapters.clear()
        self.changed += 1
        self.due_s = inf
        return lost

    @property
    def running(self) -> int:
        """Requests admitted."""
        return self.sequences + len(self.prefilling)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self.waiting) + len(self.fetching)

    # --- phases ---

    def _begin(self, t: float) -> None:
        """Start the next phase, of all peers."""
        if len(self.peers) == 1:
            self._plan(t)
            if self._phase_steps:
                self.due_s = t + self._lasts(self._phase_steps)
            else:
                self.due_s = self.fetching[0][0] if self.fetching else inf
            return
        for peer in self.peers:
            peer._plan(t)
        steps = min((peer._phase_steps for peer in self.peers if peer._phase_steps), default=0)
        if steps:
            slowest = max((p for p in self.peers if p._phase_steps), key=lambda p: p._lasts(steps))
            step_s, growth_s, due_s = slowest._step_s, slowest._growth_s, t + slowest._lasts(steps)
        else:
            step_s = growth_s = 0.0
            due_s = min((peer.fetching[0][0] for peer in self.peers if peer.fetching), default=inf)
        for peer in self.peers:
            peer._phase_steps, peer._step_s, peer._growth_s, peer.due_s = steps, step_s, growth_s, due_s

    def _plan(self, t: float) -> None:
        """Choose what the next phase computes here, and how long it would take this replica alone."""
        self._phase_s = t
        self._fetched(t)
        preempted = self._preempt_for_output(t)
        chunks, times = self._chunks, self.times
        budget = self.group.chunk_tokens - self.sequences
        chunks_s = 0.0
        for job in self.prefilling:
            if budget <= 0:
                break
            tokens = min(job.target - job.computed, budget)
            budget -= tokens
            chunks.append((job, tokens))
            chunks_s += times.chunk_s(tokens, job.computed)
        while self.waiting and not preempted and budget > 0 and self.running < self.group.max_sequences:
            job = self.waiting[0]
            if not self._admit(job, t):
                break
            self.waiting.popleft()
            if job.state is PREFILL:
                tokens = min(job.target - job.computed, budget)
                budget -= tokens
                chunks.append((job, tokens))
                chunks_s += times.chunk_s(tokens, job.computed)
        block = self.memory.block_tokens
        self.memory.evict(sum((job.computed + n) // block - job.computed // block for job, n in chunks))
        if chunks:
            self._phase_steps = 1
            self._step_s = times.step_s(chunks_s, self.sequences, self._contexts) * self._factor()
            self._growth_s = 0.0
        elif self.sequences:
            factor = self._factor()
            step_s, growth_s = times.decode_line(self.sequences, self._contexts)
            self._step_s, self._growth_s = step_s * factor, growth_s * factor
            self._phase_steps = self._steps_possible()
            if self.fetching:
                self._phase_steps = min(self._phase_steps, self._steps_until(self.fetching[0][0]))
        else:
            self._phase_steps = 0

    def _finish(self, t: float) -> None:
        """Count the phase that ends now."""
        steps, sequences = self._phase_steps, self.sequences
        if not steps:
            return
        self.changed += 1
        self._steps += steps
        lasted_s = t - self._phase_s
        if sequences or self._chunks:
            self._busy(self._phase_s, t)
        if sequences:
            tokens = sequences * steps
            self._contexts += tokens
            self.memory.generated(tokens)
            self.intervals.add(lasted_s / steps, tokens)
        for job, tokens in self._chunks:
            if job.state is PREFILL:
                self._computed(job, tokens, t)
        self._chunks.clear()
        decoding, now = self._decoding, self._steps
        while decoding and decoding[0][0] <= now:
            end_step, _, job = heappop(decoding)
            if job.state is DECODE and job.end_step == end_step:
                job.generated = job.output_tokens
                self._leave(job)
                job.state = OVER
                self.done.append(job)
        self.memory.evict(0)

    def _busy(self, start: float, end: float) -> None:
        """Count a stretch of time in which it worked."""
        minute = int(start // 60)
        while end > (minute + 1) * 60:
            self.busy_s[minute] = self.busy_s.get(minute, 0.0) + (minute + 1) * 60 - start
            minute += 1
            start = minute * 60.0
        self.busy_s[minute] = self.busy_s.get(minute, 0.0) + end - start

    def _lasts(self, steps: int) -> float:
        return steps * (self._step_s + self._growth_s * (steps - 1) / 2)

    def _steps_until(self, t: float) -> int:
        """Steps of the phase under way, to the first that ends at `t` or later."""
        left_s = t - self._phase_s
        if left_s <= 0:
            return 1
        # n steps last n * first + half * n^2.
        half = self._growth_s / 2
        first = self._step_s - half
        exact = 2 * left_s / (first + sqrt(first * first + 4 * half * left_s))
        return max(1, ceil(exact - 1e-9))

    def _cut(self, t: float) -> None:
        """End a phase of many steps with the step that is under way at `t`."""
        if self._phase_steps > 1:
            steps = self._steps_until(t)
            if steps < self._phase_steps:
                due_s = self._phase_s + self._lasts(steps)
                for peer in self.peers:
                    peer._phase_steps, peer.due_s = steps, due_s
        elif not self._phase_steps and self.due_s > t:
            for peer in self.peers:
                peer.due_s = t

    def _factor(self) -> float:
        if not self._noise:
            return self.slowness
        return self.slowness * (1.0 + self._noise * (2.0 * self._random.random() - 1.0))

    # --- jobs ---

    def _admit(self, job: Job, t: float) -> bool:
        """Give it memory and what else it needs; False if there is not enough of that now."""
        ready_s = t
        if job.adapter:
            loaded_s = self.adapters.acquire(job.adapter, t)
            if loaded_s is None:
                return False
            ready_s = max(ready_s, loaded_s)
        fetched_s = self.memory.admit(job, self.sequences, t)
        if fetched_s is None:
            if job.adapter:
                self.adapters.release(job.adapter)
            return False
        ready_s = max(ready_s, fetched_s)
        self._admitted[job] = None
        self._order += 1
        job.place = self._order
        if ready_s > t:
            job.state = State.FETCHING
            heappush(self.fetching, (ready_s, job.place, job))
        else:
            job.state = PREFILL
            self.prefilling[job] = None
            self._import_over(job)
        return True

    def _import_over(self, job: Job) -> None:
        """Nothing of it is on its way any more."""
        if job.source is not None:
            job.source = None
            self.imported.append(job)

    def _fetched(self, t: float) -> None:
        """Jobs whose KV or adapter has come may be computed."""
        while self.fetching and self.fetching[0][0] <= t:
            _, _, job = heappop(self.fetching)
            if job.state is State.FETCHING:
                self.memory.arrived(job)
                job.state = PREFILL
                self.prefilling[job] = None
                self._import_over(job)

    def _computed(self, job: Job, tokens: int, t: float) -> None:
        """A chunk of it is done; with the last one comes a token."""
        self.prefill_tokens += tokens
        self.memory.computed(job, job.computed + tokens)
        if job.computed < job.target:
            return
        del self.prefilling[job]
        if not job.generated:
            self.first.append(job)
        elif job.token_s:
            self.intervals.add(t - job.token_s, 1)
            job.token_s = 0.0
        job.generated += 1
        self.memory.generated(1)
        if job.generated < job.output_tokens:
            job.state = DECODE
            job.end_step = self._steps + job.output_tokens - job.generated
            heappush(self._decoding, (job.end_step, job.place, job))
            self.sequences += 1
            self._contexts += job.target + 1
            return
        if job.keep:
            job.state = HELD
        else:
            self._drop(job, job.target + 1)
            job.state = OVER
        self.done.append(job)

    def _generated(self, job: Job) -> int:
        """Tokens that a decoding job has generated by the end of the last phase counted."""
        return job.output_tokens - (job.end_step - self._steps)

    def _leave(self, job: Job) -> None:
        """It gives up its place and its memory."""
        if job.state is DECODE:
            context = job.prompt_tokens + self._generated(job)
            self.sequences -= 1
            self._contexts -= context
            self._drop(job, context)
            return
        if job.state is PREFILL:
            del self.prefilling[job]
        elif job.state is State.FETCHING:
            self.memory.lost(job)
        self._drop(job, job.target + (job.state is HELD))

    def _drop(self, job: Job, context: int) -> None:
        del self._admitted[job]
        self.memory.drop(job, context)
        if job.adapter:
            self.adapters.release(job.adapter)

    def _steps_possible(self) -> int:
        """Steps until a sequence ends or memory is used up: 1 at least, for which room was made."""
        decoding = self._decoding
        while decoding[0][2].state is not DECODE or decoding[0][2].end_step != decoding[0][0]:
            heappop(decoding)
        steps = decoding[0][0] - self._steps
        return max(1, min(steps, self.memory.free_tokens() // self.sequences))

    def _preempt_for_output(self, t: float) -> bool:
        """Preempt until a step's output fits. True if somebody had to go: then nobody is admitted."""
        before = self.preemptions
        while self.memory.free_tokens() < self.sequences and self.running > 1:
            self._preempt(t)
        return self.preemptions > before

    def _preempt(self, t: float) -> None:
        """The job admitted last is thrown out: it is computed again, from what is still cached."""
        job = next(job for job in reversed(self._admitted) if job.state in (DECODE, PREFILL))
        if job.state is DECODE:
            job.generated = self._generated(job)
            job.token_s = t
        self._leave(job)
        job.target = job.prompt_tokens + job.generated
        job.computed = 0
        job.state = WAITING
        self.waiting.appendleft(job)
        self.preemptions += 1


def join(ranks: Sequence[Replica]) -> None:
    """Let these step together: the data-parallel ranks of one engine."""
    for replica in ranks:
        replica.peers = list(ranks)
