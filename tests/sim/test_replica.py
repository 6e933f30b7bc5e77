"""One simulated engine against a token-by-token one, by hand, and at the limits of its memory."""

from math import inf, log
from random import Random

import pytest
from engine_oracle import Naive, play

from sumibi.core.latency import LatencyModel
from sumibi.routing.events import KeysAdded, KeysCopied, KeysRemoved
from sumibi.sim.fleet import Group, HostTier
from sumibi.sim.replica import Job, Replica

MODEL = LatencyModel(a_s=0.004, b_s=5e-5, q_s=1.6e-9, d0_s=0.0136, d1_s=2.6e-5, d2_s=4.2e-8)
BLOCK = 64


def group(**changes) -> Group:
    fields = {
        "count": 1,
        "latency": MODEL,
        "kv_tokens": 10_000_000,
        "chunk_tokens": 2048,
        "max_sequences": 32,
    }
    return Group(**(fields | changes))


def drive(
    replica: Replica, arrivals: list[tuple[float, Job]], check=None
) -> tuple[dict[Job, float], dict[Job, float]]:
    """Feed jobs at their times (ascending), run to the end; times of first and last tokens."""
    first, end = {}, {}
    coming = list(arrivals)
    for _ in range(1_000_000):
        t = min(coming[0][0] if coming else inf, replica.due_s)
        if t == inf:
            break
        if coming and coming[0][0] <= replica.due_s:
            replica.submit(coming.pop(0)[1], t)
        else:
            replica.advance(t)
        first |= dict.fromkeys(replica.first, t)
        end |= dict.fromkeys(replica.done, t)
        replica.first.clear()
        replica.done.clear()
        if check is not None:
            check(replica)
    return first, end


def chain(name: int, blocks: int) -> list[int]:
    return [name * 1_000_000 + i for i in range(blocks)]


@pytest.mark.parametrize("seed", range(8))
def test_many_steps_at_once_are_the_steps_one_by_one(seed):
    random = Random(seed)
    t, naive, jobs = 0.0, [], []
    for _ in range(150):
        t += random.expovariate(random.choice([2.0, 8.0, 30.0]))
        prompt, output = random.choice([1, 50, 700, 2048, 9000]), random.choice([1, 2, 40, 300])
        naive.append(Naive(t, prompt, output))
        jobs.append((t, Job(None, [], prompt, output)))
    intervals = play(naive, MODEL, chunk_tokens=2048, max_sequences=32)
    replica = Replica("r", group(), BLOCK)
    first, end = drive(replica, jobs)
    for (_, job), expected in zip(jobs, naive, strict=True):
        assert first[job] == pytest.approx(expected.first_s, abs=1e-6)
        assert end[job] == pytest.approx(expected.end_s, abs=1e-6)
    assert replica.intervals.total == len(intervals) == sum(job.output - 1 for job in naive)
    ordered = sorted(intervals)
    for q in (0.5, 0.9, 0.99):
        expected = ordered[int(q * (len(ordered) - 1))]
        # Steps of one stretch count at their mean, and the histogram knows a value to half a percent.
        assert abs(log(replica.intervals.quantile(q) / expected)) < 0.02


def test_one_request_alone_takes_what_its_steps_take():
    replica = Replica("r", group(), BLOCK)
    job = Job(None, [], 3000, 11)
    first, end = drive(replica, [(1.0, job)])
    chunk_1 = 0.004 + 5e-5 * 2048 + 1.6e-9 * 2048 * 1024
    chunk_2 = 0.004 + 5e-5 * 952 + 1.6e-9 * 952 * (2048 + 476)
    assert first[job] == pytest.approx(1.0 + chunk_1 + chunk_2)
    contexts = sum(range(3001, 3011))
    assert end[job] - first[job] == pytest.approx(10 * (0.0136 + 2.6e-5) + 4.2e-8 * contexts)


def test_the_prefix_of_an_earlier_prompt_is_not_computed_again():
    replica = Replica("r", group(), BLOCK)
    a, b = Job(None, chain(1, 20), 1300, 1), Job(None, chain(1, 20) + chain(2, 5), 1650, 1)
    c = Job(None, chain(1, 20), 1280, 1)
    first, _ = drive(replica, [(0.0, a), (10.0, b), (20.0, c)])
    assert (a.cached_tokens, b.cached_tokens) == (0, 1280)
    assert c.cached_tokens == 1280 - 64, "the last token is always computed, so the last full block is"
    assert first[b] - 10.0 == pytest.approx(0.004 + 5e-5 * 370 + 1.6e-9 * 370 * (1280 + 185))
    told = [change for change in replica.memory.changes if isinstance(change, KeysAdded)]
    assert told[0] == KeysAdded("gpu", None, chain(1, 20))
    assert told[1] == KeysAdded("gpu", chain(1, 20)[-1], chain(2, 5))


def test_blocks_are_found_as_soon_as_their_step_is_over():
    replica = Replica("r", group(), BLOCK)
    keys = chain(1, 96)
    a, b = Job(None, keys, 6144, 1), Job(None, keys, 6144, 1)
    one_step = 0.004 + 5e-5 * 2048 + 1.6e-9 * 2048 * 1024
    drive(replica, [(0.0, a), (one_step * 1.5, b)])
    # b waits for a's three chunks (the token budget of each step), and finds all of them but its last block.
    assert b.cached_tokens == 6144 - 64


def invariants(replica: Replica) -> None:
    memory, cache = replica.memory, replica.memory.cache
    assert cache.pinned <= cache.blocks
    assert memory._private >= 0
    assert memory._promised >= memory._arriving >= 0
    assert memory.in_use() <= cache.capacity
    # Chunks of the step under way have had their room made but are not resident yet.
    assert cache.blocks + memory.output_blocks() + memory._arriving <= cache.capacity


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("host_tokens", [0, 8_000])
def test_memory_is_never_overdrawn_and_all_of_it_comes_back(seed, host_tokens):
    random = Random(seed)
    host = HostTier(tokens=host_tokens) if host_tokens else None
    replica = Replica("r", group(kv_tokens=9_600, host=host), BLOCK, noise=0.15, seed=seed)
    jobs, t = [], 0.0
    for _ in range(250):
        t += random.expovariate(6.0)
        keys = chain(random.randrange(12), random.randrange(0, 60))
        prompt = len(keys) * BLOCK + random.randrange(1, BLOCK)
        job = Job(None, keys, prompt, random.choice([1, 30, 900]))
        assert replica.fits(prompt, job.output_tokens)
        jobs.append((t, job))
    resident, in_host = set(), set()

    def check(replica: Replica) -> None:
        invariants(replica)
        for change in replica.memory.changes:
            store = resident if change.tier == "gpu" else in_host
            match change:
                case KeysAdded() | KeysCopied():
                    store.update(change.keys)
                case KeysRemoved():
                    assert store.issuperset(change.keys)
                    store.difference_update(change.keys)
        replica.memory.changes.clear()

    _, end = drive(replica, jobs, check)
    assert len(end) == len(jobs)
    assert replica.preemptions > 0
    assert (replica.memory.in_use(), replica.running, replica.queued) == (0, 0, 0)
    assert replica._contexts == 0
    assert len(resident) == replica.memory.cache.blocks, "events told of every block that came and went"
    if host_tokens:
        assert in_host == set(replica.memory.host._blocks)
        assert not resident & in_host
        assert sum(job.lower_tokens for _, job in jobs) > 0
    generated = sum(job.output_tokens - 1 for _, job in jobs)
    assert replica.intervals.total == generated


def test_too_big_a_request_never_fits():
    replica = Replica("r", group(kv_tokens=6_400), BLOCK)
    assert replica.fits(6_000, 336)
    assert not replica.fits(6_000, 337)


def test_the_last_one_admitted_gives_way_and_is_computed_again():
    replica = Replica("r", group(kv_tokens=2_560), BLOCK)
    a, b = Job(None, [], 1_000, 600), Job(None, [], 1_000, 600)
    _, end = drive(replica, [(0.0, a), (0.001, b)], invariants)
    assert replica.preemptions == 1
    assert end[a] < end[b]
    # What b had generated by then is computed again, with its prompt.
    assert 2_000 < replica.prefill_tokens - 1_000 < 2_000 + 600


def test_host_memory_gives_back_what_the_device_let_go_of():
    tier = HostTier(tokens=64_000, gb_per_s=20.0, latency_s=0.001)
    replica = Replica("r", group(kv_tokens=6_400, host=tier, kv_bytes_per_token=100_000), BLOCK)
    a, other, again = (
        Job(None, chain(1, 40), 2570, 1),
        Job(None, chain(2, 80), 5130, 1),
        Job(None, chain(1, 40), 2570, 1),
    )
    first, _ = drive(replica, [(0.0, a), (10.0, other), (20.0, again)])
    assert again.cached_tokens == 2560
    assert again.lower_tokens > 0
    on_device = 2560 - again.lower_tokens
    restore = 0.001 + again.lower_tokens * 100_000 / 20e9
    chunk = max(0.004 + 5e-5 * 10 + 1.6e-9 * 10 * (2560 + 5), 0.0136)
    assert first[again] - 20.0 == pytest.approx(restore + chunk)
    assert on_device < 2560


def test_a_restore_does_not_hold_up_the_others():
    tier = HostTier(tokens=64_000, gb_per_s=0.1, latency_s=0.0)
    replica = Replica("r", group(kv_tokens=6_400, host=tier, kv_bytes_per_token=100_000), BLOCK)
    jobs = [
        Job(None, chain(1, 40), 2570, 1),
        Job(None, chain(2, 80), 5130, 1),
        Job(None, chain(1, 40), 2570, 1),
    ]
    short = Job(None, [], 100, 5)
    first, _ = drive(replica, [(0.0, jobs[0]), (10.0, jobs[1]), (20.0, jobs[2]), (20.1, short)])
    assert first[jobs[2]] - 20.0 > 1.0
    assert first[short] - 20.1 < 0.05


def test_a_slow_replica_takes_so_many_times_as_long():
    times = []
    for factor in (1.0, 3.0):
        replica = Replica("r", group(), BLOCK)
        replica.slow(factor, 0.0)
        job = Job(None, [], 3000, 100)
        _, end = drive(replica, [(0.0, job)])
        times.append(end[job])
    assert times[1] == pytest.approx(3 * times[0])


def test_an_abort_frees_memory_and_leaves_the_others_alone():
    replica = Replica("r", group(), BLOCK)
    a, b = Job(None, chain(1, 15), 1_000, 400), Job(None, chain(2, 15), 1_000, 400)
    replica.submit(a, 0.0)
    replica.submit(b, 0.0)
    t = 0.0
    while t < 2.0:
        t = replica.due_s
        replica.advance(t)
        replica._cut(t + 0.1)
    replica.abort(a, t + 0.01)
    _, end = drive(replica, [])
    assert list(end) == [b]
    assert (replica.memory.in_use(), replica.sequences, replica._contexts) == (0, 0, 0)


def test_a_process_that_dies_loses_its_requests_and_caches():
    replica = Replica("r", group(), BLOCK)
    jobs = [Job(None, chain(i, 15), 1_000, 400) for i in range(3)]
    for job in jobs:
        replica.submit(job, 0.0)
    replica.advance(replica.due_s)
    replica.advance(replica.due_s)
    assert set(replica.die()) == set(jobs)
    assert replica.due_s == inf
    again = Job(None, chain(0, 15), 1_000, 2)
    drive(replica, [(5.0, again)], invariants)
    assert again.cached_tokens == 0
