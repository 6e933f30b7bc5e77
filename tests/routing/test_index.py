import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_lab import REPEATABLE

from sumibi.routing.index import JOINED_BLOCKS, BlockIndex

# A small forest: block key -> the block before it. Keys are not chained hashes here; the index does not care.
PARENTS = {1: None, 2: 1, 3: 2, 4: 3, 5: 2, 6: 5, 7: None, 8: 7}
PATHS = [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8], [1, 2], [1, 2, 3, 99]]


def scan(held, keys, holder):
    """The oracle: blocks of a prompt that a holder has without a break from the root."""
    run = 0
    for key in keys:
        if (holder, key) not in held:
            break
        run += 1
    return run


def lengths(index, keys, holders):
    found = dict.fromkeys(range(holders), 0)
    for blocks, here in index.match(keys, len(keys), (1 << holders) - 1):
        for holder in range(holders):
            if here >> holder & 1:
                found[holder] = blocks
    return found


def assert_path(index, keys, held):
    """The path names each block's holders, down to one that nobody has or further."""
    begun = 0
    for end, holders in index.path(keys, len(keys)):
        for key in keys[begun:end]:
            assert holders == sum(1 << h for h in range(3) if (h, key) in held) == index.holders_of(key)
        begun = end
    assert all((h, key) not in held for h in range(3) for key in keys[begun : begun + 1])


changes = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "remove", "clear"]),
        st.integers(0, 2),
        st.sampled_from([*PARENTS]),
    ),
    max_size=60,
)


@given(changes)
@settings(REPEATABLE, max_examples=300)
def test_runs_equal_a_scan_from_the_root_whatever_comes_and_goes(changes):
    index, held = BlockIndex(1000), set()
    for _ in range(3):
        index.new_holder()
    for what, holder, key in changes:
        if what == "add":
            index.add(holder, PARENTS[key], [key])
            held.add((holder, key))
        elif what == "remove":
            index.remove(holder, [key])
            held.discard((holder, key))
        else:
            index.clear(holder)
            held = {(h, k) for h, k in held if h != holder}
        index.check_integrity()
    for path in PATHS:
        assert lengths(index, path, 3) == {h: scan(held, path, h) for h in range(3)}
        assert_path(index, path, held)
    assert [index.counts[h] for h in range(3)] == [sum(h == holder for h, _ in held) for holder in range(3)]


# Long chains that branch: each prompt is cut out of these, so that parts are longer than what is joined.
TRUNK = list(range(1000, 1200))
BRANCHES = [
    TRUNK,
    TRUNK[:120] + list(range(2000, 2100)),
    TRUNK[:120] + list(range(2000, 2030)) + list(range(3000, 3080)),
    list(range(4000, 4010)),
]

stretches = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "remove up", "remove down", "thin out", "copy", "clear"]),
        st.integers(0, 2),
        st.integers(0, len(BRANCHES) - 1),
        st.integers(0, 220),
        st.integers(1, 220),
    ),
    max_size=30,
)


@given(stretches)
@settings(REPEATABLE, max_examples=120)
def test_runs_equal_a_scan_when_chains_come_and_go_in_parts(changes):
    index = BlockIndex(10_000)
    held = {index.new_holder(): set() for _ in range(3)}
    placed = set()
    for what, holder, branch, start, blocks in changes:
        chain = BRANCHES[branch]
        start = min(start, len(chain) - 1)
        part = chain[start : start + blocks]
        if what == "add":
            index.add(holder, chain[start - 1] if start else None, part)
            held[holder] |= set(part)
        elif what == "copy":
            # Blocks that others have; none of which hangs from a parent that was only named.
            known = [key for key in part if key in set().union(*held.values())]
            if all(key in placed for key in known):
                index.copy(holder, known)
                held[holder] |= set(known)
        elif what == "clear":
            index.clear(holder)
            held[holder] = set()
        else:
            gone = part if what == "remove down" else part[::-1]
            gone = gone[::3] if what == "thin out" else gone
            index.remove(holder, gone)
            held[holder] -= set(gone)
        index.check_integrity()
        everyone = set().union(*held.values())
        placed = {key for chain in BRANCHES for i, key in enumerate(chain) if set(chain[: i + 1]) <= everyone}
        pairs = {(holder, key) for holder, keys in held.items() for key in keys}
        for path in BRANCHES:
            found, oracle = lengths(index, path, 3), {h: scan(pairs, path, h) for h in held}
            assert found == oracle
    assert index.counts == [len(held[holder]) for holder in held]


def test_blocks_that_share_their_fate_are_kept_together_again_after_a_while_apart():
    index, keys = BlockIndex(10_000), list(range(1, 1001))
    first, second = index.new_holder(), index.new_holder()
    for start in range(0, 1000, 16):
        index.add(first, keys[start - 1] if start else None, keys[start : start + 16])
    assert index.stretches == 1
    for start in range(0, 480, 16):
        index.add(second, keys[start - 1] if start else None, keys[start : start + 16])
        assert index.stretches == 2
    for key in reversed(keys[:480]):
        index.remove(second, [key])
        assert index.stretches <= 2
    index.add(second, keys[979], [5001, 5002])
    assert index.stretches == 3
    index.remove(second, [5002, 5001])
    assert index.stretches == 1


def test_branches_that_come_and_go_do_not_tear_a_long_chain_to_pieces():
    index, keys = BlockIndex(10_000), list(range(1, 2001))
    holder, other = index.new_holder(), index.new_holder()
    index.add(holder, None, keys)
    for at in range(0, 2000, 7):
        index.add(other, keys[at], [9001, 9002])
        index.remove(other, [9002, 9001])
        index.check_integrity()
    assert index.stretches <= 2 * 2000 / JOINED_BLOCKS


def test_a_placeless_block_finds_its_place_when_the_chain_before_it_is_told():
    index, keys = BlockIndex(100), list(range(1, 9))
    holder = index.new_holder()
    index.add(holder, keys[3], keys[4:])
    index.add(holder, None, keys[:3])
    assert lengths(index, keys, 1) == {0: 3}
    index.add(holder, keys[2], keys[3:4])
    assert lengths(index, keys, 1) == {0: 8}
    assert index.stretches == 1


def test_every_holder_s_end_is_found_on_a_long_prompt():
    index, keys = BlockIndex(10_000), list(range(1, 1564))
    ends = [0, 1, 2, 700, 781, 782, 1562, 1563]
    for end in ends:
        index.add(index.new_holder(), None, keys[:end])
    assert lengths(index, keys, len(ends)) == dict(enumerate(ends))


def test_a_match_is_limited_to_the_length_asked_for():
    index = BlockIndex(10)
    index.add(index.new_holder(), None, [1, 2, 3])
    assert index.match([1, 2, 3], 2, 1) == [(2, 1)]
    assert index.match([1, 2, 3], 0, 1) == []


def test_the_same_tokens_after_another_prefix_are_no_match():
    """F29: keys are chained, so a block is found only behind its own prefix."""
    index = BlockIndex(10)
    index.add(index.new_holder(), 5, [6])
    assert index.match([6], 1, 1) == []


def test_a_full_index_leaves_new_blocks_out_and_says_how_many():
    """F14, F32: bounded, whatever is stored."""
    index = BlockIndex(4)
    holder = index.new_holder()
    assert index.add(holder, None, [1, 2, 3]) == 0
    assert index.add(holder, None, [11, 12, 13]) == 2
    assert index.add(holder, 77, [78]) == 1
    assert (len(index), index.refused_blocks, index.counts[holder]) == (4, 3, 4)
    index.remove(holder, [1, 2, 3])
    assert index.add(holder, 11, [12, 13]) == 0
    index.check_integrity()


def test_endless_distinct_prompts_leave_nothing_behind():
    """F32."""
    index = BlockIndex(100_000)
    holder = index.new_holder()
    for start in range(0, 20_000, 20):
        index.add(holder, None, range(start, start + 20))
        index.remove(holder, range(start + 19, start - 1, -1))
    assert len(index) == 0
    assert index.estimated_bytes == 0


def test_a_removed_holder_s_number_comes_back_empty():
    index = BlockIndex(100)
    first, second = index.new_holder(), index.new_holder()
    index.add(first, None, [1, 2])
    index.add(second, None, [1])
    index.remove_holder(first)
    assert index.new_holder() == first
    assert index.match([1, 2], 2, 0b11) == [(1, 1 << second)]
    assert len(index) == 1


@pytest.mark.parametrize("holders", [1, 70])
def test_more_than_64_holders_share_a_block(holders):
    index = BlockIndex(100)
    for _ in range(holders):
        index.add(index.new_holder(), None, [1])
    assert index.match([1], 1, (1 << holders) - 1) == [(1, (1 << holders) - 1)]


@pytest.mark.parametrize("blocks", [1, 4, 100])
def test_an_entry_takes_about_what_is_estimated(blocks):
    import tracemalloc

    tracemalloc.start()
    index = BlockIndex(1_000_000)
    holder = index.new_holder()
    before = tracemalloc.get_traced_memory()[0]
    for start in range(0, 60_000, blocks):
        index.add(holder, None, [(start + i) * 0x9E3779B97F4A7C15 % 2**64 for i in range(blocks)])
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken == pytest.approx(index.estimated_bytes, rel=0.3)
