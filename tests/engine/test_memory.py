"""Memory of a process that computes prompts of all lengths."""

import subprocess
import sys

PREFILLS = """
import random
from pathlib import Path

import torch

from sumibi.engine import tiny
from sumibi.engine.batch import SequenceStep, StepBatch
from sumibi.engine.checkpoint import read_config
from sumibi.engine.model import Model

config = read_config(tiny.make_directory())
model = Model.random(
    config, seed=0, dtype="bfloat16", device="cpu", block_tokens=32, num_blocks=40, threads=1
)
rng = random.Random(0)
for _ in range(4):
    with torch.inference_mode():
        for _ in range(50):
            start, count = rng.randrange(1000), rng.randrange(2, 250)
            model.forward(StepBatch([SequenceStep([5] * count, start, list(range(40)), [count - 1])]))
    status = Path("/proc/self/status").read_text()
    print(status.partition("RssAnon:")[2].split()[0])
"""


def test_prompts_of_ever_new_lengths_take_no_ever_new_memory():
    """torch prepares each shape of a product once; without a bound 150 lengths more are 500 MB more.

    In a process of its own: the bound is read before a process's first product.
    """
    run = subprocess.run(
        [sys.executable, "-c", PREFILLS], stdout=subprocess.PIPE, text=True, timeout=100, check=True
    )
    first, *_, last = (int(kib) * 1024 for kib in run.stdout.split())
    assert last - first < 100e6
