"""The block pool against a brute-force model of it, and its events against a subscriber's books."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sumibi.core.content import content_id, content_root
from sumibi.core.kvevents import AllBlocksCleared, BlockRemoved, BlockStored
from sumibi.engine.blocks import BlockPool, FullBlock, wire_hash

BLOCK = 2
ROOT = content_root("test")


def ids_of(tokens, root=ROOT):
    """Content ids of the full blocks of `tokens`."""
    ids = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        ids.append(content_id(ids[-1] if ids else root, tokens[start : start + BLOCK]))
    return ids


def full_blocks(tokens, salt=""):
    root = content_root("test", salt=salt)
    ids = ids_of(tokens, root)
    return [
        FullBlock(ids[i], ids[i - 1] if i else None, tokens[i * BLOCK : (i + 1) * BLOCK], salt)
        for i in range(len(ids))
    ]


def run(pool, tokens, salt=""):
    """Compute a whole prompt from scratch; returns the table it holds."""
    table = pool.take([], pool.blocks_for(len(tokens)))
    for index, full in enumerate(full_blocks(tokens, salt)):
        table[index] = pool.fill(table[index], full)
    return table


def test_a_prompt_given_back_is_found_again_up_to_the_first_difference():
    pool = BlockPool(8, BLOCK)
    table = run(pool, [1, 2, 3, 4, 5, 6])
    pool.give_back(table)
    assert pool.match(ids_of([1, 2, 3, 4, 9, 9])) == table[:2]
    assert pool.match(ids_of([3, 4])) == []


def test_salts_separate_equal_prompts():
    pool = BlockPool(8, BLOCK)
    pool.give_back(run(pool, [1, 2, 3, 4], salt="a"))
    assert pool.match(ids_of([1, 2, 3, 4], content_root("test", salt="b"))) == []
    assert pool.match(ids_of([1, 2, 3, 4])) == []
    assert len(pool.match(ids_of([1, 2, 3, 4], content_root("test", salt="a")))) == 2


def test_two_that_compute_the_same_block_end_up_sharing_one():
    pool = BlockPool(4, BLOCK)
    first = run(pool, [1, 2])
    second = run(pool, [1, 2])
    assert first == second
    assert pool.held == 1
    assert len(pool.drain_events()) == 1
    pool.check_integrity([first, second])


def test_the_prefix_unused_for_longest_goes_first_and_its_end_before_its_start():
    pool = BlockPool(4, BLOCK)
    pool.give_back(run(pool, [1, 2, 3, 4]))
    pool.give_back(run(pool, [5, 6]))
    pool.give_back(pool.take(pool.match(ids_of([1, 2])), 0))  # uses [1, 2], not [3, 4]
    pool.drain_events()
    removed = []
    for _ in range(4):
        pool.take([], 1)
        removed += [h for event in pool.drain_events() for h in event.block_hashes]
    last = ids_of([1, 2, 3, 4])
    assert removed == [wire_hash(i) for i in (last[1], ids_of([5, 6])[0], last[0])]


def test_giving_back_what_nobody_holds_is_refused():
    pool = BlockPool(2, BLOCK)
    table = pool.take([], 1)
    pool.give_back(table)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.give_back(table)


def test_clear_waits_until_nothing_is_held():
    pool = BlockPool(4, BLOCK)
    table = run(pool, [1, 2, 3, 4])
    assert not pool.clear()
    pool.give_back(table)
    pool.drain_events()
    assert pool.clear()
    assert pool.drain_events() == [AllBlocksCleared()]
    assert pool.match(ids_of([1, 2])) == []
    assert pool.available == 4


def test_events_name_parent_tokens_and_salt_as_vllm_does():
    pool = BlockPool(4, BLOCK)
    run(pool, [1, 2, 3, 4], salt="tenant")
    first, second = ids_of([1, 2, 3, 4], content_root("test", salt="tenant"))
    assert pool.drain_events() == [
        BlockStored(
            block_hashes=[wire_hash(first), wire_hash(second)],
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4],
            block_size=BLOCK,
            medium="GPU",
            extra_keys=[["tenant"], None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
    ]
    table = pool.take(pool.match([first, second]), 1)
    third = content_id(second, [5, 6])
    pool.fill(table[2], FullBlock(third, second, [5, 6], "tenant"))
    (stored,) = pool.drain_events()
    assert stored.parent_block_hash == wire_hash(second)
    assert stored.extra_keys == [None]


class PoolMachine(RuleBasedStateMachine):
    """Random prompts come, are computed block by block, and go, in a pool that is always short.

    The model is a dict from a prefix (its tokens) to when it was last given back; eviction is a search
    for the least recently used one, longest first.
    """

    BLOCKS = 6

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.BLOCKS, BLOCK)
        self.holders = []  # [tokens, table, filled blocks]
        self.known = {}  # prefix -> time it was last given back
        self.clock = 0
        self.subscriber = set()

    def names(self, tokens, blocks):
        return [tuple(tokens[: (i + 1) * BLOCK]) for i in range(blocks)]

    def held_prefixes(self):
        return {name for tokens, _, filled in self.holders for name in self.names(tokens, filled)}

    def evict(self, count):
        """The model's own eviction: what must go so that `count` blocks are empty."""
        unknown = sum(len(table) - filled for _, table, filled in self.holders)
        blank = self.BLOCKS - len(self.known) - unknown
        held = self.held_prefixes()
        for _ in range(count - blank):
            victim = min((p for p in self.known if p not in held), key=lambda p: (self.known[p], -len(p)))
            del self.known[victim]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def start(self, tokens):
        ids = ids_of(tokens)[: (len(tokens) - 1) // BLOCK]
        hit = self.pool.match(ids)
        expected = 0
        while expected < len(ids) and tuple(tokens[: (expected + 1) * BLOCK]) in self.known:
            expected += 1
        assert len(hit) == expected
        assert self.pool.match_length(ids) == expected
        fresh = self.pool.blocks_for(len(tokens)) - len(hit)
        unknown = sum(len(table) - filled for _, table, filled in self.holders)
        spare = self.BLOCKS - unknown - len(self.held_prefixes() | set(self.names(tokens, expected)))
        assert self.pool.can_take(hit, fresh) == (spare >= fresh)
        if spare >= fresh:
            self.holders.append([tokens, hit, expected])  # held before anything is evicted
            self.evict(fresh)
            self.holders[-1][1] = self.pool.take(hit, fresh)

    @precondition(lambda self: any(len(t) // BLOCK > f for t, _, f in self.holders))
    @rule(data=st.data())
    def fill(self, data):
        holder = data.draw(st.sampled_from([h for h in self.holders if len(h[0]) // BLOCK > h[2]]))
        tokens, table, filled = holder
        table[filled] = self.pool.fill(table[filled], full_blocks(tokens)[filled])
        holder[2] += 1
        self.known.setdefault(tuple(tokens[: holder[2] * BLOCK]), 0)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        tokens, table, filled = self.holders.pop(index)
        self.pool.give_back(table)
        self.clock += 1
        held = self.held_prefixes()
        for name in self.names(tokens, filled):
            if name not in held:
                self.known[name] = self.clock

    @rule()
    def clear(self):
        assert self.pool.clear() == (not self.holders)
        if not self.holders:
            self.known = {}

    @invariant()
    def pool_agrees_with_itself_the_model_and_a_subscriber(self):
        self.pool.check_integrity([table for _, table, _ in self.holders])
        expected = {ids_of(prefix)[-1] for prefix in self.known}
        assert self.pool.known_contents() == expected
        for event in self.pool.drain_events():
            match event:
                case BlockStored():
                    assert self.subscriber.isdisjoint(event.block_hashes)
                    assert event.parent_block_hash is None or event.parent_block_hash in self.subscriber
                    self.subscriber.update(event.block_hashes)
                case BlockRemoved():
                    assert self.subscriber.issuperset(event.block_hashes)
                    self.subscriber.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.subscriber.clear()
        assert self.subscriber == {wire_hash(i) for i in expected}


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
