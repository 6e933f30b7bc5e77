"""Prefill and decode on separate replicas: times by hand, finite memory, failures, conservation."""

import io
import sys
from array import array
from random import Random

import pytest

from sumibi.core.errors import ConfigError
from sumibi.core.latency import LatencyModel
from sumibi.routing.recording import replay
from sumibi.sim import simulate, world
from sumibi.sim.fleet import Fault, FleetSpec, Group, LinkSpec, parse
from sumibi.sim.latency import named
from sumibi.sim.results import Run, Status
from sumibi.sim.workload import Session, Turn, Workload

MODEL = LatencyModel(a_s=0.004, b_s=5e-5, q_s=1.6e-9, d0_s=0.0136, d1_s=2.6e-5, d2_s=4.2e-8)
BLOCK = 64
KV_BYTES = 100_000
OVERHEAD_S = 0.015
LINK = LinkSpec(gb_per_s=1.0, setup_s=0.002)
EXACT = {"noise": 0.0, "wrong_constants": False}


def fleet(prefill=1, decode=1, *, decode_kv=200_000, prefill_kv=200_000, link=LINK, **outer) -> FleetSpec:
    fields = {"latency": MODEL, "kv_bytes_per_token": KV_BYTES, "link": link}
    groups = [
        Group(name="p", count=prefill, role="prefill", kv_tokens=prefill_kv, **fields),
        Group(name="d", count=decode, role="decode", kv_tokens=decode_kv, **fields),
    ]
    return FleetSpec(name="pd", groups=groups, **outer)


def prompts(*asked: tuple[float, int, int]) -> Workload:
    """(when, prompt tokens, output tokens); no two have a block in common."""
    sessions = []
    for i, (t, prompt, output) in enumerate(asked):
        keys = [i * 10_000 + 7 + j for j in range(prompt // BLOCK)]
        turn = Turn(blocks=array("I", range(len(keys))), prompt_tokens=prompt, output_tokens=output)
        sessions.append(Session(f"one-{i}", keys, [turn], start_s=t))
    return Workload("prompts", BLOCK, sessions)


def talks(sessions=40, turns=6, seed=0) -> Workload:
    """Conversations that grow, with a system prompt in common."""
    random, built = Random(seed), []
    for name in range(1, sessions + 1):
        keys, made = list(range(1, 21)), []
        for i in range(turns):
            keys += [name * 1_000_000 + 1000 * i + j for j in range(random.randrange(1, 60))]
            made.append(
                Turn(
                    blocks=array("I", range(len(keys))),
                    prompt_tokens=len(keys) * BLOCK + random.randrange(1, BLOCK),
                    output_tokens=random.randrange(1, 200),
                    after=i - 1 if i else None,
                    delay_s=random.random() * 2 if i else 0.0,
                )
            )
        built.append(Session(f"talk-{name}", keys, made))
    return Workload("talks", BLOCK, built, start_spread_s=0.0)


class Watched:
    """A run and the world it was played in."""

    def __init__(self, workload, spec, **settings):
        kept = []

        class World(world.World):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                kept.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["sumibi.sim.simulate"], "World", World)
            self.run: Run = simulate(workload, spec, **settings)
        (self.world,) = kept

    def settle(self):
        """The router and all replicas when everything is over: nothing is held anywhere."""
        router = self.world.router
        router.check_integrity()
        assert all(v.inflight == v.coming == 0 for v in router.fleet_view())
        assert all(site.replica.memory.in_use() == 0 for site in self.world.sites)


@pytest.mark.interpreted
def test_a_pair_takes_prefill_two_ways_a_transfer_and_a_step():
    watched = Watched(prompts((1.0, 8000, 11)), fleet(), policy="round-robin", **EXACT)
    calls = watched.run.calls
    moved_s = 0.002 + 7999 * KV_BYTES / 1e9
    # The last token is computed where it decodes; that step takes what reading the weights takes.
    ttft_s = MODEL.prefill_s(8000) + 2 * OVERHEAD_S + moved_s + MODEL.d0_s
    assert calls.first_s[0] - 1.0 == pytest.approx(ttft_s, abs=1e-6)
    steps_s = sum(MODEL.decode_step_s(1, 8001 + i) for i in range(10))
    assert calls.end_s[0] - calls.first_s[0] == pytest.approx(steps_s, rel=1e-6)
    assert (calls.prefill[0], calls.endpoint[0], calls.cached_tokens[0]) == (0, 1, 0)
    watched.settle()


@pytest.mark.interpreted
def test_a_follow_up_moves_and_computes_only_what_is_new():
    first, second = array("I", range(100)), array("I", range(110))
    turns = [
        Turn(blocks=first, prompt_tokens=6401, output_tokens=2),
        Turn(blocks=second, prompt_tokens=7050, output_tokens=2, after=0, delay_s=1.0),
    ]
    workload = Workload("talk", BLOCK, [Session("talk", list(range(110)), turns, start_s=0.0)])
    calls = Watched(workload, fleet(), policy="round-robin", **EXACT).run.calls
    assert list(calls.cached_tokens) == [0, 6400]
    moved_s = 0.002 + (7049 - 6400) * KV_BYTES / 1e9
    ttft_s = MODEL.prefill_s(650, 6400) + 2 * OVERHEAD_S + moved_s + MODEL.d0_s
    assert calls.first_s[1] - calls.arrival_s[1] == pytest.approx(ttft_s, abs=1e-6)


@pytest.mark.interpreted
def test_decode_memory_is_finite_and_the_prefill_endpoint_keeps_what_waits():
    spec = fleet(decode_kv=10_048, prefill_kv=40_000)
    # 8,000 + 1,000 tokens each: one at a time where they decode.
    watched = Watched(prompts((0.0, 8000, 1000), (0.0, 8000, 1000)), spec, policy="round-robin", **EXACT)
    calls = watched.run.calls
    assert calls.status[0] == calls.status[1] == Status.DONE
    assert calls.first_s[1] > calls.end_s[0]
    fetched_s = 0.002 + 7999 * KV_BYTES / 1e9
    assert calls.first_s[1] - calls.end_s[0] == pytest.approx(fetched_s + MODEL.d0_s, abs=0.02)
    watched.settle()


@pytest.mark.interpreted
def test_what_is_kept_too_long_is_computed_where_it_decodes():
    link = LinkSpec(gb_per_s=1.0, setup_s=0.002, keep_s=5.0)
    spec = fleet(decode_kv=10_048, prefill_kv=40_000, link=link)
    watched = Watched(prompts((0.0, 8000, 1000), (0.0, 8000, 1000)), spec, policy="round-robin", **EXACT)
    calls = watched.run.calls
    assert calls.first_s[1] - calls.end_s[0] == pytest.approx(MODEL.prefill_s(8000), abs=0.02)
    assert (calls.prefill[0], calls.prefill[1]) == (0, 1)
    watched.settle()


@pytest.mark.interpreted
def test_a_link_is_shared_at_either_end():
    """Two prompts of one prefill replica for two decode replicas, ready at the same time (data-parallel
    chunks of one step), leave it one after the other; the second is set up while the bytes of the first move.
    """
    tokens = 4000
    watched = Watched(prompts((0.0, tokens, 2), (0.0, tokens, 2)), fleet(1, 2), policy="round-robin", **EXACT)
    calls = watched.run.calls
    first, second = sorted(calls.first_s)
    assert second - first == pytest.approx((tokens - 1) * KV_BYTES / 1e9, abs=1e-6)
    assert sorted(calls.endpoint) == [1, 2]


@pytest.mark.interpreted
@pytest.mark.parametrize("policy", ["cost", "round-robin", "random"])
def test_every_request_ends_once_and_every_token_is_accounted_for(policy: str):
    workload = talks()
    watched = Watched(workload, fleet(2, 2), policy=policy, users=16, seed=3)
    run, calls = watched.run, watched.run.calls
    assert len(calls) == workload.requests
    assert (run.summary.rejected, run.summary.failed) == (0, 0)
    assert sum(calls.output_tokens) - len(calls) == run.intervals.total
    for i in range(len(calls)):
        assert calls.arrival_s[i] <= calls.dispatch_s[i] < calls.first_s[i] <= calls.end_s[i]
        assert calls.prompt_tokens[i] - calls.cached_tokens[i] >= calls.unavoidable_tokens[i]
    counters = watched.world.router.counters()
    assert counters.stale_events == 0
    assert sum(sum(kind.values()) for kind in counters.disagg.values()) == len(calls)
    if policy != "cost":
        assert set(calls.prefill) == {0, 1}
        computed = sum(calls.prompt_tokens[i] - calls.cached_tokens[i] for i in range(len(calls)))
        assert sum(site.replica.prefill_tokens for site in watched.world.sites[:2]) == computed
    watched.settle()


@pytest.mark.interpreted
@pytest.mark.parametrize("policy", ["cost", "round-robin"])
def test_faults_on_both_sides_strand_nothing_and_a_log_of_them_replays_bit_equal(policy: str):
    faults = [
        Fault(at_s=3.0, endpoint="p-0", kind="restart", until_s=9.0),
        Fault(at_s=6.0, endpoint="d-1", kind="restart", until_s=12.0),
        Fault(at_s=11.0, endpoint="p-1", kind="down", until_s=16.0),
        Fault(at_s=14.0, endpoint="d-0", kind="restart", until_s=17.0),
        Fault(at_s=18.0, endpoint="p-1", kind="restart", until_s=21.0),
        Fault(at_s=20.0, endpoint="d-0", kind="slow", until_s=30.0),
    ]
    log = io.BytesIO()
    workload = talks(60, 6)
    spec = fleet(2, 2, faults=faults, timeout_s=20.0, kv_replay=True)
    watched = Watched(workload, spec, policy=policy, users=24, seed=1, log=log)
    run = watched.run
    assert len(run.calls) == workload.requests
    assert list(run.calls.status).count(Status.DONE) > 0.8 * workload.requests
    assert max(run.calls.attempts) > 1
    watched.settle()
    counters = watched.world.router.counters()
    assert counters.disagg["decode-only"]["fallback"] > 0
    (again,) = replay(log.getvalue().splitlines())
    assert again.counters() == counters
    assert again.decisions(1000) == watched.world.router.decisions(1000)
    assert again.outcomes(1000) == watched.world.router.outcomes(1000)


def test_equal_seeds_give_equal_runs():
    runs = [simulate(talks(20), fleet(2, 2), users=8, seed=5) for _ in range(2)]
    assert runs[0].calls.first_s == runs[1].calls.first_s
    assert runs[0].calls.prefill == runs[1].calls.prefill


def test_nobody_who_decodes_stands_still_for_a_prefill():
    """A chunk of 8,192 tokens after 24,000 takes the step beside it to the better part of a second (the band
    for Qwen3-32B on two H100: 0.89 s after 32,000); apart, intervals stay those of pure decode.
    """
    asked = [(0.0, 1000, 600)] + [(2.0 + i, 30_000, 2) for i in range(6)]
    together = FleetSpec(name="one", groups=[Group(count=1, latency="qwen3-32b/2xh100", kv_tokens=307_328)])
    pools = [
        Group(name=role[0], role=role, count=1, latency="qwen3-32b/2xh100", kv_tokens=307_328)
        for role in ("prefill", "decode")
    ]
    apart = FleetSpec(name="two", groups=pools)
    worst_s = [
        simulate(prompts(*asked), spec, policy="round-robin", **EXACT).intervals.quantile(1.0)
        for spec in (together, apart)
    ]
    times = named("qwen3-32b/2xh100")
    assert worst_s[0] == pytest.approx(times.step_s(times.chunk_s(8191, 24_573), 1, 1100), rel=0.2)
    assert worst_s[1] < 0.03


def test_pools_win_between_tokens_and_lose_before_the_first():
    """The direction of the published W4 (5,000 in, 250 out, nothing shared): 8 ms between tokens instead of
    25, a shorter whole, and a first token after 1.4 s instead of 0.53 s.
    """
    random, t = Random(4), 0.0
    asked = []
    for _ in range(600):
        t += random.expovariate(30.0)
        asked.append((t, 5000, 250))
    fields = {"latency": "llama-3.1-8b/1xh100", "kv_tokens": 420_000}
    together = FleetSpec(name="8", groups=[Group(count=8, **fields)])
    pools = [
        Group(name=role, role=role, count=count, **fields) for role, count in (("prefill", 5), ("decode", 3))
    ]
    one, two = (
        simulate(prompts(*asked), spec, policy="round-robin", **EXACT).summary
        for spec in (together, FleetSpec(name="5p3d", groups=pools))
    )
    assert two.itl_p99_s < 0.2 * one.itl_p99_s
    assert two.e2e_mean_s < one.e2e_mean_s
    assert two.ttft_mean_s > one.ttft_mean_s
    assert one.failed == two.failed == one.rejected == two.rejected == 0


@pytest.mark.interpreted
def test_a_busy_engine_s_prefills_go_elsewhere_and_its_decodes_are_faster_for_it():
    asked = [(0.01 * i, 500, 400) for i in range(24)] + [(1.0 + 0.7 * i, 12_000, 20) for i in range(12)]
    run = Watched(prompts(*asked), fleet(link=LinkSpec()), **EXACT)
    disagg = run.world.router.counters().disagg
    assert disagg["prefill-decode"]["delay"] >= 8
    assert run.run.intervals.quantile(0.999) < 0.2 < MODEL.prefill_s(8192)


def test_a_fleet_in_which_nobody_generates_is_refused():
    with pytest.raises(ConfigError, match=r"groups\[0\].role: nobody generates for model 'model'"):
        parse("name: f\ngroups: [{count: 1, latency: glm-5.2/8xh200, kv_tokens: 1000, role: prefill}]")


def test_policies_that_make_no_pairs_are_refused_before_anything_is_played():
    with pytest.raises(ConfigError, match="llmd-precise makes no pairs"):
        simulate(prompts((0.0, 100, 1)), fleet(), policy="llmd-precise")
