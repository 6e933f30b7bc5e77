"""The router's hints, played: agents whose tool calls take as long each time, and who presses them out."""

import pytest

from sumibi.bench.workloads.history import Writer
from sumibi.core.errors import ConfigError
from sumibi.core.latency import LatencyModel
from sumibi.routing.config import RouterConfig
from sumibi.sim.fleet import DiskTier, FleetSpec, Group, HostTier, parse
from sumibi.sim.results import mean
from sumibi.sim.workload import Session, Workload
from sumibi.sim.world import World

BLOCK = 64
TOOL_S = 30.0
AGENTS, TURNS = 8, 30


def agents_among_strangers():
    """Eight agents of 4,096 tokens and more; a prompt of 2,048 tokens every second that never comes back."""
    workload = Workload("hints", BLOCK, users=AGENTS, start_spread_s=TOOL_S, names_sessions=True)
    for number in range(AGENTS):
        session = Session(name=f"agent-{number}", keys=[], turns=[])
        writer = Writer(session, BLOCK, session.name)
        history, after = writer.history().add(writer.fresh(), 4096), None
        for _ in range(TURNS):
            after = writer.ask(history, 20, after=after, delay_s=TOOL_S if after is not None else 0.0)
            history.add(writer.fresh(), 64)
        workload.sessions.append(session)
    for number in range(int(TURNS * TOOL_S)):
        session = Session(name=f"stranger-{number}", keys=[], turns=[], start_s=float(number), named=False)
        writer = Writer(session, BLOCK, session.name)
        writer.ask(writer.history().add(writer.fresh(), 2048), 10)
        workload.sessions.append(session)
    return workload


def play(*, prefetches):
    fleet = FleetSpec(
        name="one",
        groups=[
            Group(
                count=1,
                latency=LatencyModel(a_s=0.004, b_s=5e-5, q_s=0.0, d0_s=0.01, d1_s=1e-5, d2_s=0.0),
                kv_tokens=20_000,
                kv_bytes_per_token=100_000,
                host=HostTier(tokens=30_000, gb_per_s=20.0),
                disk=DiskTier(tokens=10_000_000, gb_per_s=0.5),
                prefetches=prefetches,
            )
        ],
    )
    world = World(
        agents_among_strangers(),
        fleet,
        RouterConfig(),
        users=AGENTS,
        seed=0,
        wrong_constants=False,
        noise=0.0,
    )
    world.run()
    calls = world.calls
    # The second half of the agents' turns: return times are learnt by then.
    rows = [i for i in calls.done() if calls.session[i] < AGENTS and calls.turn[i] >= TURNS // 2]
    assert len(rows) == AGENTS * TURNS // 2
    return world, mean(calls.ttft_s(rows))


def test_agents_come_back_to_host_memory_instead_of_disk():
    without, without_s = play(prefetches=False)
    hinted, hinted_s = play(prefetches=True)
    assert without.router.counters().hints == 0
    counters, memory = hinted.router.counters(), hinted.sites[0].replica.memory
    # Nearly all of the later turns are foreseen, few hints are in vain.
    assert AGENTS * TURNS // 3 < counters.hints <= AGENTS * TURNS
    assert counters.hints_returned > 0.9 * counters.hints
    assert memory.brought_used > 0.9 * memory.brought_up > 0
    # 4,096 tokens and more are 0.8 s of the disk, 0.02 s of host memory.
    assert hinted_s < 0.2 * without_s
    assert without_s > 0.5


def test_engines_that_bring_up_need_somewhere_to_bring_it():
    text = "{name: f, groups: [{count: 1, latency: qwen3-32b-tp2-h100, kv_tokens: 1000, prefetches: true}]}"
    with pytest.raises(ConfigError, match=r"groups\[0\].prefetches needs `host`"):
        parse(text)
