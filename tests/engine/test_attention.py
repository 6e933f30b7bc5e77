"""Attention over blocks against the textbook formula, for any layout of sequences in a step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.engine.attention import AttentionPlan, HeadShape, Query

BLOCK_TOKENS = 4
BLOCKS = 64
CPU = torch.device("cpu")


def textbook(queries, heads, keys, values, shape):
    """softmax(q k / ...) v of each row over its sequence's tokens up to itself; scores are in bits."""
    rows = heads.shape[0]
    out = torch.zeros(rows, shape.query_heads, shape.head_dim, dtype=torch.float64)
    for number, query in enumerate(queries):
        for index in range(query.rows):
            seen = query.start + index + 1
            for head in range(shape.query_heads):
                k, v = keys[number][:seen, head // shape.group], values[number][:seen, head // shape.group]
                scores = k.double() @ heads[query.row + index, head].double() * math.log(2)
                out[query.row + index, head] = torch.softmax(scores, 0) @ v.double()
    return out.view(rows, -1)


def scene(lengths, shape, dtype, *, scale=1.0, seed=0):
    """Sequences of (earlier, new) tokens in scattered blocks: queries, heads, cache, each one's KV."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    cache = torch.randn(2 * shape.kv_heads, BLOCKS, BLOCK_TOKENS, shape.head_dim, generator=generator).to(
        dtype
    )
    queries, keys, values, row = [], [], [], 0
    for earlier, new in lengths:
        tokens = earlier + new
        table = [free.pop() for _ in range(-(-tokens // BLOCK_TOKENS))]
        queries.append(Query(row, new, earlier, table))
        row += new
        own = cache[:, table].flatten(1, 2)[:, :tokens].transpose(0, 1)
        keys.append(own[:, : shape.kv_heads])
        values.append(own[:, shape.kv_heads :])
    total = shape.query_heads + 2 * shape.kv_heads
    heads = (torch.randn(row, total, shape.head_dim, generator=generator) * scale).to(dtype)
    return queries, heads, cache.flatten(2), keys, values


def check(lengths, shape, dtype, tolerance, **options):
    queries, heads, cache, keys, values = scene(lengths, shape, dtype, **options)
    plan = AttentionPlan(
        queries, rows=len(heads), shape=shape, block_tokens=BLOCK_TOKENS, dtype=dtype, device=CPU
    )
    found = plan.run(heads, cache)
    right = textbook(queries, heads, keys, values, shape)
    torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
)
def test_any_mix_of_prefills_and_decodes_is_the_textbooks(lengths, kv_heads, group):
    check(lengths, HeadShape(kv_heads, group, 8), torch.float32, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths",
    [[(0, 200)], [(17, 190)], [(5, 129), (0, 2)], [(150, 1)], [(30, 1), (31, 1), (90, 1), (7, 1)]],
    ids=["tiles", "tiles-after-a-prefix", "two-chunks", "one-decode", "decodes"],
)
def test_tiles_and_decodes_are_the_textbooks_in_either_dtype(lengths, dtype):
    check(lengths, HeadShape(2, 3, 16), dtype, 1e-5 if dtype == torch.float32 else 3e-2, scale=0.5)


def test_a_long_decode_is_computed_by_products(monkeypatch):
    monkeypatch.setattr("sumibi.engine.attention._SDPA_MAX_TOKENS", 32)
    check([(50, 1)], HeadShape(2, 3, 16), torch.float32, 1e-5)


@pytest.mark.parametrize("scale", [60.0, -60.0], ids=["many-signs", "other-signs"])
def test_scores_whose_powers_leave_the_number_range_are_still_right(scale):
    check([(0, 40), (13, 5)], HeadShape(2, 2, 16), torch.float32, 1e-4, scale=scale)


def test_scores_far_below_zero_are_still_right():
    shape = HeadShape(1, 1, 8)
    queries, heads, cache, keys, values = scene([(0, 6)], shape, torch.float32)
    cache[:1] = cache[:1].abs() + 20  # every key against every query: about -1,300 bits
    heads[:, :1] = -heads[:, :1].abs() - 8
    keys = [cache[0, queries[0].block_table].view(-1, 1, 8)]
    plan = AttentionPlan(
        queries, rows=6, shape=shape, block_tokens=BLOCK_TOKENS, dtype=torch.float32, device=CPU
    )
    right = textbook(queries, heads, keys, values, shape)
    torch.testing.assert_close(plan.run(heads, cache).double(), right, rtol=1e-3, atol=1e-3)
