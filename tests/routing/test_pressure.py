"""The demonstration's phases by arithmetic: engines of a known latency, one request at a time."""

import random

import pytest
from routing_lab import Engine, Lab, keys_of, prompt

from sumibi.core.latency import CPU_CORE_135M as TRUE
from sumibi.core.latency import LatencyModel

BLOCK = 32
CONVERSATIONS, TURNS, CONTEXT, TURN = 8, 6, 1200, 100
FEW_LUCKY_HITS = 9
"""An order of the turns in which strict alternation finds few prefixes by luck (the demonstration's)."""


class Fleet:
    """Two replicas of 7,200 tokens behind a router."""

    def __init__(self, policy, *, blocks=225, speeds=(1.0, 1.0), noise=0.0, events=True, seed=0, **config):
        self.lab = Lab(check=False, policy=policy, **config)
        self.engines = {name: Engine(blocks, block=BLOCK) for name in "ab"}
        self.speeds = dict(zip("ab", speeds, strict=True))
        self.noise = noise
        self.draw = random.Random(seed)
        self.lab.up("a", "b", kv_tokens=blocks * BLOCK, engine_block_tokens=BLOCK, has_events=events)
        self.events = events

    def send(self, request, token_ids):
        """Dispatch; returns endpoint and cached tokens. The engine has computed it, nobody knows yet."""
        endpoint = self.lab.ask(request, token_ids, keys=keys_of(token_ids, block=BLOCK))
        return endpoint, self.engines[endpoint].run(token_ids)

    def answer(self, request, endpoint, tokens, cached):
        """First token, events, end. Returns the TTFT."""
        ttft_s = TRUE.prefill_s(tokens - cached, cached) * self.speeds[endpoint]
        ttft_s *= self.draw.uniform(1 - self.noise, 1 + self.noise)
        self.lab.t += ttft_s
        if self.events:
            self.lab.batch(endpoint, self.engines[endpoint].publish())
        self.lab.first(request)
        self.lab.finish(request, dt=0.3, prompt_tokens=tokens, cached_tokens=cached, output_tokens=20)
        return ttft_s

    def run(self, request, token_ids):
        endpoint, cached = self.send(request, token_ids)
        return endpoint, cached, self.answer(request, endpoint, len(token_ids), cached)


def pressure(fleet, seed=FEW_LUCKY_HITS):
    """Eight conversations of six turns in one random order: (token hit rate, TTFTs of turns >= 2)."""
    order = [conversation for conversation in range(CONVERSATIONS) for _ in range(TURNS)]
    random.Random(seed).shuffle(order)
    turns, hit, total, later = [0] * CONVERSATIONS, 0, 0, []
    for n, conversation in enumerate(order):
        token_ids = prompt(("conversation", conversation), CONTEXT + TURN * turns[conversation])
        turns[conversation] += 1
        _, cached, ttft_s = fleet.run(f"r{n}", token_ids)
        hit, total = hit + cached, total + len(token_ids)
        if turns[conversation] > 1:
            later.append(ttft_s)
    return hit / total, sorted(later)


def median(values):
    return sorted(values)[len(values) // 2]


BOUND = 0.795
"""Hits if nothing is ever evicted: 5 of 6 turns find all full blocks of the turn before."""


def test_conversations_stay_and_are_balanced_where_strict_turns_thrash():
    hit, later = pressure(Fleet("cost"))
    other_hit, other_later = pressure(Fleet("round-robin"))
    assert hit == pytest.approx(BOUND, abs=0.005)
    assert other_hit == pytest.approx(0.31, abs=0.02)
    assert hit >= 2 * other_hit
    assert median(later) <= 0.3 * median(other_later)


@pytest.mark.parametrize("wrong", [1 / 8, 1 / 3, 1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_balance_holds_with_noise_and_wrong_constants_in_any_order(wrong, seed):
    fields = {name: getattr(TRUE, name) * wrong for name in TRUE.__struct_fields__}
    fleet = Fleet("cost", noise=0.2, seed=seed, latency=LatencyModel(**fields))
    hit, _ = pressure(fleet, seed)
    assert hit == pytest.approx(BOUND, abs=0.005)  # round-robin: 0.31 to 0.58


@pytest.mark.parametrize("speeds", [(1.15, 1 / 1.15), (1 / 1.3, 1.3)])
def test_a_slower_replica_keeps_its_conversations(speeds):
    hit, _ = pressure(Fleet("cost", speeds=speeds, noise=0.2))
    assert hit >= 0.72


def test_without_events_own_prompts_tell_as_much():
    hit, _ = pressure(Fleet("cost", events=False, noise=0.1))
    assert hit == pytest.approx(BOUND, abs=0.02)


def test_least_loaded_has_no_reason_to_stay():
    hit, _ = pressure(Fleet("least-loaded"))
    assert hit < 0.5


def test_a_cold_prefix_goes_where_nobody_is_busy_and_is_found_there():
    """Phases 1 to 5: A cold, A again, another question on A; B while A's replica decodes; B again."""
    fleet = Fleet("cost", blocks=2000)
    a, b = prompt("A", 1500), prompt("B", 1500)
    home, cached, cold_s = fleet.run("1", [*a, 1])
    assert cached == 0
    again, cached, warm_s = fleet.run("2", [*a, 1])
    assert (again, cached) == (home, 1472)
    assert warm_s <= cold_s / 10
    assert fleet.run("3", [*a, 2, 3])[:2] == (home, 1472)
    busy, cached = fleet.send("busy", [*a, 4])
    fleet.lab.first("busy", dt=0.05)
    other, cached, _ = fleet.run("4", [*b, 1])
    assert busy == home != other
    fleet.lab.finish("busy", output_tokens=200)
    assert fleet.run("5", [*b, 2, 3])[:2] == (other, 1472)


def test_a_conversation_and_its_forks_stay_where_their_prefix_is():
    """Phase 6."""
    fleet = Fleet("cost", blocks=2000, noise=0.2)
    history, homes = prompt("agent", 700), set()
    for turn in range(12):
        endpoint, cached, _ = fleet.run(f"turn {turn}", history)
        homes.add(endpoint)
        if turn:
            assert cached >= len(history) - TURN - 2 * BLOCK
        if turn in (4, 8):
            fork, cached, _ = fleet.run(f"fork {turn}", history + prompt(f"fork {turn}", 60))
            homes.add(fork)
            assert cached >= len(history) - BLOCK
        history = history + prompt(f"tool {turn}", TURN)
    assert len(homes) == 1
