"""llm-d's approximate index, and the policy that scores by it."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_lab import BLOCK, Desk, prompt
from routing_lab import REPEATABLE

from sumibi.routing.policies.approximate import ApproximateIndex, prompt_blocks

LARGE = 1000


def test_blocks_are_counted_up_to_the_first_that_nobody_has():
    index = ApproximateIndex()
    index.add("a", [1, 2, 3], LARGE)
    index.add("b", [1, 2], LARGE)
    assert index.match([1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert index.match([9, 1, 2]) == {}
    assert index.match([]) == {}


def test_the_first_blocks_are_the_oldest_and_a_lost_start_hides_the_rest():
    index = ApproximateIndex()
    index.add("a", [1, 2, 3, 4], 4)
    index.add("a", [5], 4)  # pushes block 1 out
    assert index.match([1, 2, 3, 4]) == {}


def test_a_hole_at_the_start_does_not_count_against_it_while_another_has_the_block():
    index = ApproximateIndex()
    index.add("a", [1, 2, 3, 4], 4)
    index.add("a", [5], 4)
    index.add("b", [1], LARGE)
    assert index.match([1, 2, 3, 4]) == {"a": 3, "b": 1}


def test_a_removed_endpoint_is_forgotten_and_others_stay():
    index = ApproximateIndex()
    index.add("a", [1, 2], LARGE)
    index.add("b", [1], LARGE)
    index.remove("a")
    index.remove("never known")
    index.add("c", [1, 2], LARGE)
    assert index.match([1, 2]) == {"b": 1, "c": 2}


class Plain:
    """The rule written down plainly: an LRU of blocks for each endpoint."""

    def __init__(self):
        self.lru = {}

    def add(self, endpoint, keys, limit):
        lru = self.lru.setdefault(endpoint, OrderedDict())
        for key in keys:
            lru[key] = None
            lru.move_to_end(key)
            if len(lru) > limit:
                lru.popitem(last=False)

    def remove(self, endpoint):
        self.lru.pop(endpoint, None)

    def match(self, keys):
        counts = {}
        for key in keys:
            having = [name for name, lru in self.lru.items() if key in lru]
            if not having:
                break
            for name in having:
                counts[name] = counts.get(name, 0) + 1
        return counts


@st.composite
def chains(draw):
    """Prompts that branch: a block's key depends on all before it."""
    path = draw(st.lists(st.integers(0, 1), max_size=7))
    return [int("1" + "".join(map(str, path[: i + 1]))) for i in range(len(path))]


steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "match", "remove"]), st.sampled_from("abc"), chains()),
    max_size=60,
)


@given(steps, st.integers(1, 20))
@settings(REPEATABLE, max_examples=300)
def test_it_is_what_the_plain_rule_says(steps, limit):
    index, plain = ApproximateIndex(), Plain()
    for what, endpoint, keys in steps:
        if what == "remove":
            index.remove(endpoint)
            plain.remove(endpoint)
        elif what == "add":
            index.add(endpoint, keys, limit)
            plain.add(endpoint, keys, limit)
        assert index.match(keys) == plain.match(keys)


def test_turns_of_a_conversation_are_kept_once():
    index = ApproximateIndex()
    for turn in range(1, 300):
        index.add("a", list(range(2 * turn)), LARGE)
        index.add("a", list(range(2 * turn)), LARGE)  # sent again
    assert sum(len(keys) for keys in index._caches["a"]._prompts.values()) == 2 * 299


@pytest.mark.parametrize(
    ("block", "keys", "cap", "expected"),
    [
        (64, 5, 131_072, ([0, 1, 2, 3, 4], 64)),
        (16, 13, 131_072, ([3, 7, 11], 64)),  # four blocks of 16 make one; the last key of each names it
        (512, 3, 131_072, ([0, 1, 2], 512)),
        (64, 5, 192, ([0, 1, 2], 64)),
        (16, 13, 128, ([3, 7], 64)),
    ],
)
def test_blocks_are_of_64_tokens_at_least_and_looked_at_up_to_the_cap(block, keys, cap, expected):
    desk = Desk("round-robin", "a", block=block)
    desk.scores(list(range(keys)))
    assert prompt_blocks(desk.ask, cap) == expected


# --- llmd-weighted ---


def test_the_weighted_sum():
    desk = Desk("llmd-weighted", "a", "b")
    desk.place(prompt(x=3), on="a")
    desk.scrape("a", waiting=4, kv_usage=0.5)
    desk.scrape("b", waiting=0, kv_usage=0.1)
    # a: 2*0 + 2*0.5 + 3*3/4 + 2*0.5 = 4.25;  b: 2*1 + 2*0.9 + 0 + 2*0.5 = 4.8
    assert desk.scores(prompt(x=3, y=1)) == pytest.approx({"a": -4.25, "b": -4.8})
    desk.scrape("a", waiting=0, kv_usage=0.5)
    # a: 2 + 1 + 2.25 + 1
    assert desk.scores(prompt(x=3, y=1)) == pytest.approx({"a": -6.25, "b": -4.8})


def test_cold_prompts_are_spread_in_turn():
    desk = Desk("llmd-weighted", "a", "b", "c", "d")
    assert [desk.place(prompt(**{f"cold{i}": 4})) for i in range(8)] == list("abcdabcd")


def test_it_does_not_notice_what_the_engine_lost():
    desk = Desk("llmd-weighted", "a", "b")
    desk.place(prompt(x=10), on="b")
    desk.endpoints["b"].new_life()
    assert desk.place(prompt(x=10)) == "b"


def test_the_index_is_as_large_as_the_engine_says_its_cache_is():
    desk = Desk("llmd-weighted", "a", "b", kv_tokens=4 * BLOCK)
    desk.place(prompt(x=4), on="a")
    assert desk.scores(prompt(x=4))["a"] < desk.scores(prompt(x=4))["b"]
    desk.place(prompt(y=1), on="a")  # x's first block is the oldest
    scores = desk.scores(prompt(x=4))
    assert scores["b"] == pytest.approx(-(2 + 2 + 0 + 2))  # cold again: b has not been used, so it is first
    assert scores["a"] == pytest.approx(-(2 + 2 + 0 + 0))


def test_an_endpoint_that_is_gone_is_forgotten():
    desk = Desk("llmd-weighted", "a", "b")
    desk.place(prompt(x=4), on="b")
    desk.policy.gone("b")
    assert desk.scores(prompt(x=4))["b"] == pytest.approx(-4.0)  # cold, and a comes first
