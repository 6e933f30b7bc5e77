"""Blocks go down and come back, tier by tier and through all of them."""

import hashlib
import time

import pytest

from sumibi.core.errors import ConfigError
from sumibi.tiers import BlockTiers, DiskTier, StoreTier, Tier, TiersConfig

BLOCK = 1000
FILE = BLOCK + 128


def payload(content_id, size=BLOCK):
    """A block's right bytes, from its id alone."""
    return hashlib.shake_128(content_id).digest(size)


def chain(name, count):
    """`count` ids of one conversation."""
    return [hashlib.blake2b(f"{name} {i}".encode(), digest_size=16).digest() for i in range(count)]


def blocks(ids):
    return [(i, ids[k - 1] if k else None, payload(i)) for k, i in enumerate(ids)]


def load(tiers, ids):
    """Where each came from; whatever came is right."""
    buffers = [bytearray(BLOCK) for _ in ids]
    places = tiers.load(ids, buffers)
    for content_id, place, buffer in zip(ids, places, buffers, strict=True):
        assert place is None or buffer == payload(content_id)
    return places


def wait_for(true, timeout_s=5):
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.fixture
def make():
    """BlockTiers that are closed at the end."""
    made = []

    def build(host=0, disk=None, store=None, **more):
        config = TiersConfig(host, disk, store)
        made.append(BlockTiers(config, block_bytes=BLOCK, **({"namespace": "model"} | more)))
        return made[-1]

    yield build
    for tiers in made:
        tiers.close()


def test_host(make):
    tiers = make(host=10 * BLOCK)
    ids = chain("a", 3)
    assert tiers.match(ids) == []
    assert tiers.store(blocks(ids)) == 3
    assert tiers.match([*ids, b"other"]) == [Tier.HOST] * 3
    assert tiers.match([b"other", *ids]) == []
    assert load(tiers, [ids[2], b"other", ids[0]]) == [Tier.HOST, None, Tier.HOST]
    stats = tiers.stats()
    host = stats.tiers[Tier.HOST]
    assert (host.blocks, host.bytes, host.stored, host.hits, stats.misses) == (3, 3 * BLOCK, 3, 2, 1)


@pytest.mark.parametrize("host", [0, 2 * BLOCK])
def test_disk_survives_a_restart(make, tmp_path, host):
    disk = DiskTier(str(tmp_path), 100 * FILE)
    tiers = make(host=host, disk=disk)
    ids = chain("a", 9)
    for block in blocks(ids):
        assert tiers.store([block]) == 1
        assert tiers.flush(5)
    tiers.close()
    again = make(disk=disk)
    assert again.flush(5)
    assert again.match(ids) == [Tier.DISK] * 9
    assert load(again, ids) == [Tier.DISK] * 9
    events = again.drain_events()
    assert {(e.stored, e.content_id, e.parent) for e in events} == {
        (True, i, ids[k - 1] if k else None) for k, i in enumerate(ids)
    }
    assert {e.medium for e in events} == {"STORAGE"}


def test_what_came_from_disk_is_kept_in_host_memory(make, tmp_path):
    disk = DiskTier(str(tmp_path), 100 * FILE)
    first = make(disk=disk)
    ids = chain("a", 4)
    assert first.store(blocks(ids)) == 4
    first.close()
    tiers = make(host=10 * BLOCK, disk=disk)
    assert tiers.flush(5)
    assert load(tiers, ids) == [Tier.DISK] * 4
    assert tiers.match(ids) == [Tier.HOST] * 4
    assert load(tiers, ids) == [Tier.HOST] * 4


def test_prefetch_brings_up(make, tmp_path):
    disk = DiskTier(str(tmp_path), 100 * FILE)
    first = make(disk=disk)
    ids = chain("a", 20)
    assert first.store(blocks(ids)) == 20
    first.close()
    tiers = make(host=30 * BLOCK, disk=disk)
    assert tiers.flush(5)
    tiers.prefetch(ids)
    wait_for(lambda: tiers.match(ids[-1:]) == [Tier.HOST])
    assert tiers.match(ids) == [Tier.HOST] * 20


def test_a_shared_directory_serves_another_engine(make, tmp_path):
    store = StoreTier(str(tmp_path), 100 * FILE)
    one = make(host=100 * BLOCK, store=store)
    ids = chain("a", 40)
    assert one.store(blocks(ids)) == 40
    assert one.flush(5)
    other = make(host=50 * BLOCK, store=store)
    assert other.match(ids) == []
    for missing in (0, 1, 7, 40):
        asked = ids[: 40 - missing] + chain("b", missing)
        assert other.find(asked) == [Tier.STORE] * (40 - missing)
    assert load(other, ids) == [Tier.STORE] * 40
    assert load(other, ids) == [Tier.HOST] * 40


def test_two_engines_do_not_share_a_disk_tier(make, tmp_path):
    disk = DiskTier(str(tmp_path), 100 * FILE)
    make(disk=disk)
    with pytest.raises(ConfigError, match=r"in use.*store\.url"):
        make(disk=disk)


def test_clear_removes_it_everywhere(make, tmp_path):
    tiers = make(
        host=10 * BLOCK,
        disk=DiskTier(str(tmp_path / "d"), 100 * FILE),
        store=StoreTier(str(tmp_path / "s"), 100 * FILE),
    )
    ids = chain("a", 5)
    tiers.store(blocks(ids))
    assert tiers.flush(5)
    tiers.clear()
    assert tiers.find(ids) == []
    assert load(tiers, ids) == [None] * 5
    assert not list(tmp_path.rglob("*.kv"))
    held = {}
    for event in tiers.drain_events():
        key = (event.content_id, event.tier)
        held[key] = held.get(key, 0) + (1 if event.stored else -1)
    assert len(held) == 15
    assert set(held.values()) == {0}
    assert tiers.store(blocks(ids)) == 5
    assert load(tiers, ids) == [Tier.HOST] * 5
