"""Memory of a process that computes prompts of all lengths."""

import random
from pathlib import Path

import torch

from sumibi.engine import tiny
from sumibi.engine.batch import SequenceStep, StepBatch
from sumibi.engine.checkpoint import read_config
from sumibi.engine.model import Model


def resident_bytes():
    """Of this process, without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_prompts_of_ever_new_lengths_take_no_ever_new_memory():
    """torch prepares each shape of a product once; without a bound 150 lengths more are 500 MB more."""
    config = read_config(tiny.make_directory())
    model = Model.random(
        config, seed=0, dtype="bfloat16", device="cpu", block_tokens=32, num_blocks=40, threads=1
    )
    rng = random.Random(0)

    def prefill():
        start, count = rng.randrange(1000), rng.randrange(2, 250)
        model.forward(StepBatch([SequenceStep([5] * count, start, list(range(40)), [count - 1])]))

    with torch.inference_mode():
        for _ in range(50):
            prefill()
        before = resident_bytes()
        for _ in range(150):
            prefill()
    assert resident_bytes() - before < 100e6
