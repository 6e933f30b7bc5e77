"""The parts of a cost, each against its own arithmetic."""

import pytest
from routing_lab import BLOCK, Lab, keys_of, prompt

from sumibi.core.latency import LatencyModel
from sumibi.routing.cost import (
    CROWD,
    DECODE,
    EVICT,
    FOLLOWERS,
    FREE_EXCESS,
    LONGER,
    MILD,
    POWER,
    RETURNS,
    STEEP,
    WORK,
    imbalance,
)
from sumibi.routing.endpoint import TYPICAL_PROMPT_TOKENS, TYPICAL_RATE
from sumibi.routing.fading import SHARE_HALF_LIFE_S
from sumibi.routing.spread import FEW_PREFILLS, FEW_SETTLED

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
    assert c.delay_s == pytest.approx(2 * (DECODE * c.compute_s + LONGER * OUTPUT * growth))
    # Whoever is in its prefill will decode as well: the longer steps are its own, the prefill is a wait.
    c = cost(made, "4", 100)
    assert c.delay_s == pytest.approx(DECODE * 2 * c.compute_s + LONGER * (2 + 1) * OUTPUT * growth)


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


def returns_of(made):
    return made.router._fleet.models["m"].returns


def chances(made, names, ended_t):
    """Chance of return, by name, of conversations of eight turns that ended at `ended_t`."""
    returns = returns_of(made)
    return {name: returns.chance(8, made.t - t) for name, t in zip(names, ended_t, strict=True)}


def test_eviction_costs_the_prefill_of_the_oldest_times_the_chance_that_it_returns():
    made = lab("a", kv_tokens=1000 * BLOCK)
    ended_t = returned(made, "old", 400 * BLOCK, 8, 10.0)
    shot_t = []
    for i in range(14):
        made.run(f"shot {i}", prompt(f"shot {i}", 40 * BLOCK))
        shot_t.append(made.t)
    # 407 blocks of the conversation and 560 of one-shots lie there; 33 are free. The prompt needs 40, its
    # output one more: 8 of the conversation's have to go, which is the oldest.
    assert made.view("a").blocks == 407 + 14 * 40
    made.t += 2.0  # so that the order of victims is as of now
    (chance,) = chances(made, ["old"], [ended_t]).values()
    assert 0.0 < chance < 1.0
    live_blocks = 407 * chance + sum(40 * returns_of(made).chance(1, made.t - t) for t in shot_t)
    c = cost(made, "new", 40 * BLOCK)
    # They are its last ones, which took the most to compute: each attends to about 403 blocks.
    end_s = 8 * BLOCK * (START.b_s + START.q_s * (407 - 8 / 2) * BLOCK)
    # And if nearly all that is here were live, each second stored would cost CROWD more.
    crowd = (live_blocks * BLOCK + (40 * BLOCK + OUTPUT) / 2) / (1000 * BLOCK)
    work_s = START.prefill_s(40 * BLOCK) - START.a_s
    assert c.evict_s == pytest.approx(EVICT * end_s * chance + work_s * CROWD * crowd**POWER)
    assert cost(lab("a"), "1", 20 * BLOCK).evict_s == 0.0  # a cache whose size nobody knows


def test_what_will_be_pushed_out_as_conversations_grow_costs_before_the_cache_is_full():
    made = lab("a", kv_tokens=200 * BLOCK)
    ended_t = [returned(made, name, 40 * BLOCK, 8, 10.0) for name in ("old", "young")]
    c = cost(made, "new", 20 * BLOCK)
    live_blocks = 47 * sum(chances(made, ("old", "young"), ended_t).values())
    crowd = (live_blocks * BLOCK + (20 * BLOCK + OUTPUT) / 2) / (200 * BLOCK)
    work_s = (START.prefill_s(20 * BLOCK) - START.a_s) * made.view("a").work_factor
    assert c.evict_s == pytest.approx(work_s * CROWD * crowd**POWER)


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


def test_each_second_of_work_has_a_price_more_above_the_mean_and_a_little_less_below():
    made = lab("a", "b")
    cost(made, "1", 1000)
    made.first("1")
    made.finish("1")
    busy, idle = (made.view(name) for name in "ab")
    assert (busy.dispatched, idle.dispatched) == (1, 0)
    made.ask("2", prompt("other", 1000))
    found = made.candidates("2")
    # One of two endpoints computed 1.6 s just now; a usual prefill is 0.743 s, and nearer to 1.6 s there.
    usual_s = START.prefill_s(TYPICAL_PROMPT_TOKENS)
    done_s = START.prefill_s(1000)
    few_s = FEW_PREFILLS * (usual_s + TYPICAL_RATE * (done_s - usual_s) / 2)
    work_s = done_s - START.a_s
    factor = busy.work_factor
    level_s = few_s + work_s * factor / 2
    excess = (few_s + work_s * factor) / level_s - 1
    assert excess == pytest.approx(0.0563, rel=1e-2)
    assert found["b"].balance_s == pytest.approx(work_s * factor * (WORK - MILD * excess))
    # All of it was new, so it settled at the busy one: followers would sit down beside its own there.
    more = work_s * factor / (work_s * factor / 2 + FEW_SETTLED * few_s / FEW_PREFILLS)
    latency, output_tokens = made.view("a").latency, made.router._fleet.models["m"].output_tokens
    steps_s = output_tokens * (latency.d1_s + latency.d2_s * (1000 + output_tokens / 2))
    followers_s = LONGER * FOLLOWERS * returns_of(made).chance(1, 0.0) * more * steps_s
    # That is more than to compute the prompt once more, which is what it counts.
    assert followers_s > work_s * factor
    assert found["a"].balance_s == pytest.approx(work_s * factor * (WORK + imbalance_at(excess) + 1.0))


def test_followers_cost_their_share_of_each_longer_step():
    made = lab("a", "b")
    cost(made, "1", 1000)
    made.first("1")
    made.finish("1")
    made.ask("2", prompt("other", 1000), max_tokens=1)
    found, factor = made.candidates("2"), made.view("a").work_factor
    settled_s = (START.prefill_s(1000) - START.a_s) * factor
    usual_s = (
        START.prefill_s(TYPICAL_PROMPT_TOKENS) * (2 - TYPICAL_RATE) + TYPICAL_RATE * START.prefill_s(1000)
    ) / 2
    more = settled_s / (settled_s / 2 + FEW_SETTLED * usual_s)
    latency = made.view("a").latency
    followers_s = LONGER * FOLLOWERS * returns_of(made).chance(1, 0.0) * more
    followers_s *= latency.d1_s + latency.d2_s * 1000.5
    assert followers_s < settled_s
    few_s = FEW_PREFILLS * usual_s
    excess = settled_s / 2 / (few_s + settled_s / 2)
    assert found["a"].balance_s == pytest.approx(settled_s * (WORK + imbalance_at(excess)) + followers_s)


def imbalance_at(excess):
    return imbalance(1.0 + excess, 1.0)


def test_a_new_conversation_with_a_shared_beginning_settles_elsewhere_if_far_more_did_at_home():
    made = lab("a", "b")
    system, own = prompt("system", 100 * BLOCK), 2 * BLOCK
    home = made.run("first", system + prompt("first", own))
    other = {"a": "b", "b": "a"}[home]
    # The next turn stays: little of it is new, and it is no fork.
    assert made.run("next", system + prompt("first", 2 * own)) == home
    # New ones with the same beginning would all sit down beside it; one computes the beginning elsewhere.
    places = [made.ask(f"fork {i}", system + prompt(f"fork {i}", own)) for i in range(40)]
    assert set(places) == {"a", "b"}
    cold = [i for i in range(40) if made.candidates(f"fork {i}")[places[i]].reused_tokens == 0]
    assert len(cold) == 1
    assert places[cold[0]] == other
    assert 10 <= sum(place == home for place in places) <= 30


def test_the_mean_s_share_is_free_then_each_unit_costs_mildly_then_steeply():
    assert imbalance(10.0, 10.0) == 0.0
    assert imbalance(5.0, 10.0) == pytest.approx(-MILD * 0.5)
    assert imbalance(10.0 * (1 + FREE_EXCESS), 10.0) == pytest.approx(MILD * FREE_EXCESS)
    assert imbalance(20.0, 10.0) == pytest.approx(MILD + STEEP * (1 - FREE_EXCESS))


def test_work_done_long_ago_counts_less():
    made = lab("a")
    cost(made, "1", 1000)
    endpoint = made.router._fleet.endpoints["a"]
    work_s = START.prefill_s(1000) - START.a_s
    assert endpoint.worked_lately_s(made.t) == pytest.approx(work_s)
    assert endpoint.worked_lately_s(made.t + SHARE_HALF_LIFE_S) == pytest.approx(work_s / 2)


def test_a_full_kv_cache_is_waited_for_until_enough_of_those_who_run_are_over():
    made = lab("a", kv_tokens=100 * BLOCK)
    for name in "12":
        made.ask(name, prompt(name, 45 * BLOCK), max_tokens=OUTPUT)
        made.first(name)
    c = cost(made, "3", 20 * BLOCK)
    # Two run with 45 blocks and half an answer each: 1,600 tokens of room, 1,450 in use, 325 more asked for.
    in_use = 2 * (45 * BLOCK + OUTPUT / 2)
    excess = in_use + 20 * BLOCK + OUTPUT / 2 - 100 * BLOCK
    assert (in_use, excess) == (1450, 175)
    latency = made.view("a").latency
    step_s = latency.d0_s + 2 * (latency.d1_s + latency.d2_s * (20 * BLOCK + OUTPUT / 2))
    assert c.room_s == pytest.approx(excess / in_use * OUTPUT * step_s)
    assert c.ttft_s == pytest.approx(max(c.wait_s, c.room_s) + c.compute_s)


def test_a_cache_full_of_what_is_idle_has_room():
    made = lab("a", kv_tokens=100 * BLOCK)
    made.run("1", prompt("1", 95 * BLOCK))
    assert cost(made, "2", 90 * BLOCK).room_s == 0.0


def test_those_who_run_are_over_at_most_once():
    """A prompt that is larger than the cache waits for an answer's time, not for a multiple of it."""
    made = lab("a", kv_tokens=100 * BLOCK)
    made.ask("1", prompt("1", 10 * BLOCK), max_tokens=OUTPUT)
    made.first("1")
    c, latency = cost(made, "2", 500 * BLOCK), made.view("a").latency
    step_s = latency.d0_s + latency.d1_s + latency.d2_s * (500 * BLOCK + OUTPUT / 2)
    assert c.room_s == pytest.approx(OUTPUT * step_s)


def test_who_neither_has_blocks_nor_answers_takes_no_room():
    made = lab("a", kv_tokens=100 * BLOCK)
    made.ask("1", prompt("1", BLOCK - 1), max_tokens=0)
    made.ask("2", prompt("2", 200 * BLOCK), max_tokens=0)
    assert made.candidates("2")["a"].room_s == 0.0


def test_those_expected_back_are_delayed_by_what_is_left_of_the_prefill():
    made = lab("a", kv_tokens=1000 * BLOCK)
    ended_t = returned(made, "agent", 40 * BLOCK, 8, 10.0)
    c = cost(made, "long", 2000)
    waits = made.router._fleet.models["m"].returns.delays_s(8, made.t - ended_t)
    low, high = 4.0, 8.0  # a prefill of 4.1 s falls between two of the times that delays are computed for
    assert low < c.compute_s < high
    part = (c.compute_s - low) / (high - low)
    assert c.delay_s == pytest.approx(RETURNS * (waits[3] + part * (waits[4] - waits[3])))


def test_the_total_is_the_sum_with_pending_and_room_inside_the_wait():
    made = lab("a", "b", kv_tokens=1000 * BLOCK)
    made.ask("1", prompt("p", 20 * BLOCK))
    made.ask("2", prompt("p", 30 * BLOCK))
    for c in made.candidates("2").values():
        before_s = max(c.wait_s, c.pending_s, c.room_s)
        assert c.total_s == pytest.approx(before_s + c.compute_s + c.delay_s + c.evict_s + c.balance_s)
        assert c.ttft_s == pytest.approx(before_s + c.compute_s)


def test_on_an_idle_fleet_whoever_shares_a_beginning_goes_where_it_is():
    made = lab("a", "b", kv_tokens=1000 * BLOCK)
    system = prompt("system", 100 * BLOCK)
    home = made.run("first", system + prompt("first", 2 * BLOCK))
    for i in range(40):
        made.t += 20.0
        assert made.run(f"fork {i}", system + prompt(f"fork {i}", 2 * BLOCK)) == home


def test_a_prompt_of_no_tokens_is_placed_beside_requests_that_decode():
    """`{"prompt": ""}` is a request, too."""
    it = Lab()
    it.up("a", "b", kv_tokens=1600)
    for number, tokens in enumerate((320, 320, 0, 960, 0, 0)):
        it.ask(f"r{number}", prompt(f"r{number}", tokens))
        it.first(f"r{number}", dt=0.1)
        assert len(it.candidates(f"r{number}")) == 2
