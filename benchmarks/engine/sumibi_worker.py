"""The embedded engine as a contestant: scheduler, model and sampler, as the server steps them."""

import sys
from pathlib import Path

import torch
from benchmarks.engine.worker import Contestant, Stopwatch, Task, Took, random_prompts, serve

from sumibi.core.content import content_root
from sumibi.engine.blocks import BlockPool
from sumibi.engine.model import Model
from sumibi.engine.sampler import sample
from sumibi.engine.scheduler import Scheduler
from sumibi.engine.sequence import SamplingParams, Sequence

BLOCK_TOKENS = 32
BLOCKS = 512


class Sumibi:
    """See the module."""

    def __init__(self, directory: Path, step_tokens: int) -> None:
        self._model = Model.load(
            directory,
            dtype="bfloat16",
            device="cpu",
            block_tokens=BLOCK_TOKENS,
            num_blocks=BLOCKS,
            threads=1,
        )
        pool = BlockPool(BLOCKS, BLOCK_TOKENS)
        self._scheduler = Scheduler(pool, max_sequences=64, step_tokens=step_tokens, max_tokens=8192)
        self._numbers = 0

    def run(self, task: Task) -> Took:
        """See Contestant."""
        sequences = [self._sequence(prompt, task.steps + 1) for prompt in random_prompts(task)]
        for sequence in sequences:
            self._scheduler.add(sequence)
        with Stopwatch() as watch:
            while any(sequence.output_tokens == 0 for sequence in sequences):
                self._step()
        if task.steps:
            with Stopwatch() as watch:
                while self._scheduler.has_work:
                    self._step()
        return watch.took

    def _sequence(self, prompt: list[int], tokens: int) -> Sequence:
        self._numbers += 1
        return Sequence(
            number=self._numbers,
            prompt_tokens=len(prompt),
            tokens=prompt,
            params=SamplingParams(max_tokens=tokens, temperature=0.0),
            content_ids=[],
            root=content_root("benchmark"),
        )

    def _step(self) -> None:
        step = self._scheduler.schedule()
        assert step is not None
        with torch.inference_mode():
            tokens = sample(self._model.forward(step.batch()), step.samplers())
        outcome = self._scheduler.account(step, [each.token for each in tokens])
        self._model.copy_blocks(outcome.copies)
        self._scheduler.pool.drain_events()


def _make() -> tuple[Contestant, str]:
    return Sumibi(Path(sys.argv[1]), int(sys.argv[2])), f"torch {torch.__version__}, bf16, one thread"


if __name__ == "__main__":
    serve(_make)
