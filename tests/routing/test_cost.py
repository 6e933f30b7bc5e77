"""The parts of a cost, each against its own arithmetic."""

import pytest
from routing_lab import BLOCK, Lab, prompt

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


def test_eviction_costs_the_prefill_of_what_is_pushed_out_as_often_as_it_is_wanted_again():
    reuse = 3.0  # where it starts
    needed = 50 * BLOCK + OUTPUT
    each = START.b_s + START.q_s * needed / 2
    fits = lab("a", kv_tokens=100 * BLOCK)
    x = needed / (100 * BLOCK)
    assert cost(fits, "1", 50 * BLOCK).evict_s == pytest.approx(reuse * each * needed * x**2 / 3)
    full = lab("a", kv_tokens=30 * BLOCK)
    within, over = 30 * BLOCK, needed - 30 * BLOCK
    assert cost(full, "1", 50 * BLOCK).evict_s == pytest.approx(reuse * each * (within / 3 + over))
    assert cost(lab("a"), "1", 50 * BLOCK).evict_s == 0.0


def test_eviction_is_free_where_nothing_ever_returns():
    made = lab("a", kv_tokens=100 * BLOCK)
    first = cost(made, "first", 50 * BLOCK).evict_s
    for i in range(300):
        made.run(f"shot{i}", prompt(f"shot{i}", 20 * BLOCK))
    model = made.router._fleet.models["m"]
    assert model.reuse < 0.2
    # The cache was empty then and is full now, and yet:
    assert cost(made, "last", 50 * BLOCK).evict_s < first


def test_the_total_is_the_sum_with_pending_inside_the_wait():
    made = lab("a", "b", kv_tokens=1000 * BLOCK)
    made.ask("1", prompt("p", 20 * BLOCK))
    made.ask("2", prompt("p", 30 * BLOCK))
    for c in made.candidates("2").values():
        assert c.total_s == pytest.approx(max(c.wait_s, c.pending_s) + c.compute_s + c.delay_s + c.evict_s)
        assert c.ttft_s == pytest.approx(max(c.wait_s, c.pending_s) + c.compute_s)
