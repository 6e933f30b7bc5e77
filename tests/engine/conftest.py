"""A model without arithmetic, and a loop without threads: what scheduler tests run on."""

from zlib import crc32

import pytest

from sumibi.core.content import content_root
from sumibi.engine.blocks import BlockPool
from sumibi.engine.scheduler import Scheduler
from sumibi.engine.sequence import SamplingParams, Sequence

VOCABULARY = 50


def next_token(tokens):
    """What the fake model says after `tokens`: any function that depends on all of them."""
    return crc32(bytes(tokens)) % VOCABULARY


def continuation(prompt, count):
    """The oracle: `count` tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeModel:
    """Keeps tokens where a model keeps KV, so that a wrong block shows as a wrong token."""

    def __init__(self, num_blocks, block_tokens):
        self.memory = [[None] * block_tokens for _ in range(num_blocks)]
        self.block_tokens = block_tokens

    def forward(self, batch):
        """One next token for each wanted position, rows as the real model orders them."""
        rows = []
        for step in batch.sequences:
            assert step.token_ids, "nothing to compute"
            for position, token in enumerate(step.token_ids, step.start):
                block, offset = divmod(position, self.block_tokens)
                self.memory[step.block_table[block]][offset] = token
            context = [token for block in step.block_table for token in self.memory[block]]
            rows += [next_token(context[: step.start + at + 1]) for at in step.logits_at]
        return rows

    def copy_blocks(self, pairs):
        for source, target in pairs:
            self.memory[target] = list(self.memory[source])


class Runner:
    """Scheduler and fake model, stepped by hand; checks the books after every step."""

    def __init__(self, *, num_blocks=64, block_tokens=4, max_sequences=8, step_tokens=16, max_tokens=None):
        self.pool = BlockPool(num_blocks, block_tokens)
        self.model = FakeModel(num_blocks, block_tokens)
        self.scheduler = Scheduler(
            self.pool,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
            max_tokens=max_tokens or num_blocks * block_tokens,
        )
        self.numbers = 0
        self.steps = 0

    def add(self, prompt, *, max_tokens=4, n=1, salt="", **params):
        """Queue a request; returns its sequences."""
        family = []
        for index in range(n):
            family.append(
                Sequence(
                    number=self.numbers,
                    prompt_tokens=len(prompt),
                    tokens=list(prompt),
                    params=SamplingParams(max_tokens=max_tokens, **params),
                    content_ids=[],
                    root=content_root("fake", salt=salt),
                    salt=salt,
                    index=index,
                )
            )
            self.numbers += 1
        family[0].siblings = family[1:]
        self.scheduler.add(family[0])
        return family

    def step(self):
        """One step; returns it, None if there was nothing to do."""
        step = self.scheduler.schedule()
        if step is None:
            assert not self.scheduler.has_work
            return None
        assert step.tokens <= self.scheduler.step_tokens
        rows = iter(self.model.forward(step.batch()))
        tokens = []
        for part in step.parts:
            for _ in part.prompt_positions:
                next(rows)
            if part.samples:
                tokens += [next(rows)] * (1 + len(part.sequence.siblings))
        outcome = self.scheduler.account(step, tokens)
        self.model.copy_blocks(outcome.copies)
        self.scheduler.check_integrity()
        self.steps += 1
        return step

    def run(self):
        """Step until idle."""
        while self.step():
            pass


@pytest.fixture(scope="session")
def make_runner():
    return Runner


@pytest.fixture(scope="session")
def oracle():
    return continuation
