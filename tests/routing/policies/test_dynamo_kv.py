"""Dynamo's cost, worked out by hand in blocks of 16 tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_lab import Desk, prompt
from routing_lab import REPEATABLE

from sumibi.routing.policies.chains import Running, common_blocks


def desk(*names):
    return Desk("dynamo-kv", *names, block=16)


def test_an_idle_endpoint_costs_the_blocks_to_compute_and_the_blocks_to_hold():
    # 168 tokens: 10.5 blocks to compute, 10 full ones to hold
    assert desk("a").scores(prompt(x=10), tokens=168) == {"a": 20.5}


def test_what_events_announced_is_credited_against_the_prefill():
    scores = desk("a", "b").scores(prompt(x=10), matched={"b": 6 * 16})
    assert scores == {"a": 10.0 + 10, "b": 4.0 + 10}


def test_prefills_that_run_count_until_their_first_byte():
    it = desk("a", "b")
    it.place(prompt(x=8), on="a", matched={"a": 2 * 16}, request="r")  # 96 tokens to compute: 6 blocks
    # prefill 6 + 10, to hold 8 + 10
    assert it.scores(prompt(y=10)) == {"a": 34.0, "b": 20.0}
    it.first("r")
    assert it.scores(prompt(y=10)) == {"a": 28.0, "b": 20.0}
    it.end("r")
    assert it.scores(prompt(y=10)) == {"a": 20.0, "b": 20.0}


def test_blocks_that_running_prompts_share_count_once():
    it = desk("a", "b")
    it.place(prompt(system=6, x=4), on="a", request="1")
    it.place(prompt(system=6, y=4), on="a", request="2")
    for request in "12":
        it.first(request)
    # held: 6 + 4 + 4; this prompt adds 4 of its 10; nothing is known from events, so 10 are computed
    assert it.scores(prompt(system=6, z=4)) == {"a": 10.0 + 14 + 4, "b": 20.0}
    it.end("1")
    assert it.scores(prompt(system=6, z=4)) == {"a": 10.0 + 10 + 4, "b": 20.0}


def test_a_match_of_96_blocks_loses_to_more_than_96_running_ones():
    it = desk("a", "b")
    it.place(prompt(other=97), on="a", request="r")
    it.first("r")
    assert it.place(prompt(x=100), matched={"a": 96 * 16}) == "b"


def test_the_preset_for_agents_weighs_prefill_matches_and_requests():
    it = Desk("dynamo-kv-agentic", "a", "b", block=16)
    it.endpoints["b"].load.inflight = 1
    # a: 4*10 + 10;  b: 4*max(0, 10 - 2*3) + 10 + 64
    assert it.scores(prompt(x=10), matched={"b": 3 * 16}) == {"a": 50.0, "b": 90.0}
    # a credit beyond the prefill is lost: 4*max(0, 10 - 2*8) + 10 + 64
    assert it.scores(prompt(x=10), matched={"b": 8 * 16})["b"] == 74.0


def test_a_request_that_ends_before_its_first_byte_leaves_nothing_behind():
    it = desk("a")
    it.place(prompt(x=8), request="r")
    it.end("r")
    it.end("r")
    assert it.scores(prompt(y=10)) == {"a": 20.0}


def test_an_endpoint_that_is_gone_is_forgotten_and_its_requests_may_end_later():
    it = desk("a")
    it.place(prompt(x=8), request="r")
    it.policy.gone("a")
    it.end("r")
    assert it.scores(prompt(y=10)) == {"a": 20.0}


@pytest.mark.parametrize(
    ("ours", "theirs", "at_least", "common"),
    [
        ([], [1], 0, 0),
        ([1, 2, 3], [1, 2, 9], 0, 2),
        ([1, 2], [1, 2, 3], 0, 2),
        ([1, 2, 3], [1, 2, 3], 1, 3),
        ([1, 2, 3], [1, 2, 9], 2, 2),
        ([1, 2, 3], [7, 8, 9], 1, 1),
    ],
)
def test_what_chains_have_in_common(ours, theirs, at_least, common):
    assert common_blocks(ours, theirs, at_least) == common


branches = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 5), branches), max_size=30))
@REPEATABLE
def test_distinct_blocks_of_what_runs_are_those_of_a_set(steps):
    running, prompts = Running(), {}
    for request, path in steps:
        chain = [hash(tuple(path[: i + 1])) for i in range(len(path))]
        if request in prompts:
            running.remove(str(request))
            del prompts[request]
        else:
            every = {key for keys in prompts.values() for key in keys}
            assert running.shared(chain) == sum(key in every for key in chain)
            running.add(str(request), chain)
            prompts[request] = chain
        assert running.blocks == len({key for keys in prompts.values() for key in keys})


def test_blocks_below_the_device_are_credited_in_part():
    it = desk("a", "b", "c")
    below = {"a": {"host_tokens": 4 * 16}, "b": {"disk_tokens": 4 * 16}, "c": {"store_tokens": 4 * 16}}
    scores = it.scores(prompt(x=10), matched={"a": 2 * 16, "b": 2 * 16, "c": 2 * 16}, below=below)
    assert scores == {"a": 10 - 2 - 3.0 + 10, "b": 10 - 2 - 1.0 + 10, "c": 10 - 2 - 2.0 + 10}


def test_what_is_to_be_computed_of_a_running_prompt_goes_by_the_same_credits():
    it = desk("a")
    it.place(prompt(x=10), on="a", matched={"a": 2 * 16}, below={"a": {"host_tokens": 4 * 16}}, request="r")
    # 160 tokens less 32 and 0.75 * 64: 80, five blocks; ten are held.
    assert it.scores(prompt(y=10)) == {"a": 5.0 + 10 + 10 + 10}
