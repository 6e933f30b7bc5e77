"""What is remembered of an endpoint that does not tell."""

from collections import OrderedDict

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
    recall, plain = Recall(index, limit, 0), Blockwise(limit)
    for keys, cached in steps:
        if cached is not None:
            recall.correct(keys, cached)
            plain.correct(keys, cached)
        recall.remember(keys, "m")
        plain.remember(keys)
        assert {key for key in plain.used if index.holds(recall.holder, key)} == set(plain.used)
        assert index.counts[recall.holder] == len(plain.used)
        index.check_integrity()


def test_a_turn_costs_what_it_adds():
    class Counting(BlockIndex):
        added = 0

        def add(self, holder, parent, keys):
            self.added += len(keys)
            return super().add(holder, parent, keys)

    index = Counting(10_000)
    recall, keys = Recall(index, 10_000, 0), chain(range(1000))
    for end in range(500, 1001, 10):
        recall.remember(keys[:end], "m")
    assert index.added == 1000


def test_blocks_that_the_index_has_no_room_for_are_remembered_when_it_has():
    index, keys = BlockIndex(4), chain(range(6))
    recall = Recall(index, 100, 0)
    recall.remember(keys, "m")
    assert [index.holds(recall.holder, key) for key in keys] == [True] * 4 + [False] * 2
    other = Recall(index, 100, 0)
    other.remember(keys[:2], "m")
    recall.clear()
    recall.remember([*keys[:2], *chain([7, 8])], "m")
    assert index.counts[recall.holder] == 4
    index.check_integrity()


def test_forgetting_everything_leaves_nothing_in_the_index():
    index = BlockIndex(100)
    recall = Recall(index, 100, 0)
    recall.remember(chain(range(5)), "m")
    recall.clear()
    assert (len(index), index.counts[recall.holder]) == (0, 0)
    recall.remember(chain(range(3)), "m")
    assert index.counts[recall.holder] == 3
