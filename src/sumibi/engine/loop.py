"""The engine: one thread that steps, and the asyncio side that submits prompts and takes tokens.

The step thread owns model, scheduler and sampler; nothing else touches them, but for copies of blocks that
no step uses (`loading`). Towards it go commands (a queue of calls, run between two steps, the ends of loads
among them); from it come tokens, one call into the event loop a step whatever the number of requests. torch
releases the interpreter while it computes, so the server works on one request's bytes while the next step
runs.

A step that raises is the end of the engine: what the model's memory holds is no longer known. Every open
generation gets the error, and `on_failure` is called once, so that the process can end and be restarted.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections import abc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from sumibi.core.content import content_root
from sumibi.core.errors import EngineUnavailable
from sumibi.engine.attempts import Attempts
from sumibi.engine.batch import StepBatch
from sumibi.engine.loading import KVSource, Load
from sumibi.engine.metrics import EngineMetrics
from sumibi.engine.publisher import EventSink
from sumibi.engine.sampler import Sampled, logprobs_of, sample
from sumibi.engine.scheduler import Scheduler, Step
from sumibi.engine.sequence import FinishReason, SamplingParams, Sequence, TokenLogprob
from sumibi.engine.transfer.connector import SOURCE, Transfers
from sumibi.engine.transfer.params import KeepRequest, PullRequest, TransferAnswer
from sumibi.engine.transfer.tickets import Fetch, Keep

log = logging.getLogger(__name__)

MAX_GENERATIONS = 2048
"""Requests in the engine at once, running or waiting; more are refused with 503."""

_LOOKERS = 4
"""Threads that ask a source what it has of new requests."""

_STOP_S = 60.0
"""Longest wait for the step thread to end: the longest step, with a margin."""


class StepModel(Protocol):
    """What the loop needs of a model (`sumibi.engine.model.Model`)."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits, float32 [wanted positions, vocabulary]."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy KV blocks (from, to), all layers."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to be continued `n` times; choice i draws with `params.seed` + i."""

    token_ids: list[int]
    params: SamplingParams
    n: int = 1
    salt: str = ""
    transfer: KeepRequest | PullRequest | None = None
    """Where the prompt's KV is to come from, or that it is to be kept."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of one choice. With `finish` it is the choice's last; `token` is None if it was aborted."""

    choice: int
    token: int | None
    logprob: TokenLogprob | None
    finish: FinishReason | None
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What is known of a prompt once its first token is there."""

    cached_tokens: int
    logprobs: list[TokenLogprob]
    cached_by_source: dict[str, int]
    """`cached_tokens` by where they were: "device", "host", "disk", ..."""


class Generation:
    """The choices of one request, read by one task. Created by `Engine.submit`; `close` it in any case."""

    def __init__(self, engine: "Engine", sequences: list[list[Sequence]]) -> None:
        self._engine = engine
        self._prompts = sequences
        self._ready: list[Token] = []
        self._waiter: asyncio.Future[None] | None = None
        self._unfinished = {sequence.index for prompt in sequences for sequence in prompt}
        self._error: str | None = None

    @property
    def done(self) -> bool:
        """True when every choice's last token has been taken (or given up by `drop`)."""
        return not self._unfinished and not self._ready

    async def take(self) -> list[Token]:
        """All tokens that came since the last call; waits for one. Raises EngineUnavailable.

        Call it only while `done` is false.
        """
        if not self._ready and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._ready and self._error is not None:
            raise EngineUnavailable(self._error)
        ready, self._ready = self._ready, []
        return ready

    def report(self, prompt: int) -> PromptReport:
        """About the request's prompt number `prompt`, after a token of it was taken."""
        sequence = self._prompts[prompt][0]
        cached, by_source = sequence.cached_tokens or 0, sequence.cached_by_source
        if isinstance(sequence.transfer, Fetch):
            own = by_source.get("device", 0)
            cached = sequence.transfer.system_cached_tokens(cached, own)
            by_source = {"device": own, SOURCE: max(0, cached - own)}
        if sequence.cached_limit is not None:
            cached = min(cached, sequence.cached_limit)
        return PromptReport(cached, sequence.prompt_logprobs, _leading(by_source, cached))

    @property
    def transfer_answer(self) -> TransferAnswer | None:
        """What another engine needs to get the prompt's KV from here, once the last token was taken."""
        ticket = self._prompts[0][0].transfer
        return ticket.answer if isinstance(ticket, Keep) else None

    def drop(self, choice: int) -> None:
        """End one choice; no more tokens of it will come."""
        self._unfinished.discard(choice)
        self._ready = [token for token in self._ready if token.choice != choice]
        self._engine.abort([s for prompt in self._prompts for s in prompt if s.index == choice])

    def close(self) -> None:
        """End what is not finished; its blocks are free before the next step begins."""
        self._engine.forget(self)
        if self._unfinished:
            self._engine.abort([sequence for prompt in self._prompts for sequence in prompt])
            self._unfinished.clear()
        self._ready.clear()

    def push(self, token: Token) -> None:
        """The engine's side: one more token."""
        if token.choice not in self._unfinished:
            return
        if token.finish is not None:
            self._unfinished.discard(token.choice)
        self._ready.append(token)
        self._wake()

    def fail(self, why: str) -> None:
        """The engine's side: nothing more will come."""
        self._error = why
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None


class Engine:
    """Made in the event loop's thread; every public method is for that thread."""

    def __init__(
        self,
        model: StepModel,
        scheduler: Scheduler,
        *,
        metrics: EngineMetrics,
        events: EventSink,
        namespace: str,
        on_failure: abc.Callable[[], None],
    ) -> None:
        """`namespace` is what makes KV differ beside tokens (`core.content.content_root`)."""
        self._model = model
        self._scheduler = scheduler
        self._metrics = metrics
        self._events = events
        self._namespace = namespace
        self._on_failure = on_failure
        self.transfers: Transfers | None = None
        """Set before `start`, if KV is to travel between engines."""
        self._numbers = itertools.count()
        self._stalled = False  # what waits, waits for a command
        self._commands: SimpleQueue[abc.Callable[[], None] | None] = SimpleQueue()
        self._owners: dict[Sequence, Generation] = {}  # the step thread's
        self._open: set[Generation] = set()  # the event loop's
        self._clearings: set[asyncio.Future[bool]] = set()  # the event loop's
        self._ended: str | None = None  # why no more requests are taken
        self._failed = False
        self._attempts = Attempts()
        self._lookers = ThreadPoolExecutor(_LOOKERS, "kv-look")  # its threads begin with the first use
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def healthy(self) -> bool:
        """Whether the engine takes requests."""
        return self._loop is not None and self._ended is None

    @property
    def failed(self) -> bool:
        """Whether a step has raised."""
        return self._failed

    def start(self) -> None:
        """Start the step thread; tokens go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the step thread after its current step. Open generations get an error."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, _STOP_S)
        await asyncio.to_thread(self._lookers.shutdown, wait=True, cancel_futures=True)
        self._end("the engine was stopped")

    def submit(self, jobs: list[Job], request_id: str = "", attempt: int = 1) -> Generation:
        """Start generating. Choice numbers run over the jobs in order, `n` for each. `request_id`: the
        client's name for it; `attempt`: how often it was sent under that name, this time included.

        Raises EngineUnavailable when the engine has failed or holds `MAX_GENERATIONS` requests.
        """
        if self._ended is not None:
            raise EngineUnavailable(self._ended)
        if len(self._open) >= MAX_GENERATIONS:
            self._metrics.rejected.inc()
            raise EngineUnavailable(f"the engine already holds {MAX_GENERATIONS} requests")
        prompts = []
        first = 0
        for job in jobs:
            prompts.append(self._sequences(job, first, request_id, attempt))
            first += job.n
        generation = Generation(self, prompts)
        self._open.add(generation)
        self._commands.put(partial(self._own, generation, prompts))
        if self._scheduler.source is None:
            self._commands.put(partial(self._add, prompts))
        else:
            self._lookers.submit(self._look, self._scheduler.source, prompts)
        return generation

    def post(self, call: abc.Callable[[], None]) -> None:
        """Run `call` in the step thread between two steps; from any thread. Nothing once the engine ended."""
        self._commands.put(call)

    def fail_request(self, sequence: Sequence, why: str) -> None:
        """End the request of `sequence` with an error. Step thread."""
        generation = self._owners.get(sequence)
        if generation is None:
            return
        for each in [s for s, owner in self._owners.items() if owner is generation]:
            del self._owners[each]
            self._scheduler.abort(each)
            self._metrics.finished(each, time.monotonic())
        assert self._loop is not None
        self._loop.call_soon_threadsafe(generation.fail, why)

    def abort(self, sequences: list[Sequence]) -> None:
        """End sequences from outside, before the next step."""
        self._commands.put(partial(self._abort, sequences))

    def abort_all(self) -> None:
        """End every open generation; each gets its last token, with `FinishReason.ABORT`."""
        self._commands.put(lambda: self._abort(list(self._owners)))

    def forget(self, generation: Generation) -> None:
        """The generation is no longer read."""
        self._open.discard(generation)

    async def clear_prefix_cache(self) -> bool:
        """Forget all cached blocks. False, and nothing done, while any is in use.

        Raises EngineUnavailable when the engine has ended, or ends before it is done.
        """
        if self._ended is not None:
            raise EngineUnavailable(self._ended)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._commands.put(partial(self._clear, answer))
        self._clearings.add(answer)
        try:
            return await answer
        finally:
            self._clearings.discard(answer)

    def _sequences(self, job: Job, first: int, request_id: str, attempt: int) -> list[Sequence]:
        root = content_root(self._namespace, salt=job.salt)
        block_tokens = self._scheduler.pool.block_tokens
        family = []
        for choice in range(job.n):
            sequence = Sequence(
                number=next(self._numbers),
                prompt_tokens=len(job.token_ids),
                tokens=list(job.token_ids),
                params=replace(job.params, seed=(job.params.seed + choice) % (1 << 64)),
                content_ids=[],
                root=root,
                salt=job.salt,
                request_id=request_id,
                attempt=attempt,
                index=first + choice,
                arrived_s=time.monotonic(),
            )
            family.append(sequence)
        # Hashing a long prompt takes milliseconds: here, not between two steps.
        family[0].extend_content_ids(len(job.token_ids) // block_tokens, block_tokens)
        family[0].siblings = family[1:]
        if job.transfer is not None:
            assert self.transfers is not None, "requests are refused where they are read"
            family[0].transfer = self.transfers.open(job.transfer)
        return family

    # ---- a thread that may wait ----

    def _look(self, source: KVSource, prompts: list[list[Sequence]]) -> None:
        try:
            for family in prompts:
                source.look(family[0])
        except Exception:
            log.exception("what lies outside could not be asked for: it may be computed")
        self._commands.put(partial(self._add, prompts))

    # ---- the step thread ----

    def _run(self) -> None:
        assert self._loop is not None
        try:
            with torch.inference_mode():
                while self._take_commands():
                    self._step()
        except Exception as cause:
            log.exception("the engine failed in a step")
            self._failed = True
            self._loop.call_soon_threadsafe(self._fail, f"the engine failed: {cause}")

    def _take_commands(self) -> bool:
        """Run what is queued, waiting for it if there is nothing else to do; False to stop."""
        while True:
            idle = self._stalled or not self._scheduler.has_work
            try:
                command = self._commands.get(block=idle, timeout=self._give_up_loads() if idle else None)
            except Empty:
                self._stalled = False
                return True
            if command is None:
                return False
            command()
            self._stalled = False

    def _step(self) -> None:
        self._give_up_loads()
        step = self._scheduler.schedule()
        for load in self._scheduler.drain_loads():
            self._begin(load)
        if step is None:
            self._stalled = True
            return
        now_s = time.monotonic()
        for part in step.parts:
            if part.sequence.started_s is None:
                part.sequence.started_s = now_s
                self._attempts.note(part.sequence)
        samplers = step.samplers()
        batch = step.batch()
        sampled = self._sample(step, self._model.forward(batch), samplers)
        outcome = self._scheduler.account(step, [each.token for each in sampled])
        if outcome.copies:
            self._model.copy_blocks(outcome.copies)
        self._publish()
        self._metrics.step(batch.tokens)
        self._deliver(samplers, sampled)

    def _sample(self, step: Step, logits: torch.Tensor, samplers: list[Sequence]) -> list[Sampled]:
        """Tokens for `samplers`; on the way, prompt log-probabilities for those that want them."""
        rows: list[int] = []
        row = 0
        for part in step.parts:
            positions = part.prompt_positions
            if positions:
                sequence = part.sequence
                wanted = sequence.tokens[positions.start + 1 : positions.stop + 1]
                own = logits[row : row + len(positions)]
                sequence.prompt_logprobs += logprobs_of(own, wanted, sequence.params.prompt_logprobs or 0)
                row += len(positions)
            if part.samples:
                rows += [row] * (1 + len(part.sequence.siblings))
                row += 1
        if not rows:
            return []
        return sample(logits if rows == list(range(len(logits))) else logits[rows], samplers)

    def _begin(self, load: Load) -> None:
        source = self._scheduler.source
        assert source is not None
        self._attempts.note(load.sequence)
        load.begun_s = time.monotonic()
        load.deadline_s = load.begun_s + source.timeout_s
        try:
            source.load(load, lambda sources: self.post(partial(self._loaded, load, sources)))
        except Exception:
            log.exception("a load could not begin: what it should bring is computed")
            self.post(partial(self._loaded, load, []))

    def _loaded(self, load: Load, sources: list[str]) -> None:
        tokens = self._scheduler.loaded(load, sources)
        self._metrics.loaded(load, tokens, time.monotonic())
        self._publish()

    def _give_up_loads(self) -> float | None:
        """Go on without loads that take too long; seconds until the next one does, None if none can."""
        now_s = time.monotonic()
        next_s = None
        for load in self._scheduler.loads:
            if load.abandoned:
                continue
            if load.deadline_s > now_s:
                next_s = min(next_s or load.deadline_s, load.deadline_s)
                continue
            log.warning(
                "a load of %d tokens takes more than %.1f s: they are computed",
                load.tokens,
                load.deadline_s - load.begun_s,
            )
            self._metrics.load_timeouts.inc()
            self._scheduler.give_up(load)
            next_s = now_s
        return None if next_s is None else next_s - now_s

    def _publish(self) -> None:
        events = self._scheduler.pool.drain_events()
        if events:
            self._events.publish(time.time(), events)

    def _deliver(self, samplers: list[Sequence], sampled: list[Sampled]) -> None:
        now_s = time.monotonic()
        tokens = []
        for sequence, each in zip(samplers, sampled, strict=True):
            self._metrics.token(sequence, now_s)
            token = Token(sequence.index, each.token, each.logprob, sequence.finish, sequence.stop_token)
            tokens.append((self._owners[sequence], token))
            if sequence.transfer is not None and self.transfers is not None:
                self.transfers.running(sequence)
            if sequence.finish is not None:
                self._metrics.finished(sequence, now_s)
                del self._owners[sequence]
        if tokens:
            self._send(tokens)

    def _send(self, tokens: list[tuple[Generation, Token]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_push_all, tokens)

    def _own(self, generation: Generation, prompts: list[list[Sequence]]) -> None:
        for family in prompts:
            self._owners.update(dict.fromkeys(family, generation))

    def _add(self, prompts: list[list[Sequence]]) -> None:
        for family in prompts:
            if family[0].finish is None:  # else it was ended while the source was asked
                self._scheduler.add(family[0])

    def _abort(self, sequences: list[Sequence]) -> None:
        now_s = time.monotonic()
        tokens = []
        for sequence in sequences:
            if (generation := self._owners.pop(sequence, None)) is not None:
                self._scheduler.abort(sequence)
                self._metrics.finished(sequence, now_s)
                tokens.append((generation, Token(sequence.index, None, None, FinishReason.ABORT)))
        self._send(tokens)

    def _clear(self, answer: asyncio.Future[bool]) -> None:
        cleared = self._scheduler.pool.clear()
        self._publish()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_answer, answer, cleared)

    # ---- the event loop again ----

    def _fail(self, why: str) -> None:
        self._end(why)
        self._on_failure()

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        for generation in self._open:
            generation.fail(why)
        for answer in self._clearings:
            if not answer.done():
                answer.set_exception(EngineUnavailable(why))


def _answer(answer: asyncio.Future[bool], value: bool) -> None:
    if not answer.done():  # nobody waits any more, or the engine has ended
        answer.set_result(value)


def _leading(by_source: dict[str, int], tokens: int) -> dict[str, int]:
    """The first `tokens` of a prompt by where they were; `by_source` is in the order of the prompt."""
    left, parts = tokens, {}
    for source, there in by_source.items():
        if part := min(left, there):
            parts[source] = part
            left -= part
    return parts


def _push_all(tokens: list[tuple[Generation, Token]]) -> None:
    for generation, token in tokens:
        generation.push(token)
