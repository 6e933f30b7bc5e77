import pytest
from policy_lab import BLOCK, Desk, prompt
from routing_lab import BLOCK as SMALL
from routing_lab import Engine, Lab
from routing_lab import prompt as token_ids


def test_a_match_is_what_events_announced():
    desk = Desk("llmd-precise", "a", "b")
    scores = desk.scores(prompt(x=4), matched={"a": 3 * BLOCK})
    # 2*1 + 2*1 + 3*3/4 + 2*0.5
    assert scores == pytest.approx({"a": -7.25, "b": -5.0})


def test_a_prompt_sent_less_than_two_seconds_ago_counts_though_no_event_came():
    desk = Desk("llmd-precise", "a", "b")
    desk.place(prompt(x=3, y=5), on="b")
    desk.t = 1.999
    assert desk.scores(prompt(x=3, z=1)) == pytest.approx({"a": -5.0, "b": -7.25})
    assert desk.scores(prompt(x=3, z=1), matched={"b": 4 * BLOCK})["b"] == pytest.approx(-8.0)
    desk.t = 2.0
    # cold again; b had the last cold prompt
    assert desk.scores(prompt(x=3, z=1)) == pytest.approx({"a": -6.0, "b": -4.0})


def test_each_prompt_has_its_own_two_seconds():
    desk = Desk("llmd-precise", "a", "b")
    desk.place(prompt(x=4), on="b")
    desk.t = 1.5
    desk.place(prompt(y=4), on="b")
    desk.t = 2.5
    assert desk.scores(prompt(y=4))["b"] == pytest.approx(-8.0)
    assert desk.scores(prompt(x=4))["b"] > -8.0


def test_an_endpoint_that_is_gone_is_forgotten():
    desk = Desk("llmd-precise", "a", "b")
    desk.place(prompt(x=4), on="b")
    desk.policy.gone("b")
    assert desk.scores(prompt(x=4))["b"] == pytest.approx(-4.0)


def test_in_the_router_it_goes_by_kv_events_and_notices_what_the_engine_lost():
    lab, engine = Lab(policy="llmd-precise"), Engine(40)
    lab.up("a", "b", has_events=True)
    ids = token_ids("p", 10 * SMALL)
    engine.run(ids)
    lab.batch("b", engine.publish())
    lab.t += 10
    assert lab.ask("r", ids) == "b"
    engine.clear()
    lab.batch("b", engine.publish())
    lab.t += 10
    assert lab.ask("r2", ids) == "a"


def test_a_block_in_host_memory_counts_four_fifths():
    it = Desk("llmd-precise", "a", "b", "c")
    below = {"b": {"host_tokens": 5 * BLOCK}, "c": {"store_tokens": 9 * BLOCK}}
    scores = it.scores(prompt(x=10), matched={"a": 5 * BLOCK, "b": 2 * BLOCK}, below=below)
    # 2 queue + 2 free + 2 * 0.5 (somebody has a match) + 3 * matched / 10
    assert scores == pytest.approx({"a": -(5 + 1.5), "b": -(5 + 3 * 0.6), "c": -5.0})
