"""What a replica gets from elsewhere, by hand: shared store, adapters, KV of a prompt computed elsewhere."""

from math import inf

import pytest

from sumibi.core.latency import LatencyModel
from sumibi.sim.fleet import DiskTier, Group, HostTier, LinkSpec
from sumibi.sim.job import Job, State
from sumibi.sim.replica import Replica, join
from sumibi.sim.tiers import Adapters, Blocks, Link

MODEL = LatencyModel(a_s=0.004, b_s=5e-5, q_s=1.6e-9, d0_s=0.0136, d1_s=2.6e-5, d2_s=4.2e-8)
BLOCK = 64


def group(**changes) -> Group:
    fields = {"count": 1, "latency": MODEL, "kv_tokens": 100_000, "kv_bytes_per_token": 100_000}
    return Group(**(fields | changes))


def run(replica: Replica, until_s: float = inf) -> dict[Job, float]:
    """Advance to `until_s` or the end; when jobs had their first token."""
    first: dict[Job, float] = {}
    while replica.due_s <= until_s and replica.due_s < inf:
        t = replica.due_s
        replica.advance(t)
        for peer in replica.peers:
            first |= dict.fromkeys(peer.first, t)
            peer.first.clear()
    return first


def chunk_s(new: int, before: int) -> float:
    return max(0.004 + 5e-5 * new + 1.6e-9 * new * (before + new / 2), 0.0136)


def test_transfers_of_a_link_follow_one_another():
    link = Link(2.0, 0.5)
    assert link.transfer(4e9, 10.0) == 12.5
    assert link.transfer(1e9, 11.0) == 13.0, "it is set up while the bytes of the other move"
    assert link.transfer(1e9, 20.0) == 21.0


def test_a_tier_forgets_the_blocks_stored_longest_ago_the_deepest_of_a_chain_first():
    tier = Blocks(4, Link(1.0, 0.0))
    tier.store([1, 2, 3])
    tier.store([7, 8])
    assert tier.removed == [3]
    tier.store([1])
    tier.store([9])
    assert tier.removed == [3, 2]
    assert [key in tier for key in (1, 7, 8, 9)] == [True] * 4
    assert tier.match([1, 7, 5, 8], 0, 4) == 2
    assert tier.take([7, 5]) == [7]
    assert len(tier) == 3


def test_one_replica_reads_from_the_store_what_another_computed():
    store = Blocks(1_000, Link(20.0, 0.002))
    one, other = (Replica(name, group(), BLOCK, store=store) for name in "ab")
    keys = list(range(1, 41))
    one.submit(Job(None, keys, 2570, 1), 0.0)
    run(one)
    job = Job(None, keys, 2570, 1)
    other.submit(job, 100.0)
    first = run(other)
    assert (job.cached_tokens, job.lower_tokens) == (2560, 2560)
    restore_s = 0.002 + 2560 * 100_000 / 20e9
    assert first[job] - 100.0 == pytest.approx(restore_s + chunk_s(10, 2560))
    assert len(store) == 40, "a copy was read, the store keeps its own"


def test_what_one_replica_reads_of_the_store_is_no_faster_than_its_own_way_there():
    """Four times the bandwidth for all together: two readers do not slow one another down, one prompt behind
    another of the same reader waits.
    """
    store = Blocks(1_000, Link(80.0, 0.002))
    keys = list(range(1, 41))
    store.store(keys)
    alone_s = 0.002 + 2560 * 100_000 / 20e9
    for name in "ab":
        memory = Replica(name, group(), BLOCK, store=store, reads=Link(20.0, 0.002)).memory
        assert memory.admit(Job(None, keys, 2570, 1), 0, 5.0) == pytest.approx(5.0 + alone_s)
    again = Job(None, keys, 2570, 1)
    assert memory.admit(again, 0, 5.0) == pytest.approx(5.0 + 2 * alone_s - 0.002)


def test_adapters_are_loaded_when_needed_and_unloaded_when_others_are():
    adapters = Adapters(2, 3.0)
    assert adapters.acquire("a", 0.0) == 3.0
    assert adapters.acquire("a", 1.0) == 3.0, "it is being loaded already"
    assert adapters.acquire("b", 2.0) == 5.0
    assert adapters.acquire("c", 4.0) is None, "both slots are in use"
    adapters.release("b")
    assert adapters.acquire("c", 4.0) == 7.0
    adapters.release("a")
    adapters.release("a")
    assert adapters.acquire("b", 9.0) == 12.0, "b was unloaded for c and takes the place of a"


def test_a_request_waits_for_its_adapter_and_others_do_not():
    replica = Replica("r", group(adapters=["x", "y"], adapter_slots=1, adapter_load_s=2.0), BLOCK)
    x, plain, y = (
        Job(None, [], 1000, 1, adapter="x"),
        Job(None, [], 1000, 1),
        Job(None, [], 1000, 1, adapter="y"),
    )
    again = Job(None, [], 1000, 1, adapter="x")
    replica.submit(x, 0.0)
    replica.submit(plain, 0.1)
    replica.submit(y, 0.2)
    first = run(replica)
    assert first[x] == pytest.approx(2.0 + chunk_s(1000, 0))
    assert first[plain] == pytest.approx(0.1 + chunk_s(1000, 0))
    assert first[y] == pytest.approx(first[x] + 2.0 + chunk_s(1000, 0)), "the only slot was in use"
    replica.submit(again, 10.0)
    assert run(replica)[again] == pytest.approx(10.0 + 2.0 + chunk_s(1000, 0))


def test_a_prompt_computed_elsewhere_is_fetched_and_only_its_last_token_computed():
    keys = list(range(1, 16))
    source = Replica("p", group(), BLOCK)
    kept = Job(None, keys, 1000, 1, keep=True)
    source.submit(kept, 0.0)
    assert run(source)[kept] == pytest.approx(chunk_s(1000, 0))
    assert kept.state is State.HELD
    assert source.memory.in_use() == 16, "15 full blocks and the rest of the prompt"
    sink = Replica("d", group(link=LinkSpec(gb_per_s=40.0, setup_s=0.001)), BLOCK)
    job = Job(None, keys, 1000, 5, imported=True)
    sink.submit(job, 1.0)
    first = run(sink, 1.5)
    assert first[job] - 1.0 == pytest.approx(0.001 + 999 * 100_000 / 40e9 + chunk_s(1, 999))
    assert job.cached_tokens == 0
    source.release(kept, 2.0)
    assert source.memory.in_use() == 0
    assert source.memory.cache.match(keys) == 15, "it stays in the cache"
    # The next turn there needs only what is new.
    longer = Job(None, [*keys, 99], 1024, 5, imported=True)
    sink.submit(longer, 3.0)
    first = run(sink)
    assert longer.cached_tokens == 15 * BLOCK
    assert first[longer] - 3.0 == pytest.approx(0.001 + (1023 - 960) * 100_000 / 40e9 + chunk_s(1, 1023))


def test_ranks_step_together_at_the_pace_of_the_slowest():
    ranks = [Replica(name, group(), BLOCK) for name in "ab"]
    join(ranks)
    long, short = Job(None, [], 8000, 20), Job(None, [], 100, 20)
    ranks[0].submit(long, 0.0)
    ranks[1].submit(short, 0.0)
    first = run(ranks[0])
    step_s = chunk_s(8000, 0)
    # The second rank was idle when the first began its step, so its prompt waits for the next.
    assert first[long] == pytest.approx(step_s)
    alone = 0.0136 + 2.6e-5 + 4.2e-8 * 8001
    assert first[short] == pytest.approx(step_s + max(chunk_s(100, 0), alone))
    assert ranks[0].intervals.total == ranks[1].intervals.total == 19
    assert ranks[1].intervals.quantile(1.0) == pytest.approx(alone, rel=0.02)


def test_ranks_hold_up_one_anothers_decodes():
    ranks = [Replica(name, group(), BLOCK) for name in "ab"]
    join(ranks)
    writer = Job(None, [], 100, 200)
    ranks[0].submit(writer, 0.0)
    run(ranks[0], 0.5)
    prompt = Job(None, [], 8000, 1)
    ranks[1].submit(prompt, 0.5)
    run(ranks[0])
    assert ranks[0].intervals.quantile(1.0) == pytest.approx(chunk_s(8000, 0), rel=0.02)
    assert ranks[0].intervals.quantile(0.9) == pytest.approx(0.0136, rel=0.02)


def test_what_is_on_disk_is_brought_up_a_few_blocks_at_a_time_and_read_from_host_memory_then():
    fields = {
        "kv_tokens": 40 * BLOCK,
        "host": HostTier(tokens=30 * BLOCK, gb_per_s=10.0),
        "disk": DiskTier(tokens=1_000 * BLOCK, gb_per_s=1.0, latency_s=0.5),
    }
    replica = Replica("r", group(**fields), BLOCK)
    memory = replica.memory
    agent, strangers = list(range(1, 21)), [list(range(n, n + 35)) for n in (100, 200)]
    for at, keys in enumerate((agent, *strangers)):
        replica.submit(Job(None, keys, len(keys) * BLOCK + 5, 1), 10.0 * at)
        run(replica)
    assert memory.cache.match(agent) == 0
    assert memory.host is not None
    assert memory.host.match(agent, 0, 20) == 0
    # Eight blocks at once: latency, and bytes over bandwidth.
    at_once_s = 0.5 + 8 * BLOCK * 100_000 / 1e9
    reading = memory.bring_up(agent, 100.0)
    assert reading == (agent[:8], pytest.approx(100.0 + at_once_s))
    memory.came_up(reading[0], agent)
    while reading is not None:
        memory.came_up(reading[0], agent)
        reading = memory.bring_up(agent, reading[1])
    assert memory.host.match(agent, 0, 20) == 20
    assert memory.brought_up == 20
    job = Job(None, agent, 20 * BLOCK + 5, 1)
    replica.submit(job, 200.0)
    first = run(replica)
    assert (job.cached_tokens, job.lower_tokens) == (20 * BLOCK, 20 * BLOCK)
    assert first[job] - 200.0 == pytest.approx(20 * BLOCK * 100_000 / 10e9 + chunk_s(5, 20 * BLOCK))
    assert memory.brought_used == 20
    # Without a hint it waits for the disk.
    replica.submit(Job(None, strangers[0], 35 * BLOCK + 5, 1), 300.0)
    replica.submit(Job(None, list(range(300, 335)), 35 * BLOCK + 5, 1), 310.0)
    run(replica)
    again = Job(None, agent, 20 * BLOCK + 5, 1)
    replica.submit(again, 400.0)
    assert memory.host.match(agent, 0, 20) == 0
    first = run(replica)
    assert first[again] - 400.0 == pytest.approx(0.5 + 20 * BLOCK * 100_000 / 1e9 + chunk_s(5, 20 * BLOCK))
