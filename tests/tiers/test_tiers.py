"""Blocks go down and come back, tier by tier and through all of them."""

import ctypes
import errno
import mmap
import os
import threading
import time

import pytest

from sumibi.core.errors import ConfigError
from sumibi.tiers import DiskTier, StoreTier, Tier, direct, rest, up
from sumibi.tiers import directory as directory_module
from sumibi.tiers.tiers import POPULATING


def test_host(kit, make):
    tiers = make(host=10 * kit.BLOCK)
    ids = kit.chain("a", 3)
    assert tiers.match(ids) == []
    assert tiers.store(kit.blocks(ids)) == 3
    assert tiers.match([*ids, b"other"]) == [Tier.HOST] * 3
    assert tiers.match([b"other", *ids]) == []
    assert kit.load(tiers, [ids[2], b"other", ids[0]]) == [Tier.HOST, None, Tier.HOST]
    stats = tiers.stats()
    host = stats.tiers[Tier.HOST]
    assert (host.blocks, host.bytes, host.stored, host.hits, stats.misses) == (3, 3 * kit.BLOCK, 3, 2, 1)


@pytest.mark.parametrize("host", [0, 2000])
def test_disk_survives_a_restart(kit, make, tmp_path, host):
    disk = DiskTier(str(tmp_path), 100 * kit.FILE)
    tiers = make(host=host, disk=disk)
    ids = kit.chain("a", 9)
    for block in kit.blocks(ids):
        assert tiers.store([block]) == 1
        assert tiers.flush(5)
    tiers.close()
    again = make(disk=disk)
    assert again.flush(5)
    assert again.match(ids) == [Tier.DISK] * 9
    assert kit.load(again, ids) == [Tier.DISK] * 9
    events = again.drain_events()
    assert {(e.stored, e.content_id, e.parent) for e in events} == {
        (True, i, ids[k - 1] if k else None) for k, i in enumerate(ids)
    }
    assert {e.medium for e in events} == {"STORAGE"}


def test_what_came_from_disk_is_kept_in_host_memory(kit, make, tmp_path):
    disk = DiskTier(str(tmp_path), 100 * kit.FILE)
    first = make(disk=disk)
    ids = kit.chain("a", 4)
    assert first.store(kit.blocks(ids)) == 4
    first.close()
    tiers = make(host=10 * kit.BLOCK, disk=disk)
    assert tiers.flush(5)
    assert kit.load(tiers, ids) == [Tier.DISK] * 4
    assert tiers.match(ids) == [Tier.HOST] * 4
    assert kit.load(tiers, ids) == [Tier.HOST] * 4


def test_prefetch_brings_up(kit, make, tmp_path):
    disk = DiskTier(str(tmp_path), 100 * kit.FILE)
    first = make(disk=disk)
    ids = kit.chain("a", 20)
    assert first.store(kit.blocks(ids)) == 20
    first.close()
    tiers = make(host=30 * kit.BLOCK, disk=disk)
    assert tiers.flush(5)
    tiers.prefetch(ids)
    kit.wait_for(lambda: tiers.match(ids[-1:]) == [Tier.HOST])
    assert tiers.match(ids) == [Tier.HOST] * 20


def test_a_shared_directory_serves_another_engine(kit, make, tmp_path):
    store = StoreTier(str(tmp_path), 100 * kit.FILE)
    one = make(host=100 * kit.BLOCK, store=store)
    ids = kit.chain("a", 40)
    assert one.store(kit.blocks(ids)) == 40
    assert one.flush(5)
    other = make(host=50 * kit.BLOCK, store=store)
    assert other.match(ids) == []
    for missing in (0, 1, 7, 40):
        asked = ids[: 40 - missing] + kit.chain("b", missing)
        assert other.find(asked) == [Tier.STORE] * (40 - missing)
    assert kit.load(other, ids) == [Tier.STORE] * 40
    assert kit.load(other, ids) == [Tier.HOST] * 40


def test_two_engines_do_not_share_a_disk_tier(kit, make, tmp_path):
    disk = DiskTier(str(tmp_path), 100 * kit.FILE)
    make(disk=disk)
    with pytest.raises(ConfigError, match=r"in use.*store\.url"):
        make(disk=disk)


def test_clear_removes_it_everywhere(kit, make, tmp_path):
    tiers = make(
        host=10 * kit.BLOCK,
        disk=DiskTier(str(tmp_path / "d"), 100 * kit.FILE),
        store=StoreTier(str(tmp_path / "s"), 100 * kit.FILE),
    )
    ids = kit.chain("a", 5)
    tiers.store(kit.blocks(ids))
    assert tiers.flush(5)
    tiers.clear()
    assert tiers.find(ids) == []
    assert kit.load(tiers, ids) == [None] * 5
    assert not list(tmp_path.rglob("*.kv"))
    held = {}
    for event in tiers.drain_events():
        key = (event.content_id, event.tier)
        held[key] = held.get(key, 0) + (1 if event.stored else -1)
    assert len(held) == 15
    assert set(held.values()) == {0}
    assert tiers.store(kit.blocks(ids)) == 5
    assert kit.load(tiers, ids) == [Tier.HOST] * 5


def test_who_leaves_the_store_finds_nothing_of_before_and_others_all(kit, make, tmp_path):
    store = StoreTier(str(tmp_path), 100 * kit.FILE)
    one, other = make(store=store), make(store=store)
    ids = kit.chain("a", 5)
    one.store(kit.blocks(ids))
    assert one.flush(5)
    assert other.find(ids) == [Tier.STORE] * 5
    one.drain_events()
    one.leave_store("2")
    assert (one.match(ids), one.find(ids)) == ([], [])
    assert kit.load(one, ids) == [None] * 5
    assert one.drain_events() == [], "nothing has gone"
    assert kit.load(other, ids) == [Tier.STORE] * 5
    assert one.store(kit.blocks(ids[:3])) == 3
    assert one.flush(5)
    assert {event.content_id for event in one.drain_events()} == set(ids[:3])
    assert kit.load(one, ids) == [Tier.STORE] * 3 + [None] * 2
    third = make(store=store)
    third.leave_store("2")
    assert third.find(ids) == [Tier.STORE] * 3


def test_a_block_of_others_that_goes_is_not_taken_for_our_own_of_that_name(kit, make, tmp_path):
    store = StoreTier(str(tmp_path), 10 * kit.FILE)
    other, one = make(store=store), make(store=store, namespace="new weights")
    ids = kit.chain("a", 5)
    for tiers in (other, one):
        tiers.store(kit.blocks(ids))
        assert tiers.flush(5)
        time.sleep(0.02)
    one.drain_events()
    one._books.store.chores(1)  # full: the oldest, which are the other's, make room
    assert other.stats().tiers[Tier.STORE].evicted == 0
    assert one.stats().tiers[Tier.STORE].evicted > 0
    assert one.drain_events() == []
    assert one.match(ids) == [Tier.STORE] * 5


@pytest.mark.parametrize(
    "other", [{"namespace": "model, adapter 2"}, {"namespace": "salted"}, {"block_bytes": 999}]
)
def test_namespaces_are_apart(kit, make, tmp_path, other):
    store = StoreTier(str(tmp_path), 100 * kit.FILE)
    one = make(host=50 * kit.BLOCK, store=store)
    ids = kit.chain("a", 5)
    one.store(kit.blocks(ids))
    assert one.flush(5)
    stranger = make(host=50 * kit.BLOCK, store=store, **other)
    assert stranger.find(ids) == []
    assert stranger.load(ids, [bytearray(stranger.block_bytes) for _ in ids]) == [None] * 5
    # Even a file put in the other's place by hand is refused, for its header names its namespace.
    for path in (tmp_path / one._namespace.hex()).rglob("*.kv"):
        target = tmp_path / stranger._namespace.hex() / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert stranger.load(ids, [bytearray(stranger.block_bytes) for _ in ids]) == [None] * 5
    assert stranger.stats().tiers[Tier.STORE].corrupt == 5


def test_a_disk_is_bounded_over_all_namespaces(kit, make, tmp_path):
    disk = DiskTier(str(tmp_path), 10 * kit.FILE)
    for name in ("old weights", "new weights"):
        tiers = make(disk=disk, namespace=name)
        for block in kit.blocks(kit.chain(name, 8)):
            assert tiers.store([block]) == 1
            assert tiers.flush(5)
        assert len(list(tmp_path.rglob("*.kv"))) <= 10
        assert tiers.match(kit.chain(name, 8)) == [Tier.DISK] * 8
        tiers.close()
    again = make(disk=disk, namespace="old weights")
    assert again.flush(5)
    # Two of the old ones are left, the last used before the new came: those at the chain's start, which its
    # own process would have kept longest, were written first; without that process only times are known.
    assert again.stats().tiers[Tier.DISK].blocks == 10


def test_a_full_device_is_counted_and_gone_on_from(kit, make, tmp_path, monkeypatch):
    tiers = make(host=50 * kit.BLOCK, disk=DiskTier(str(tmp_path), 100 * kit.FILE))
    assert tiers.flush(5)
    ids = kit.chain("a", 20)
    full = [True]
    real = os.writev

    def writev(fd, parts):
        if full[0]:
            os.write(fd, bytes(parts[0])[:50])
            raise OSError(28, "No space left on device")
        return real(fd, parts)

    monkeypatch.setattr(directory_module.os, "writev", writev)
    assert tiers.store(kit.blocks(ids[:10])) == 10
    assert tiers.flush(5)
    disk = tiers.stats().tiers[Tier.DISK]
    assert (disk.stored, disk.blocks, disk.dropped) == (0, 0, 10)
    assert disk.errors >= 1
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"]
    assert kit.load(tiers, ids[:10]) == [Tier.HOST] * 10
    full[0] = False
    kit.wait_for(lambda: not tiers._books.disk.rest.resting)
    assert tiers.store(kit.blocks(ids)) == 20
    assert tiers.flush(5)
    assert tiers.stats().tiers[Tier.DISK].blocks == 20


def test_a_store_that_hangs_is_late_and_writes_into_nobodys_buffer(kit, make, tmp_path):
    writer = make(host=50 * kit.BLOCK, store=StoreTier(str(tmp_path), 100 * kit.FILE))
    ids = kit.chain("a", 4)
    writer.store(kit.blocks(ids))
    assert writer.flush(5)
    tiers = make(host=50 * kit.BLOCK, store=StoreTier(str(tmp_path), 100 * kit.FILE, timeout_s=0.2))
    assert tiers.flush(5)
    backend = tiers._books.store._backend
    go_on = threading.Event()
    real = backend.read

    def read(content_id, into):
        assert go_on.wait(10)
        return real(content_id, into)

    backend.read = read
    buffers = [bytearray(kit.BLOCK) for _ in ids]
    start_s = time.monotonic()
    assert tiers.load(ids, buffers) == [None] * 4
    assert time.monotonic() - start_s < 5
    go_on.set()
    kit.wait_for(lambda: not tiers._books.store.workers._tasks and tiers.stats().tiers[Tier.STORE].read_s > 0)
    assert buffers == [bytearray(kit.BLOCK)] * 4
    store = tiers.stats().tiers[Tier.STORE]
    assert (store.late, store.hits) == (4, 0)
    assert tiers.find(kit.chain("b", 1)) == []  # resting: not even asked
    kit.wait_for(lambda: not tiers._books.store.rest.resting)
    assert kit.load(tiers, ids) == [Tier.STORE] * 4


def test_a_long_prompt_is_no_failure_of_the_store(kit, make, tmp_path):
    tiers = make(store=StoreTier(str(tmp_path), 100 * kit.FILE))
    ids = kit.chain("long", 3000)
    assert tiers.find(ids) == []
    assert kit.load(tiers, ids) == [None] * 3000
    stats = tiers.stats()
    assert (stats.misses, stats.tiers[Tier.STORE].late, stats.tiers[Tier.STORE].errors) == (3000, 0, 0)


def test_a_store_is_bounded_by_all_who_write(kit, make, tmp_path):
    store = StoreTier(str(tmp_path), 50 * kit.FILE)
    engines = [make(host=100 * kit.BLOCK, store=store) for _ in range(3)]
    for round_ in range(40):
        for k, tiers in enumerate(engines):
            tiers.store(kit.blocks(kit.chain(f"{k} {round_}", 2)))
            assert tiers.flush(5)
        # Every writer may be over by what it writes between two listings.
        assert len(list(tmp_path.rglob("*.kv"))) <= 50 + 3 * 2
    assert sum(t.stats().tiers[Tier.STORE].evicted for t in engines) >= 240 - 56
    last = kit.chain("2 39", 2)
    assert engines[0].find(last) == [Tier.STORE] * 2


def test_what_waits_is_bounded_and_what_has_no_room_is_dropped(kit, make, tmp_path, monkeypatch):
    monkeypatch.setattr("sumibi.tiers.books._STAGING_BYTES", 8 * kit.BLOCK)
    tiers = make(host=8 * kit.BLOCK, disk=DiskTier(str(tmp_path), 100 * kit.FILE))
    assert tiers.flush(5)
    busy = threading.Event()

    def act():
        ids = kit.chain("a", 20)
        for block in kit.blocks(ids):
            tiers.store([block])
        waiting = tiers.stats().tiers[Tier.DISK].queue_blocks
        assert waiting <= 4
        busy.set()

    tiers._down.writers[Tier.DISK].between(act)
    assert busy.is_set()
    assert tiers.flush(5)
    stats = tiers.stats()
    assert stats.tiers[Tier.HOST].blocks <= 8
    assert stats.tiers[Tier.HOST].dropped + stats.tiers[Tier.DISK].dropped >= 12 - 4
    assert kit.load(tiers, kit.chain("a", 8))[0] is not None


def _hold(tiers, tier, act):
    """Run `act` while nothing is written to `tier`."""
    assert tiers.flush(5)
    tiers._down.writers[tier].between(act)
    assert tiers.flush(20)


@pytest.mark.parametrize("kept", [1, 5, 116])
@pytest.mark.parametrize("conversations", [1, 29])
@pytest.mark.parametrize("lower", [Tier.DISK, Tier.STORE])
def test_little_host_memory_does_not_keep_blocks_from_what_lies_below(
    kit, make, tmp_path, kept, conversations, lower
):
    where = {
        Tier.DISK: {"disk": DiskTier(str(tmp_path), 1000 * kit.FILE)},
        Tier.STORE: {"store": StoreTier(str(tmp_path), 1000 * kit.FILE)},
    }
    tiers = make(host=kept * kit.BLOCK, **where[lower])
    chains = [kit.chain(str(c), 116 // conversations) for c in range(conversations)]
    ids = [content_id for chain in chains for content_id in chain]
    _hold(tiers, lower, lambda: [tiers.store(kit.blocks(chain)) for chain in chains])
    stats = tiers.stats()
    assert stats.tiers[lower].blocks == len(ids)
    assert sum(tier.dropped for tier in stats.tiers.values()) == 0
    assert stats.tiers[Tier.HOST].blocks <= kept
    for chain in chains:
        assert None not in kit.load(tiers, chain)
        assert tiers.stats().tiers[Tier.HOST].blocks <= kept
    # What was told of host memory is what is there.
    told = set()
    for event in tiers.drain_events():
        if event.tier is Tier.HOST:
            (told.add if event.stored else told.discard)(event.content_id)
    assert told == {i for i in ids if tiers.match([i]) == [Tier.HOST]}


def test_memory_for_what_waits_is_bounded_too_and_given_back(kit, make, tmp_path, monkeypatch):
    monkeypatch.setattr("sumibi.tiers.books._STAGING_BYTES", 20 * kit.BLOCK)
    tiers = make(host=2 * kit.BLOCK, disk=DiskTier(str(tmp_path), 1000 * kit.FILE))
    taken = []
    ids = kit.chain("a", 50)
    _hold(tiers, Tier.DISK, lambda: taken.append(tiers.store(kit.blocks(ids))))
    assert 18 <= taken[0] <= 20
    stats = tiers.stats()
    assert stats.tiers[Tier.HOST].dropped == 50 - taken[0]
    assert stats.tiers[Tier.HOST].blocks <= 2
    _hold(tiers, Tier.DISK, lambda: taken.append(tiers.store(kit.blocks(kit.chain("b", 19)))))
    assert taken[1] == 19
    assert None not in kit.load(tiers, kit.chain("b", 19))


def test_a_block_that_is_computed_again_is_not_the_next_to_go_from_disk(kit, make, tmp_path):
    disk = DiskTier(str(tmp_path), 4 * kit.FILE)
    first = make(disk=disk)
    old, other = kit.chain("old", 1), kit.chain("other", 3)
    for ids in (old, other):
        first.store(kit.blocks(ids))
        assert first.flush(5)
    first.close()
    tiers = make(host=20 * kit.BLOCK, disk=disk)
    assert tiers.flush(5)
    tiers.store(kit.blocks(old))  # it lies on disk already: a use, no write
    tiers.store(kit.blocks(kit.chain("new", 2)))
    assert tiers.flush(5)
    tiers.close()
    again = make(disk=disk)
    assert again.flush(5)
    assert again.match(old) == [Tier.DISK]
    assert len(again.match(other)) == 1


def resident_bytes(memory):
    """Of an array, what the system has found memory for (`mincore`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    length = memory.ctypes.data + memory.nbytes - first
    pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
    assert libc.mincore(first, length, pages) == 0, os.strerror(ctypes.get_errno())
    return sum(byte & 1 for byte in pages.raw) * mmap.PAGESIZE


def test_host_memory_is_found_before_it_is_needed_and_may_be_used_meanwhile(kit, make):
    block = 1 << 20
    tiers = make(host=128 * block, block_bytes=block)
    ids = kit.chain("a", 20)
    assert tiers.store([(i, None, kit.payload(i, block)) for i in ids]) == 20
    kit.wait_for(lambda: not any(t.name == POPULATING and t.is_alive() for t in threading.enumerate()))
    # All of it, though 20 of 128 blocks were written.
    assert resident_bytes(tiers._books.host._memory) > 127 * block
    buffer = bytearray(block)
    for content_id in ids:
        assert tiers.load([content_id], [buffer]) == [Tier.HOST]
        assert buffer == kit.payload(content_id, block)


def test_a_disk_that_hangs_is_a_miss_for_all_who_ask_until_it_works_again(kit, make, tmp_path, monkeypatch):
    """More callers than reading threads, all reads hang: everybody goes on within the bound."""
    monkeypatch.setattr(up, "_STUCK_S", 0.3)
    monkeypatch.setattr(rest, "_FIRST_S", 2.0)
    disk = DiskTier(str(tmp_path), 100 * kit.FILE)
    first = make(disk=disk)
    ids = kit.chain("a", 8)
    first.store(kit.blocks(ids))
    first.close()
    tiers = make(host=20 * kit.BLOCK, disk=disk)
    assert tiers.flush(5)
    go_on, asked = threading.Event(), threading.Barrier(4)
    real = os.preadv

    def preadv(fd, parts, offset):
        assert go_on.wait(10)
        return real(fd, parts, offset)

    monkeypatch.setattr(direct.os, "preadv", preadv)
    buffers = [[bytearray(kit.BLOCK) for _ in ids] for _ in range(4)]
    came = [None] * 4

    def ask(k):
        asked.wait(5)
        came[k] = tiers.load(ids, buffers[k])

    callers = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
    start_s = time.monotonic()
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(5)
    assert time.monotonic() - start_s < 3
    assert came == [[None] * 8] * 4
    assert tiers.match(ids) == []  # nobody is sent to a disk that hangs
    assert kit.load(tiers, ids) == [None] * 8  # at once
    stats = tiers.stats()
    assert (stats.tiers[Tier.DISK].hits, stats.misses) == (0, 40)
    assert 8 <= stats.tiers[Tier.DISK].late <= 32  # who came once it was known to hang did not ask
    monkeypatch.setattr(up, "_STUCK_S", 5.0)
    go_on.set()
    kit.wait_for(lambda: tiers.match(ids) == [Tier.DISK] * 8, timeout_s=20)  # after a rest of 2 s or more
    assert buffers == [[bytearray(kit.BLOCK)] * 8] * 4  # what came late touched none of them
    assert kit.load(tiers, ids) == [Tier.DISK] * 8


def test_a_file_system_without_direct_reads_is_read_all_the_same_and_said_to_be(
    kit, make, tmp_path, monkeypatch, caplog
):
    disk = DiskTier(str(tmp_path), 100 * kit.FILE)
    first = make(disk=disk)
    ids = kit.chain("a", 5)
    first.store(kit.blocks(ids))
    first.close()
    tiers = make(disk=disk)
    assert tiers.flush(5)
    real = os.open

    def refusing(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(direct.os, "open", refusing)
    assert kit.load(tiers, ids) == [Tier.DISK] * 5
    assert [r.message for r in caplog.records if "page cache" in r.message] == [
        f"kv tier disk {tmp_path}: no direct reads here (Invalid argument): blocks are read through the page"
        " cache, which is slower"
    ]


@pytest.mark.parametrize("size", [4096 - 128, 4096, 8192 - 128 + 1, 1000])
@pytest.mark.parametrize("change", [-1, 0, 1, 5000])
def test_sizes_around_pages(kit, make, tmp_path, size, change):
    """Direct reads end at pages: shorter and longer files than a block's must be seen there too."""
    disk = DiskTier(str(tmp_path), 100_000)
    tiers = make(disk=disk, block_bytes=size)
    block = kit.payload(b"x", size)
    tiers.store([(b"x", None, block)])
    assert tiers.flush(5)
    (path,) = tmp_path.rglob("*.kv")
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) + change] + b"\0" * change)
    buffer = bytearray(size)
    assert tiers.load([b"x"], [buffer]) == [None if change else Tier.DISK]
    assert change or buffer == block
    assert tiers.stats().tiers[Tier.DISK].corrupt == (change != 0)
