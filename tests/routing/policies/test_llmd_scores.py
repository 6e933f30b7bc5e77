"""llm-d's scorers, each against numbers worked out by hand from its formula."""

import pytest
from policy_lab import Desk

from sumibi.routing.policies import llmd_scores
from sumibi.routing.policies.llmd_scores import NoHitLru


def endpoints(*signals):
    desk = Desk("cost", *(f"e{i}" for i in range(len(signals))))
    for name, said in zip(desk.endpoints, signals, strict=True):
        if said is not None:
            desk.scrape(name, **said)
    return list(desk.endpoints.values())


def test_queues_are_stretched_between_the_shortest_and_the_longest():
    assert llmd_scores.queue(endpoints({"waiting": 2}, {"waiting": 7}, {"waiting": 12})) == [1.0, 0.5, 0.0]
    assert llmd_scores.queue(endpoints({"waiting": 3}, {"waiting": 3})) == [1.0, 1.0]


def test_a_queue_that_is_longer_by_one_costs_a_whole_point():
    assert llmd_scores.queue(endpoints({"waiting": 100}, {"waiting": 101})) == [1.0, 0.0]


def test_nothing_scraped_counts_as_idle():
    assert llmd_scores.queue(endpoints(None, {"waiting": 4}, {"running": 9})) == [1.0, 0.0, 1.0]
    assert llmd_scores.kv_free(endpoints(None, {"kv_usage": 0.75}, {"running": 9})) == [1.0, 0.25, 1.0]


def test_the_prefix_score_is_the_matched_share():
    assert llmd_scores.prefix([0, 3, 4], 4) == [0.0, 0.75, 1.0]
    assert llmd_scores.prefix([0, 0], 0) == [0.0, 0.0]


def test_cold_prompts_go_round_those_never_used_first_then_the_oldest():
    lru, names = NoHitLru(), list("abcd")
    cold = [0, 0, 0, 0]
    assert lru.scores(names, cold) == pytest.approx([1, 2 / 3, 1 / 3, 0])
    lru.placed("c")
    assert lru.scores(names, cold) == pytest.approx([1, 2 / 3, 0, 1 / 3])
    lru.placed("a")
    lru.scores(names, cold)
    lru.placed("b")
    # never used: d; used, the oldest first: c, a, b
    assert lru.scores(names, cold) == pytest.approx([1 / 3, 0, 2 / 3, 1])
    lru.placed("d")
    assert lru.scores(names, cold) == pytest.approx([2 / 3, 1 / 3, 1, 0])


def test_one_matched_block_anywhere_switches_it_off_and_is_no_use():
    lru, names = NoHitLru(), list("abc")
    lru.scores(names, [0, 0, 0])
    lru.placed("a")
    assert lru.scores(names, [0, 0, 1]) == [0.5, 0.5, 0.5]
    lru.placed("b")
    assert lru.scores(names, [0, 0, 0]) == pytest.approx([0, 1, 0.5])


def test_a_single_candidate_gets_the_whole_point_and_positions_count_absent_ones():
    lru = NoHitLru()
    assert lru.scores(["a"], [0]) == [1.0]
    for name in "abcd":
        lru.scores(list("abcd"), [0, 0, 0, 0])
        lru.placed(name)
    # c and d are at positions 2 and 3 of those used; with two candidates rank 2 is below nothing already
    assert lru.scores(["c", "d"], [0, 0]) == [0.0, 0.0]
