"""The parts of a cost, each against its own arithmetic."""

from math import log

import pytest
from routing_lab import BLOCK, Lab, keys_of, prompt

from sumibi.core.latency import LatencyModel

START = LatencyModel(a_s=0.1, b_s=1e-3, q_s=1e-6, d0_s=0.01, d1_s=1e-3, d2_s=1e-6)
OUTPUT = 10


def lab(*names, **fields):
    made = Lab(latency=START)
    made.up(*names, **fields)
    return made


def cost(made, request, tokens, endpoint="a", **fields):
    made.ask(request, prompt(request, tokens), max_tokens=OUTPUT, **fields)
    return made.candidates(request)[endpoint]


def test_compute_is_the_latency_model_s_prefill_of_what_is_new():
    made = lab("a")
    made.run("1", prompt("p", 20 * BLOCK))
    view = made.view("a").latency
    made.ask("2", prompt("p", 25 * BLOCK))
    expected = view.prefill_s(5 * BLOCK, 20 * BLOCK)
    assert made.candidates("2")["a"].compute_s == pytest.approx(expected)


def test_wait_is_the_prefill_reserved_before_less_what_was_done_of_it():
    made = lab("a")
    cost(made, "1", 1000)
    cost(made, "2", 500)
    first, second = START.prefill_s(1000), START.prefill_s(500)
    assert cost(made, "3", 100).wait_s == pytest.approx(first + second)
    made.t += first / 2
    assert cost(made, "4", 100).wait_s == pytest.approx(first / 2 + second + START.prefill_s(100))
    made.t += first  # the first one has overrun by half: as much again is expected
    assert made.view("a").wait_s == pytest.approx(first / 2 + second + 2 * START.prefill_s(100))


def test_one_that_is_overtaken_is_not_taken_for_overdue():
    made = lab("a")
    cost(made, "long", 5000)
    cost(made, "short", 100)
    made.first("short", dt=START.prefill_s(100))
    assert made.view("a").wait_s == pytest.approx(START.prefill_s(5000))


def test_a_request_that_does_not_stream_stops_counting_when_its_prefill_should_be_over():
    made = lab("a")
    cost(made, "1", 1000, stream=False)
    made.t += 10 * START.prefill_s(1000)
    assert cost(made, "2", 100).wait_s == 0.0


def test_those_decoding_are_delayed_by_the_prefill_and_by_longer_steps():
    made = lab("a")
    for name in "12":
        made.ask(name, prompt(name, BLOCK - 1))
        made.first(name)
    c, latency = cost(made, "3", 100), made.view("a").latency
    growth = latency.d1_s + latency.d2_s * (100 + OUTPUT / 2)
    assert c.delay_s == pytest.approx(2 * (c.compute_s + OUTPUT * growth))


def test_a_full_batch_is_waited_for():
    made = lab("a", max_sequences=2)
    assert cost(made, "1", 100).wait_s == 0.0
    made.first("1")
    assert cost(made, "2", 100).wait_s == 0.0
    made.first("2")
    latency = made.view("a").latency
    step = latency.d0_s + 2 * (latency.d1_s + latency.d2_s * (100 + OUTPUT / 2))
    assert cost(made, "3", 100).wait_s == pytest.approx(OUTPUT * step / 2)


def returned(made, name, tokens, times, idle_s):
    """A conversation that came back again and again, always after so long. When its last turn ended."""
    for turn in range(times):
        made.run(f"{name} {turn}", prompt(name, tokens + turn * BLOCK))
        ended_t = made.t
        made.t += idle_s
    return ended_t


def test_eviction_costs_the_prefill_of_the_oldest_times_the_chance_that_it_returns():
    made = lab("a", kv_tokens=100 * BLOCK)
    old_t = returned(made, "old", 40 * BLOCK, 8, 10.0)
    young_t = returned(made, "young", 40 * BLOCK, 8, 10.0)
    c = cost(made, "new", 20 * BLOCK)
    view = made.view("a")
    endpoint, returns = made.router._fleet.endpoints["a"], made.router._fleet.models["m"].returns
    # 47 blocks of each conversation lie there, so 6 are free; the prompt and its output need 21.
    assert (view.blocks, endpoint.kv_tokens) == (2 * 47, 100 * BLOCK)
    over = -(-(20 * BLOCK + OUTPUT - 6 * BLOCK) // BLOCK)
    assert over == 15
    chance = returns.chance(8, made.t - old_t)
    assert 0.0 < chance < returns.chance(8, made.t - young_t) < 1.0
    whole = 47 * BLOCK * (START.b_s + START.q_s * 47 * BLOCK / 2)
    live = 47 * chance + 47 * returns.chance(8, made.t - young_t)
    crowd = (live * BLOCK + (20 * BLOCK + OUTPUT) / 2) / (100 * BLOCK)
    work = START.prefill_s(20 * BLOCK) - START.a_s
    factor = view.work_factor
    expected = whole * chance * over / 47 * factor + work * factor * 0.3 * crowd**2
    assert c.evict_s == pytest.approx(expected)
    assert cost(lab("a"), "1", 20 * BLOCK).evict_s == 0.0


def test_eviction_is_free_where_nothing_ever_returns():
    made = lab("a", "b", kv_tokens=100 * BLOCK)
    returned(made, "agent", 50 * BLOCK, 40, 10.0)
    home = made.attempts["agent 39"].endpoint
    for i in range(300):
        made.run(f"shot{i}", prompt(f"shot{i}", 20 * BLOCK))
    # One-shot prompts have pushed one-shot prompts out, not the agent that is in a tool call.
    assert made.run("agent 40", prompt("agent", 90 * BLOCK)) == home


def test_what_moved_away_is_worth_nothing_where_it_was():
    made = lab("a", kv_tokens=100 * BLOCK)
    returned(made, "moved", 80 * BLOCK, 8, 1.0)
    before = cost(made, "1", 50 * BLOCK).evict_s
    made.finish("1")
    endpoint = made.router._fleet.endpoints["a"]
    endpoint.recency.moved_away(keys_of(prompt("moved", 90 * BLOCK)))
    assert cost(made, "2", 50 * BLOCK).evict_s < before / 2


def test_more_than_its_share_of_work_costs_more():
    made = lab("a", "b")
    cost(made, "1", 1000)
    made.first("1")
    made.finish("1")
    busy, idle = (made.view(name) for name in "ab")
    assert (busy.dispatched, idle.dispatched) == (1, 0)
    made.ask("2", prompt("other", 1000))
    found = made.candidates("2")
    share = START.prefill_s(1000) / (1800 / log(2))
    level = share / 2 + 0.01
    work = START.prefill_s(1000) - START.a_s
    assert found["a"].balance_s == pytest.approx(work * 0.05 * (share / 2) / level, rel=0.02)
    assert found["b"].balance_s == pytest.approx(-work * 0.05 * (share / 2) / level, rel=0.02)


def test_the_total_is_the_sum_with_pending_inside_the_wait():
    made = lab("a", "b", kv_tokens=1000 * BLOCK)
    made.ask("1", prompt("p", 20 * BLOCK))
    made.ask("2", prompt("p", 30 * BLOCK))
    for c in made.candidates("2").values():
        assert c.total_s == pytest.approx(
            max(c.wait_s, c.pending_s) + c.compute_s + c.delay_s + c.evict_s + c.balance_s
        )
        assert c.ttft_s == pytest.approx(max(c.wait_s, c.pending_s) + c.compute_s)
