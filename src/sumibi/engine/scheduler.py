"""The scheduler: what the model computes in the next step, and what follows from its tokens.

Pure: no torch, no thread, no clock. The loop around it does *ask, compute, account*:

    step = scheduler.schedule()      which sequences, how many tokens of each
    logits = model.forward(step.batch())
    scheduler.account(step, tokens)  positions, blocks, finished sequences

Order within a step. Decodes go first, one token each: they are what people watch. The rest of the
step's token budget goes to prefills, shortest remaining (uncached) first, so that a short or warm request
never queues behind a long one. Ageing keeps that from starving anyone: each token prefilled for one that
arrived later counts as `AGEING` tokens less of one's own, so newcomers get at most `1/AGEING` times a
sequence's own length before it. Work instead of seconds as the measure makes the bound independent of the
machine, and the scheduler of clocks.

Blocks. A sequence is admitted with all blocks of its prompt, so only decodes can run short later. Then the
sequence that arrived last gives its blocks back and waits again with all its tokens; what is still cached
is taken up again, the rest recomputed. The oldest running sequence is never the victim while there is
another, and one alone always fits (`max_tokens` is at most the pool), so there is always progress. A
sequence that would be next but does not fit keeps those behind it from taking its blocks.

Loads. What a `KVSource` has of a prompt is loaded instead of computed (see `loading`): the admitted sequence
is *loading*, with all its blocks and in no step, until the loop says `loaded`. Loads end by themselves, so a
lone sequence that finds no block for its next token, because loads hold them, waits for one instead of
making way.
"""

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from sumibi.engine.batch import SequenceStep, StepBatch
from sumibi.engine.blocks import BlockPool, FullBlock
from sumibi.engine.loading import KVSink, KVSource, Load
from sumibi.engine.sequence import FinishReason, Sequence

AGEING = 0.25
"""Tokens of credit for each token that went to a later arrival: a prefill is delayed by later ones by at
most 1 / AGEING = 4 times its own length (and a step)."""

_arrival = attrgetter("number")


@dataclass(slots=True)
class Part:
    """`count` tokens of one sequence, from `start` on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the part reaches the sequence's last token, so that the next can be sampled."""
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def prompt_positions(self) -> range:
        """Positions whose logits tell log-probabilities of prompt tokens that are wanted."""
        sequence = self.sequence
        if not sequence.wants_prompt_logprobs:
            return range(0)
        first = max(self.start, len(sequence.prompt_logprobs))
        return range(first, min(self.start + self.count, sequence.prompt_tokens - 1))


@dataclass(slots=True)
class Step:
    """What one pass through the model computes."""

    parts: list[Part]

    def batch(self) -> StepBatch:
        """The step as the model takes it. Logits rows: per part its `prompt_positions`, then the sample."""
        return StepBatch([_for_model(part) for part in self.parts])

    def samplers(self) -> list[Sequence]:
        """Sequences that get a token, in order of the parts; siblings right after the one they wait for."""
        return [s for part in self.parts if part.samples for s in (part.sequence, *part.sequence.siblings)]


@dataclass(slots=True)
class Outcome:
    """What the loop has to do after a step."""

    finished: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks (from, to) to copy before the next step: the shared prompt's partial last block."""


class Scheduler:
    """Owns the sequences that wait and run, and decides about the blocks of `pool`."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sequences: int,
        step_tokens: int,
        max_tokens: int,
        source: KVSource | None = None,
        sink: KVSink | None = None,
    ) -> None:
        """`step_tokens` is the budget of a step, `max_tokens` the longest sequence, prompt and output.

        Raises ValueError if a full set of decodes would not fit into a step, or a sequence into the pool.
        """
        if step_tokens < max_sequences:
            raise ValueError(f"a step of {step_tokens} tokens cannot hold {max_sequences} decodes")
        if pool.blocks_for(max_tokens) > pool.num_blocks:
            raise ValueError(f"{max_tokens} tokens do not fit into {pool.num_blocks} blocks")
        self.pool = pool
        self.max_sequences = max_sequences
        self.step_tokens = step_tokens
        self.max_tokens = max_tokens
        self.source = source
        self.sink = sink
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """In order of arrival."""
        self.loads: list[Load] = []
        """Those under way, the abandoned ones among them."""
        self.preemptions = 0
        self._begun: list[Load] = []
        self._pins: list[list[int]] = []

    @property
    def has_work(self) -> bool:
        """Whether there are sequences that want steps. They may all have to wait for a load or a pin to end:
        then `schedule` returns None.
        """
        return bool(self.running or self.waiting)

    @property
    def loading(self) -> int:
        """Sequences that wait for their load."""
        return sum(not load.abandoned for load in self.loads)

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence in; its siblings come with it, once its prompt is computed."""
        sequence.extend_content_ids(sequence.prompt_tokens // self.pool.block_tokens, self.pool.block_tokens)
        self._offer(sequence, self.pool.match_length(self._reusable(sequence)))
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence from outside; its blocks are free at once, or when nobody writes to them any more.
        No effect on one that has ended.
        """
        if sequence.finish is not None:
            return
        sequence.finish = FinishReason.ABORT
        self._tell_end(sequence)
        if sequence.table:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            for load in self.loads:
                load.abandoned |= load.sequence is sequence

    def drain_loads(self) -> list[Load]:
        """Loads that `schedule` has decided on since the last call; the caller has the source begin them."""
        begun, self._begun = self._begun, []
        return begun

    def loaded(self, load: Load, sources: list[str]) -> int:
        """Nothing writes to the load's blocks any more, and as many of them as `sources` names are good.

        Returns the tokens that its sequence need not compute, 0 if it was given up. No effect if it was
        told before.
        """
        if load not in self.loads:
            return 0
        self.loads.remove(load)
        size = self.pool.block_tokens
        sequence, begin = load.sequence, load.first_block * size
        end = min(begin + load.tokens, begin + len(sources) * size)
        for index in range(load.first_block, end // size):
            load.table[index] = self.pool.fill(load.table[index], self._full_block(sequence, index))
        if load.abandoned:
            self.pool.give_back(load.table)
            return 0
        sequence.table, sequence.computed, sequence.filled = load.table, end, end // size
        insort(self.running, sequence, key=_arrival)
        if load.counts:
            assert sequence.cached_tokens is not None
            sequence.cached_tokens += end - begin
            for at, name in enumerate(sources[: -(-(end - begin) // size)]):
                tokens = min(size, end - begin - at * size)
                sequence.cached_by_source[name] = sequence.cached_by_source.get(name, 0) + tokens
        return end - begin

    def give_up(self, load: Load) -> None:
        """The load takes too long: its sequence waits again, and will be computed."""
        load.abandoned = True
        load.sequence.may_load = False
        load.sequence.offered_tokens = 0
        self.waiting.append(load.sequence)

    def pin(self, blocks: list[int]) -> list[int]:
        """Hold `blocks`, all of them held by somebody now, until `unpin` gets what this returns."""
        pinned = self.pool.take(blocks, 0)
        self._pins.append(pinned)
        return pinned

    def unpin(self, pinned: list[int]) -> None:
        """Give back what `pin` held."""
        self._pins = [other for other in self._pins if other is not pinned]
        self.pool.give_back(pinned)

    def schedule(self) -> Step | None:
        """The next step, None if there is nothing to do."""
        parts = []
        for sequence in tuple(self.running):
            # A sequence preempted in favour of an older one, a moment ago, has lost its table.
            if sequence.table and sequence.remaining == 1 and self._has_room_to_decode(sequence):
                parts.append(Part(sequence, sequence.computed, 1))
        budget = self.step_tokens - len(parts)
        parts += self._prefills(budget)
        return Step(parts) if parts else None

    def account(self, step: Step, tokens: list[int]) -> Outcome:
        """Book a computed step. `tokens` are the sampled ones, in the order of `step.samplers()`."""
        self._age(step)
        outcome = Outcome()
        sampled = iter(tokens)
        for part in step.parts:
            sequence = part.sequence
            samples = part.samples  # asked before the sequence grows
            sequence.computed += part.count
            self._fill(sequence)
            if samples:
                family = [sequence, *sequence.siblings]
                for each in family:
                    _append(each, next(sampled), self.max_tokens)
                outcome.copies += self._fork(sequence)
                outcome.finished += [each for each in family if each.finish is not None]
        for sequence in outcome.finished:
            self._tell_end(sequence)
            if sequence.table:
                self.running.remove(sequence)
                self._release(sequence)
        return outcome

    def check_integrity(self) -> None:
        """Raise AssertionError unless sequences, blocks and positions agree."""
        tables = [sequence.table for sequence in self.running]
        self.pool.check_integrity([*tables, *(load.table for load in self.loads), *self._pins])
        assert self.running == sorted(self.running, key=_arrival), "running in order of arrival"
        assert len(self.running) + self.loading <= self.max_sequences, "not more running than allowed"
        for sequence in self.running:
            room = len(sequence.table) * self.pool.block_tokens
            assert sequence.computed < len(sequence.tokens), "something is left to compute"
            assert sequence.computed <= room, "computed tokens have a block"
            assert sequence.filled == sequence.computed // self.pool.block_tokens, "full blocks are known"
        for sequence in self.waiting:
            assert not sequence.table, "who waits holds nothing"
            assert sequence.computed == 0, "who waits has nothing computed"
        known = self.pool.known_blocks()
        for load in self.loads:
            assert not known.intersection(load.blocks), "what is written to is not known"
            if not load.abandoned:
                assert load.sequence not in self.running, "who loads does not run"
                assert load.sequence not in self.waiting, "who loads does not wait"

    def _prefills(self, budget: int) -> list[Part]:
        parts: list[Part] = []
        # Contents that this very step computes, or a load brings.
        soon = {content for load in self.loads if not load.abandoned for content in load.content_ids}
        admitting = True
        candidates = [sequence for sequence in self.running if sequence.remaining > 1]
        if (
            len(self.running) + self.loading < self.max_sequences
        ):  # else nobody can be admitted, however many wait
            candidates += self.waiting
        for sequence in sorted(candidates, key=self._urgency):
            if budget == 0 and (sequence.table or not sequence.offered_tokens):
                continue  # a load needs no budget: it may begin
            if not sequence.table:
                if not admitting or self._is_computed_by_another(sequence, soon):
                    continue
                if not self._admit(sequence):
                    admitting = False
                    continue
                if not sequence.table:  # it is loading
                    soon.update(self._begun[-1].content_ids)
                    continue
            if budget == 0:
                continue
            count = min(sequence.remaining, budget)
            budget -= count
            parts.append(Part(sequence, sequence.computed, count))
            full = (sequence.computed + count) // self.pool.block_tokens
            soon.update(sequence.content_ids[sequence.filled : full])
        return parts

    def _urgency(self, sequence: Sequence) -> tuple[float, int]:
        cached = sequence.computed
        if not sequence.table:
            cached = self.pool.match_length(self._reusable(sequence)) * self.pool.block_tokens
            cached = max(cached, sequence.offered_tokens)
        return len(sequence.tokens) - cached - AGEING * sequence.overtaken_tokens, sequence.number

    def _age(self, step: Step) -> None:
        """Credit those whose prefill is not over for what went to later arrivals."""
        prefills = [part for part in step.parts if part.sequence.remaining > 1]
        newest = max((part.sequence.number for part in prefills), default=-1)
        for sequence in (*self.waiting, *self.running):
            if sequence.remaining > 1 and sequence.number < newest:
                later = (part.count for part in prefills if part.sequence.number > sequence.number)
                sequence.overtaken_tokens += sum(later)

    def _reusable(self, sequence: Sequence) -> list[bytes]:
        """Ids of the blocks that a hit may cover: at least one token must be left to compute."""
        if sequence.wants_prompt_logprobs:
            return []
        return sequence.content_ids[: (len(sequence.tokens) - 1) // self.pool.block_tokens]

    def _is_computed_by_another(self, sequence: Sequence, soon: set[bytes]) -> bool:
        """Whether the first block that is missing will be there after this step: then waiting is cheaper."""
        reusable = self._reusable(sequence)
        known = self.pool.match_length(reusable)
        return known < len(reusable) and reusable[known] in soon

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the blocks of all its tokens, if there are enough and a place is free.

        It runs then, or is loading if the source has more of it than the device.
        One block for each running sequence is left over, so that an admission does not at once lead to a
        preemption.
        """
        others = len(self.running) + self.loading
        if others >= self.max_sequences:
            return False
        hit = self.pool.match(self._reusable(sequence))
        fresh = self.pool.blocks_for(len(sequence.tokens)) - len(hit)
        if not self.pool.can_take(hit, fresh + others):
            return False
        table = self.pool.take(hit, fresh)
        cached = len(hit) * self.pool.block_tokens
        first_time = sequence.cached_tokens is None
        if first_time:
            sequence.cached_tokens = cached
            sequence.cached_by_source = {"device": cached} if cached else {}
        self.waiting.remove(sequence)
        if offered := self._offer(sequence, len(hit)):
            load = Load(sequence, table, len(hit), offered, self.pool.block_tokens, counts=first_time)
            self.loads.append(load)
            self._begun.append(load)
            return True
        sequence.table, sequence.filled, sequence.computed = table, len(hit), cached
        insort(self.running, sequence, key=_arrival)
        return True

    def _offer(self, sequence: Sequence, first_block: int) -> int:
        """Tokens from block `first_block` on that the source has; at least one is left to compute."""
        known = first_block * self.pool.block_tokens
        sequence.offered_tokens = 0
        if self.source is None or not sequence.may_load or sequence.wants_prompt_logprobs:
            return 0
        most = len(sequence.tokens) - 1 - known
        offered = min(self.source.offer(sequence, first_block), most) if most > 0 else 0
        if offered <= 0:
            return 0
        sequence.offered_tokens = known + offered
        return offered

    def _has_room_to_decode(self, sequence: Sequence) -> bool:
        """Make sure that the next token has a block; False if the sequence has to wait or to make way."""
        if sequence.computed < len(sequence.table) * self.pool.block_tokens:
            return True
        while not self.pool.can_take([], 1):
            if self.loads and self.running == [sequence]:
                return False
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.table += self.pool.take([], 1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.waiting.append(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.table)
        sequence.table = []
        sequence.computed = sequence.filled = 0

    def _fill(self, sequence: Sequence) -> None:
        size = self.pool.block_tokens
        full = sequence.computed // size
        if full == sequence.filled:
            return
        sequence.extend_content_ids(full, size)
        first, sequence.filled = sequence.filled, full
        for index in range(first, full):
            sequence.table[index] = self.pool.fill(sequence.table[index], self._full_block(sequence, index))
        if self.sink is not None:
            self.sink.filled(sequence, first)

    def _full_block(self, sequence: Sequence, index: int) -> FullBlock:
        size = self.pool.block_tokens
        return FullBlock(
            content_id=sequence.content_ids[index],
            parent=sequence.content_ids[index - 1] if index else None,
            token_ids=sequence.tokens[index * size : (index + 1) * size],
            salt=sequence.salt,
        )

    def _tell_end(self, sequence: Sequence) -> None:
        if self.sink is not None:
            self.sink.ended(sequence)

    def _fork(self, parent: Sequence) -> list[tuple[int, int]]:
        """Start the siblings on the prompt's blocks; those without a place or a block wait their turn."""
        copies = []
        siblings, parent.siblings = parent.siblings, []
        shared = parent.table[: parent.filled]
        partial = parent.computed % self.pool.block_tokens > 0
        for sibling in siblings:
            sibling.content_ids = parent.content_ids[: parent.filled]
            sibling.cached_tokens = parent.cached_tokens
            sibling.cached_by_source = parent.cached_by_source
            if sibling.finish is not None:
                continue
            full_house = len(self.running) + self.loading >= self.max_sequences
            if full_house or not self.pool.can_take(shared, partial):
                self.waiting.append(sibling)
                continue
            sibling.table = self.pool.take(shared, partial)
            sibling.filled, sibling.computed = parent.filled, parent.computed
            insort(self.running, sibling, key=_arrival)
            if partial:
                copies.append((parent.table[parent.filled], sibling.table[-1]))
        return copies


def _for_model(part: Part) -> SequenceStep:
    sequence, end = part.sequence, part.start + part.count
    logits_at = [position - part.start for position in part.prompt_positions]
    if part.samples:
        logits_at.append(part.count - 1)
    return SequenceStep(sequence.tokens[part.start : end], part.start, sequence.table, logits_at)


def _append(sequence: Sequence, token: int, max_tokens: int) -> None:
    """One more token; ends the sequence if it is a stop token or the last that may be."""
    sequence.tokens.append(token)
    if token in sequence.params.stop_token_ids:
        sequence.finish = FinishReason.STOP
        sequence.stop_token = token
    elif sequence.output_tokens >= sequence.params.max_tokens or len(sequence.tokens) >= max_tokens:
        sequence.finish = FinishReason.LENGTH
