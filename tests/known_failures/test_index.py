"""F14-F16, F29, F32: how large the index gets, whose sizes it goes by, and what is no prefix."""

import gc
import tracemalloc

import pytest
from routing_lab import BLOCK, MODEL, Lab, keys_of, prompt

from sumibi.core.kvevents import BlockRemoved, BlockStored, EventBatch
from sumibi.routing import fleet
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Dispatched,
    EndpointDown,
    EndpointUp,
    Finished,
    FinishReason,
    FirstToken,
)
from sumibi.routing.policies import POLICIES, sglang_cache_aware
from sumibi.routing.router import Router


def matched(lab, token_ids, endpoint):
    """Tokens of a prompt that a decision now would count as cached."""
    name = f"probe{len(lab.router.decisions(1000))}"
    keys = keys_of([*token_ids, 1], block=lab.router.block_tokens(MODEL))
    lab.arrive(name, [*token_ids, 1], keys=keys)
    tokens = lab.candidates(name)[endpoint].matched_tokens
    lab.finish(name, FinishReason.CLIENT_GONE)
    return tokens


def tell(lab, seq, *events, endpoint="e"):
    return lab.batch(endpoint, EventBatch(seq=seq, ts=float(seq), events=list(events)))


def fill(lab, engine_block, tokens, endpoint="e"):
    """One chain of `tokens` tokens, told in blocks of `engine_block`, 4,096 tokens an event."""
    token_ids = prompt("long", tokens)
    step = 4096 // engine_block
    for seq, first in enumerate(range(0, tokens // engine_block, step)):
        hashes = [10**15 + at for at in range(first, min(first + step, tokens // engine_block))]
        ids = token_ids[first * engine_block : (first + len(hashes)) * engine_block]
        parent = hashes[0] - 1 if first else None
        tell(lab, seq, BlockStored(hashes, parent, ids, engine_block, medium="GPU"), endpoint=endpoint)
        lab.recorded.clear()


@pytest.mark.parametrize("engine_block", [1, 2, 4, 16])
def test_f14_small_engine_blocks_do_not_blow_up_the_index(engine_block):
    """R#1158: with blocks of 1 token the index has an entry a token and the router runs out of memory."""
    lab = Lab(check=False)
    lab.up("e", engine_block_tokens=engine_block, has_events=True)
    fill(lab, engine_block, 32_768)
    counters = lab.router.counters()
    assert counters.index_blocks_now == 32_768 // 16
    assert counters.index_bytes_now <= 32_768 // 16 * 260
    assert lab.view("e").blocks == 32_768 // 16


def test_f14_the_index_keeps_its_limit_at_any_block_size():
    """What does not fit is left out, counted and told by the grade."""
    for engine_block in (1, 16, 64):
        lab = Lab(check=False, max_index_blocks=100)
        lab.up("e", engine_block_tokens=engine_block, has_events=True)
        fill(lab, engine_block, 16_384)
        assert lab.router.counters().index_blocks_now <= 100
        assert lab.view("e").grade != "exact"


def _bytes_a_token(engine_block):
    lab = Lab(check=False)
    lab.up("e", engine_block_tokens=engine_block, has_events=True)
    gc.collect()
    tracemalloc.start()
    fill(lab, engine_block, 32_768)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / 32_768


def test_f14_all_maps_counted_a_token_in_blocks_of_1_costs_no_multiple():
    """The same for the maps from engine hashes. A hash a token cannot be had below a dictionary entry (about
    100 bytes), so twice that is the bound.
    """
    assert _bytes_a_token(1) <= 200
    assert _bytes_a_token(16) <= 260 / 16


def test_f15_an_approximate_index_covers_all_tiers():
    """R#1650: the approximate index is sized by the GPU's blocks though the engine offloads to host memory.
    Here the device holds 10 blocks, the host all; the engine says so by its cached tokens.
    """
    lab = Lab()
    lab.up("e", kv_tokens=10 * BLOCK)
    for _ in range(3):
        for i in range(6):
            token_ids = [*prompt(i, 4 * BLOCK), 1]
            lab.run(f"r{lab.t}.{i}", token_ids, prefill_s=0.1, cached_tokens=4 * BLOCK)
    assert [matched(lab, prompt(i, 4 * BLOCK), "e") for i in range(6)] == [4 * BLOCK] * 6


def test_f16_each_endpoint_goes_by_its_own_block_size():
    """R#2455, R#2292: the block size is guessed from one engine and is wrong for a fleet of several kinds."""
    lab = Lab()
    sizes = {"e8": 8, "e16": 16, "e64": 64, "e48": 48}
    lab.up("e16", engine_block_tokens=16, has_events=True)
    for name in ("e8", "e64", "e48"):
        lab.up(name, engine_block_tokens=sizes[name], has_events=True)
    assert lab.router.block_tokens(MODEL) == 16
    token_ids = prompt("p", 192)  # whole blocks of all of them
    for name, size in sizes.items():
        hashes = list(range(192 // size))
        tell(lab, 0, BlockStored(hashes, None, token_ids, size, medium="GPU"), endpoint=name)
        assert matched(lab, token_ids, name) == 192
        tell(lab, 1, BlockRemoved(hashes[-1:], medium="GPU"), endpoint=name)
        assert matched(lab, token_ids, name) == (192 - size) // 16 * 16


def test_f16_larger_blocks_of_a_lower_tier_do_not_disturb_the_device_s():
    """R#2873, R#2874: offloaded blocks are of another size than the device's, and are taken for its size."""
    lab = Lab()
    lab.up("e", engine_block_tokens=16, has_events=True)
    token_ids = prompt("p", 128)
    tell(lab, 0, BlockStored(list(range(8)), None, token_ids, 16, medium="GPU"))
    tell(lab, 1, BlockStored([100, 101], None, token_ids, 64, medium="CPU"))
    assert matched(lab, token_ids, "e") == 128
    tell(lab, 2, BlockRemoved([100, 101], medium="CPU"))
    assert matched(lab, token_ids, "e") == 128
    tell(lab, 3, BlockRemoved([7], medium="GPU"))
    assert matched(lab, token_ids, "e") == 112


def test_f16_each_endpoint_has_its_own_capacity():
    """Mixed engines: what is remembered of a small one is not sized by a large one, in whatever order."""
    lab = Lab()
    sizes = {"small": 8 * BLOCK, "large": 80 * BLOCK}
    for name in ("small", "large", "small"):
        lab.up(name, kv_tokens=sizes[name], process_start_s=1.0)
    for name, other in (("small", "large"), ("large", "small")):
        lab.tell(EndpointDown, endpoint=other, cause="away for a moment")
        for i in range(10):
            assert lab.run(f"{name}{i}", prompt(i, 4 * BLOCK)) == name
        lab.up(other, kv_tokens=sizes[other], process_start_s=1.0)
    assert (lab.view("small").blocks, lab.view("large").blocks) == (8, 40)
    assert [matched(lab, prompt(i, 4 * BLOCK), "small") for i in (7, 8, 9)] == [0, 4 * BLOCK, 4 * BLOCK]
    assert matched(lab, prompt(0, 4 * BLOCK), "large") == 4 * BLOCK


def test_f29_the_same_block_elsewhere_is_no_match():
    """aibrix#917: hashes of blocks are not chained, so a block counts as a hit wherever it stands."""
    lab = Lab()
    lab.up("events", has_events=True)
    lab.up("own")
    common, head, other = (prompt(name, 2 * BLOCK) for name in ("common", "head", "other"))
    tell(lab, 0, BlockStored([1, 2, 3, 4], None, head + common, BLOCK, medium="GPU"), endpoint="events")
    lab.tell(EndpointDown, endpoint="events", cause="away for a moment")
    assert lab.run("s", head + common) == "own"
    lab.up("events", has_events=True)
    tell(lab, 1, endpoint="events")
    for token_ids in (other + common, common, common + head, head[:BLOCK] + common):
        expected = BLOCK if token_ids[:BLOCK] == head[:BLOCK] else 0
        assert matched(lab, token_ids, "own") == expected
        assert matched(lab, token_ids, "events") == expected
    assert matched(lab, head + common, "own") == 4 * BLOCK


def test_f29_removes_of_what_an_endpoint_never_had_do_nothing():
    """ray#58835: one tree for the prefill and the decode fleet: KeyError at the first removal."""
    lab = Lab()
    lab.up("p", "d", has_events=True)
    token_ids = prompt("p", 3 * BLOCK)
    tell(lab, 0, BlockStored([1, 2, 3], None, token_ids, BLOCK, medium="GPU"), endpoint="p")
    tell(lab, 0, BlockRemoved([1, 2, 3], medium="GPU"), endpoint="d")
    tell(lab, 1, BlockStored([1], None, token_ids[:BLOCK], BLOCK, medium="GPU"), endpoint="d")
    tell(lab, 2, BlockRemoved([1], medium="GPU"), endpoint="d")
    assert (matched(lab, token_ids, "p"), matched(lab, token_ids, "d")) == (3 * BLOCK, 0)


class Endless:
    """A router that gets ever new prompts of ever new sessions, one in three seconds."""

    def __init__(self, policy):
        config = RouterConfig(
            policy=policy, decisions_kept=20, recall_blocks=100, approximate_match_tokens=4096
        )
        self.router = Router(config)
        self.t, self.number = 0.0, 0
        for name in ("a", "b"):
            self.tell(
                EndpointUp, endpoint=name, models=[MODEL], kv_tokens=100 * BLOCK, engine_block_tokens=BLOCK
            )

    def tell(self, event_type, **fields):
        return self.router.handle(event_type(t=self.t, **fields))

    def play(self, requests):
        for _ in range(requests):
            self.number += 1
            self.t += 3.0
            name = f"r{self.number}"
            keys = keys_of(prompt(name, 10 * BLOCK))
            self.tell(
                Arrived,
                request=name,
                model=MODEL,
                keys=keys,
                prompt_tokens=10 * BLOCK,
                session=name,
                stream=True,
            )
            (placed,) = self.tell(Admitted, request=name)
            self.tell(Dispatched, request=name, attempt=1, endpoint=placed.endpoint)
            self.tell(FirstToken, request=name, attempt=1)
            self.tell(
                Finished,
                request=name,
                attempt=1,
                reason=FinishReason.STOP,
                answered=True,
                output_tokens=1,
                cached_tokens=0,
            )

    def bytes(self):
        gc.collect()
        return tracemalloc.get_traced_memory()[0]


@pytest.mark.interpreted
@pytest.mark.parametrize("policy", POLICIES)
def test_f32_memory_is_flat_under_endless_distinct_prompts(policy, monkeypatch):
    """ps#687, ps#707, dyn#10774: the prefix tree grows with every prompt that was never seen before."""
    monkeypatch.setattr(fleet, "HISTORY_BLOCKS", 200)
    monkeypatch.setattr(sglang_cache_aware, "TREE_CHARACTERS", 100 * BLOCK * 4)
    endless = Endless(policy)
    endless.play(120)
    tracemalloc.start()
    try:
        endless.play(80)  # what is traced replaces what was there before
        before = endless.bytes()
        endless.play(160)
        grown = endless.bytes() - before
    finally:
        tracemalloc.stop()
    assert endless.router.counters().index_blocks_now <= 2 * 100
    # 160 prompts of 10 blocks at 100 bytes a block would be 160 kB more.
    assert grown < 40_000
