"""What is remembered of an endpoint that does not tell."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_lab import REPEATABLE

from sumibi.routing.index import BlockIndex
from sumibi.routing.recall import Recall


class Blockwise:
    """The same rules block by block: those of a used prompt move to the young end, its last one first."""

    def __init__(self, limit):
        self.limit, self.used = limit, OrderedDict()

    def remember(self, keys):
        for key in reversed(keys[: self.limit]):
            self.used[key] = None
            self.used.move_to_end(key)
        while len(self.used) > self.limit:
            self.used.popitem(last=False)

    def correct(self, keys, cached):
        while cached < len(keys) and keys[cached] in self.used:
            self.used.popitem(last=False)


def chain(path):
    """Keys of a prompt: each names the whole path to it."""
    return [hash(tuple(path[: i + 1])) & (1 << 64) - 1 for i in range(len(path))]


paths = st.lists(st.integers(0, 1), min_size=0, max_size=9).map(chain)
steps = st.lists(st.tuples(paths, st.none() | st.integers(0, 9)), max_size=30)


@settings(REPEATABLE, max_examples=300)
@given(limit=st.integers(1, 20), steps=steps)
def test_what_is_kept_and_in_which_order_it_goes_is_as_block_by_block(limit, steps):
    index = BlockIndex(1000)
    recall, plain = Recall(index, limit), Blockwise(limit)
    for keys, cached in steps:
        if cached is not None:
            recall.correct(keys, cached)
            plain.correct(keys, cached)
        recall.remember(keys)
        plain.remember(keys)
        assert {key for key in plain.used if index.holds(recall.holder, key)} == set(plain.used)
        assert index.counts[recall.holder] == len(plain.used)
        index.check_integrity()


@pytest.mark.interpreted
def test_a_turn_costs_what_it_adds():
    class Counting(BlockIndex):
        added = 0

        def add(self, holder, parent, keys):
            self.added += len(keys)
            return super().add(holder, parent, keys)

    index = Counting(10_000)
    recall, keys = Recall(index, 10_000), chain(range(1000))
    for end in range(500, 1001, 10):
        recall.remember(keys[:end])
    assert index.added == 1000


def test_blocks_that_the_index_has_no_room_for_are_remembered_when_it_has():
    index, keys = BlockIndex(4), chain(range(6))
    recall = Recall(index, 100)
    recall.remember(keys)
    assert [index.holds(recall.holder, key) for key in keys] == [True] * 4 + [False] * 2
    other = Recall(index, 100)
    other.remember(keys[:2])
    recall.clear()
    recall.remember([*keys[:2], *chain([7, 8])])
    assert index.counts[recall.holder] == 4
    index.check_integrity()


def test_forgetting_everything_leaves_nothing_in_the_index():
    index = BlockIndex(100)
    recall = Recall(index, 100)
    recall.remember(chain(range(5)))
    recall.clear()
    assert (len(index), index.counts[recall.holder]) == (0, 0)
    recall.remember(chain(range(3)))
    assert index.counts[recall.holder] == 3


def known(recall, index, keys):
    return sum(index.holds(recall.holder, key) for key in keys)


def test_a_hit_beyond_what_is_remembered_shows_room_below_the_device():
    index = BlockIndex(1000)
    recall = Recall(index, 10, 100)
    prompts = [chain([i, *range(3)]) for i in range(5)]
    for keys in prompts:
        recall.remember(keys)
    assert recall.limit_blocks == 10
    assert [known(recall, index, keys) for keys in prompts] == [0, 0, 2, 4, 4]
    recall.found(prompts[0], 4)
    assert recall.limit_blocks == 14
    recall.remember(prompts[0])
    assert [known(recall, index, keys) for keys in prompts] == [4, 0, 2, 4, 4]
    recall.found(prompts[2], 3)  # one more than known
    assert recall.limit_blocks == 15
    recall.found(prompts[3], 4)
    recall.found(prompts[3], 2)
    assert recall.limit_blocks == 15


def test_room_below_the_device_is_bounded_and_taken_back_when_it_is_not_there():
    index = BlockIndex(1000)
    recall = Recall(index, 10, 6)
    prompts = [chain([i, *range(3)]) for i in range(5)]
    recall.found(prompts[0], 4)
    recall.found(prompts[1], 4)
    assert recall.limit_blocks == 16
    for keys in prompts[:4]:
        recall.remember(keys)
    assert index.counts[recall.holder] == 16
    recall.correct(prompts[0], 1)  # it lost three, while the twelve of the others were used
    assert recall.limit_blocks == 13
    recall.correct(prompts[3], 0)  # as if it had been cleared: the device's room stays
    assert (recall.limit_blocks, index.counts[recall.holder]) == (10, 0)


def test_what_a_model_left_behind_is_forgotten_and_nothing_else():
    index = BlockIndex(1000)
    recall = Recall(index, 100)
    base, adapter, grown = chain([0, 1, 2]), chain([9, 1, 2]), chain([9, 1, 2, 3, 4])
    recall.remember(base, "base")
    recall.remember(adapter, "adapter")
    recall.remember(grown, "adapter")
    recall.remember(chain([9, 1, 7]), "adapter")
    recall.forget(["adapter", "unknown"])
    assert known(recall, index, base) == index.counts[recall.holder] == len(index) == 3
    recall.remember(grown, "adapter")
    recall.remember(chain([0, 1, 5]), "base")
    assert known(recall, index, grown) == 5
    recall.forget(["base"])
    assert index.counts[recall.holder] == 5
    index.check_integrity()


@settings(REPEATABLE, max_examples=200)
@given(limit=st.integers(1, 20), steps=steps)
def test_forgetting_leaves_what_was_of_others_whatever_came_before(limit, steps):
    """Paths that begin with 0 are one model's, the others another's."""
    index = BlockIndex(1000)
    recall = Recall(index, limit)
    ones = {chain([0])[0]}
    mine = set()
    for keys, cached in steps:
        if cached is not None:
            recall.correct(keys, cached)
        recall.remember(keys, "zero" if keys and keys[0] in ones else "one")
        if not keys or keys[0] not in ones:
            mine.update(keys)
    before = {key for key in mine if index.holds(recall.holder, key)}
    recall.forget(["zero"])
    assert index.counts[recall.holder] == len(before)
    assert all(index.holds(recall.holder, key) for key in before)
    recall.forget(["one"])
    assert (len(index), recall._parents, recall._children, recall._models) == (0, {}, {}, {})
    assert not recall._ends
