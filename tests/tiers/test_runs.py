"""Several blocks of a chain in one file of the disk tier: found, read in part, used, broken and gone."""

import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.tiers import DiskTier, Tier
from sumibi.tiers import disk as disk_module
from sumibi.tiers.blockfile import Header, checksum
from sumibi.tiers.catalog import Catalog
from sumibi.tiers.disk import runs

RUN = 4


@pytest.fixture
def wide(kit, tmp_path):
    """A disk tier with up to four blocks in a file."""
    return DiskTier(str(tmp_path / "disk"), disk_module.SMALL_PART * RUN * kit.FILE)


@pytest.fixture
def filled(kit, make, wide):
    """A process's tiers, with one chain of 10 blocks on disk, and the chain."""
    tiers = make(disk=wide)
    ids = kit.chain("a", 10)
    assert tiers.flush(5)
    # All at once for the writing thread: parts of 3, 3 and 4.
    tiers._down.writers[Tier.DISK].between(lambda: tiers.store(kit.blocks(ids)))
    assert tiers.flush(5)
    return tiers, ids


def files(directory, kit):
    """Names and how many blocks each has."""
    found = sorted(os.path.join(at, name) for at, _, names in os.walk(directory) for name in names)
    return {
        os.path.basename(path).removesuffix(".kv"): os.path.getsize(path) // kit.FILE
        for path in found
        if path.endswith(".kv")
    }


def test_a_chain_lies_in_few_files_named_by_their_first_blocks(kit, filled, wide):
    _, ids = filled
    assert files(wide.path, kit) == {ids[0].hex(): 3, ids[3].hex(): 3, ids[6].hex(): 4}


def test_any_part_of_it_can_be_read_in_any_order(kit, filled):
    tiers, ids = filled
    for wanted in ([0, 1, 2, 3], [2], [3, 4], [9, 5, 1, 6], list(range(10)), [7, 3]):
        assert kit.load(tiers, [ids[i] for i in wanted]) == [Tier.DISK] * len(wanted)
    assert kit.load(tiers, [ids[1], b"another", ids[3]]) == [Tier.DISK, None, Tier.DISK]
    disk = tiers.stats().tiers[Tier.DISK]
    assert (disk.blocks, disk.stored, disk.bytes) == (10, 10, 10 * kit.FILE)


def test_a_restart_finds_every_block_and_its_parent(kit, make, filled, wide):
    tiers, ids = filled
    tiers.close()
    again = make(disk=wide)
    assert again.flush(5)
    assert again.match(ids) == [Tier.DISK] * 10
    told = {(event.content_id, event.parent) for event in again.drain_events() if event.stored}
    assert told == {(content_id, ids[k - 1] if k else None) for k, content_id in enumerate(ids)}
    assert kit.load(again, ids) == [Tier.DISK] * 10


def test_a_restart_with_less_room_reads_longer_files_than_it_would_write(kit, make, filled, wide):
    tiers, ids = filled
    tiers.close()
    again = make(disk=DiskTier(wide.path, 20 * kit.FILE))
    assert again.flush(5)
    assert kit.load(again, ids) == [Tier.DISK] * 10


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("change", ["payload", "magic", "short", "long"])
def test_a_broken_block_is_not_served_and_its_file_goes(kit, make, filled, wide, change, known):
    tiers, ids = filled
    if not known:
        tiers.close()
    path = f"{wide.path}/{tiers._namespace.hex()}/{ids[3].hex()[-2:]}/{ids[3].hex()}.kv"
    with open(path, "rb") as file:
        raw = bytearray(file.read())
    if change == "long":
        raw += b"x"
    elif change == "short":
        del raw[-1]
    else:
        raw[2 * kit.FILE + (200 if change == "payload" else 0)] ^= 1  # of block 5
    with open(path, "wb") as file:
        file.write(raw)
    if not known:
        tiers = make(disk=wide)
        assert tiers.flush(5)
    came = kit.load(tiers, ids)
    # A payload's sum is looked at with the block, the rest of a file when it is opened or first seen.
    good = {3, 4} if change == "payload" or (known and change == "magic") else set()
    assert came == [Tier.DISK if i not in range(3, 6) or i in good else None for i in range(10)]
    assert tiers.stats().tiers[Tier.DISK].corrupt >= 1
    assert not os.path.exists(path)
    assert tiers.match(ids) == [Tier.DISK] * 3
    gone = {event.content_id for event in tiers.drain_events() if not event.stored}
    assert gone == (set(ids[3:6]) if known or change == "payload" else set())
    tiers.store(kit.blocks(ids))
    assert tiers.flush(5)
    assert kit.load(tiers, ids) == [Tier.DISK] * 10


def test_a_file_that_was_replaced_while_it_was_read_is_a_miss_and_stays(kit, filled):
    """What was about to be read goes; another chain's file has its name by then."""
    tiers, ids = filled
    disk = tiers._books.disk
    with tiers._books.lock:
        (stretch,) = disk.stretches(ids, range(3, 6))
        disk._forget(ids[3])
    other = [ids[3], *kit.chain("other", 3)]
    disk.write(
        [
            (Header(tiers._namespace, i, None, kit.BLOCK, checksum(kit.payload(i))), kit.payload(i))
            for i in other
        ]
    )
    came = disk.read(stretch)
    assert [i for i, *_ in came] in ([], [3])
    assert tiers.stats().tiers[Tier.DISK].corrupt == 0
    assert kit.load(tiers, other) == [Tier.DISK] * 4


def test_a_used_branch_keeps_the_file_that_it_leaves(kit, make, wide):
    """Two conversations share blocks 0 to 4; the file of 4 to 7 holds the first one's end, too."""
    tiers = make(disk=wide)
    assert tiers.flush(5)
    first = kit.chain("a", 8)
    second = [*first[:5], *kit.chain("b", 3)]
    writer = tiers._down.writers[Tier.DISK]
    for ids in (first, second):
        writer.between(lambda ids=ids: tiers.store(kit.blocks(ids)))
        assert tiers.flush(5)
    assert files(wide.path, kit) == {first[0].hex(): 4, first[4].hex(): 4, second[5].hex(): 3}
    n = 0
    while tiers.stats().tiers[Tier.DISK].evicted < 40:
        n += 1
        tiers.store(kit.blocks(kit.chain(f"new {n}", 4)))
        assert tiers.flush(5)
        assert kit.load(tiers, [second[7]]) == [Tier.DISK]  # only its end is used
        assert n < 200
    assert kit.load(tiers, second) == [Tier.DISK] * 8
    assert sum(files(wide.path, kit).values()) <= disk_module.SMALL_PART * RUN


def test_what_comes_within_a_moment_is_written_together(kit, make, wide):
    """Blocks come one by one, as an engine's steps give them, and nobody waits for the queue to be empty."""
    tiers = make(disk=wide)
    assert tiers.flush(5)
    ids = kit.chain("a", 4)
    for block in kit.blocks(ids):
        tiers.store([block])
    kit.wait_for(lambda: tiers.match(ids) == [Tier.DISK] * 4)
    assert files(wide.path, kit) == {ids[0].hex(): 4}


BLOCKS = st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 12)), unique_by=lambda block: block[0])


@given(BLOCKS, st.integers(1, 5))
def test_runs_are_pieces_of_chains(drawn, most):
    blocks = [
        (Header(b"n" * 16, bytes([i]), bytes([parent]) if parent >= 0 else None, 1, b""), b"")
        for i, parent in drawn
    ]
    parted = runs(blocks, most)
    assert sorted(b[0].content_id for run in parted for b in run) == sorted(b[0].content_id for b in blocks)
    for run in parted:
        assert 1 <= len(run) <= most
        assert all(after.parent == before.content_id for (before, _), (after, _) in pairwise(run))


def test_a_chain_is_parted_as_seldom_as_may_be(kit):
    ids = kit.chain("a", 11)
    blocks = [(Header(b"n" * 16, i, ids[k - 1] if k else None, 1, b""), b"") for k, i in enumerate(ids)]
    assert [len(run) for run in runs(blocks, 4)] == [3, 4, 4]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 30)), min_size=1, max_size=8),
    st.lists(st.integers(0, 23), max_size=10),
)
def test_entries_of_several_blocks_go_from_the_end_and_by_their_last_use(shapes, touched):
    """Against a plain model: the entry least recently used of those that no other entry follows."""
    catalog = Catalog(10_000)
    model = []  # [ids, parent], least recent first
    ids = iter(range(256))
    known = []
    for size, parent in shapes:
        new = [bytes([next(ids)]) for _ in range(size)]
        before = known[parent % len(known)] if parent >= 0 and known else None
        catalog.add(new[0], before, size, more=tuple(new[1:]))
        known += new
        model.append((new, before))
    for i in touched:
        content_id = known[i % len(known)]
        catalog.touch(content_id)
        entry = next(entry for entry in model if content_id in entry[0])
        model.remove(entry)
        model.append(entry)
    assert len(catalog) == len(known)
    while model:
        followed = {before for _, before in model}
        right = next(entry for entry in model if not followed & set(entry[0]))
        victim = catalog.victim()
        assert victim.ids == tuple(right[0])
        assert {each.content_id for each in catalog} == {entry[0][0] for entry in model}
        catalog.remove(right[0][-1])
        model.remove(right)
        assert not any(i in catalog for i in right[0])
    assert (len(catalog), catalog.bytes, catalog.victim()) == (0, 0, None)
