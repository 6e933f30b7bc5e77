"""Parts of our connector that need vLLM but no server: what it refuses, and how it reads KV tensors.

They run in vLLM's environment, in one process for all: an import of vLLM takes its time.
"""

import json
import os
import subprocess

import pytest
from vllm_harness import REPOSITORY, VllmEnvironment

SCRIPT = """
import copy, json
from types import SimpleNamespace as Is
import numpy as np, torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from sumibi.core.errors import ConfigError
from sumibi.tiers.vllm.connector import _check
from sumibi.tiers.vllm.device import _TorchBlocks, open_device

answers = {}
kind = dict(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32)
good = Is(
    transfer=Is(kv_load_failure_policy="recompute", kv_role="kv_both"),
    config=Is(
        cache_config=Is(enable_prefix_caching=True, prefix_caching_hash_algo="sha256"),
        parallel_config=Is(world_size=1),
        speculative_config=None,
    ),
    caches=Is(kv_cache_groups=[Is(kv_cache_spec=FullAttentionSpec(**kind))]),
)
bad = {
    "transfer.kv_load_failure_policy": "fail",
    "transfer.kv_role": "kv_consumer",
    "config.cache_config.enable_prefix_caching": False,
    "config.cache_config.prefix_caching_hash_algo": "xxhash",
    "config.parallel_config.world_size": 2,
    "config.speculative_config": object(),
    "caches.kv_cache_groups": [Is(kv_cache_spec=SlidingWindowSpec(**kind, sliding_window=64))],
    "": None,
}
for path, value in bad.items():
    case = copy.deepcopy(good)
    *way, name = path.split(".")
    at = case
    for step in way:
        at = getattr(at, step)
    if name:
        setattr(at, name, value)
    try:
        answers[path] = _check(case.config, case.transfer, case.caches)
    except ConfigError as error:
        answers[path] = str(error)

def tensors(layout):
    random = torch.Generator().manual_seed(1)
    whole = torch.randn(5, 2, 3, 4, 8, generator=random)
    if layout == "rows":
        return {"a": whole[:, 0].contiguous(), "b": whole[:, 1].contiguous().to(torch.bfloat16)}
    if layout == "small kernel blocks":
        return {"a": whole[:, 0].reshape(10, 3, 2, 8)}
    if layout == "blocks outermost":
        return {"a": whole[:, 0], "b": whole[:, 1]}
    return {"a": whole[:, 0].movedim(0, 1).contiguous()}

for layout in ("rows", "small kernel blocks", "blocks outermost", "blocks inside"):
    caches = tensors(layout)
    try:
        device = open_device(caches, 5)
    except ConfigError as error:
        answers[layout] = str(error)
        continue
    per_block = sum(t.numel() * t.element_size() for t in caches.values()) // 5
    raw = [t.reshape(5, -1).contiguous().view(torch.uint8) for t in caches.values()]
    expected = torch.cat([r[[3, 1]] for r in raw], 1).numpy()
    same = device.block_bytes == per_block
    for one in (device, _TorchBlocks([torch.from_numpy(layer) for layer in device._layers])):
        got = np.zeros((2, per_block), np.uint8)
        one.read([3, 1], got)
        same = same and bool((got == expected).all())
        one.write([0, 4], got)
        now = torch.cat([t.reshape(5, -1).contiguous().view(torch.uint8) for t in caches.values()], 1).numpy()
        same = same and bool((now[[0, 4]] == expected).all())
        for name, old in tensors(layout).items():
            caches[name].copy_(old)
    answers[layout] = same
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, str | bool | None]:
    vllm = VllmEnvironment()
    environment = {**os.environ, **vllm.variables("0"), "PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(
        [str(vllm.python), "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("transfer.kv_load_failure_policy", 'give "recompute"'),
        ("transfer.kv_role", 'give "kv_both"'),
        ("config.cache_config.enable_prefix_caching", "--no-enable-prefix-caching"),
        ("config.cache_config.prefix_caching_hash_algo", "give sha256 or sha256_cbor"),
        ("config.parallel_config.world_size", "2 workers"),
        ("config.speculative_config", "speculative decoding"),
        ("caches.kv_cache_groups", "SlidingWindowSpec"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(answers, path, words):
    assert words in answers[path]


def test_what_is_right_is_not_refused(answers):
    assert answers[""] is None


@pytest.mark.parametrize("layout", ["rows", "small kernel blocks", "blocks outermost"])
def test_blocks_are_read_and_written_by_either_way(answers, layout):
    """As memory of the host, and with the operations meant for an accelerator, on the same tensors."""
    assert answers[layout] is True


def test_a_layout_whose_blocks_are_not_rows_is_refused(answers):
    assert "not rows" in answers["blocks inside"]
