"""What the tests of tiers share: blocks whose right bytes follow from their ids, and tiers to put them in."""

import hashlib
import time
from types import SimpleNamespace

import pytest

from sumibi.tiers import BlockTiers, TiersConfig

BLOCK = 1000


def payload(content_id, size=BLOCK):
    """A block's right bytes, from its id alone."""
    return hashlib.shake_128(content_id).digest(size)


def chain(name, count):
    """`count` ids of one conversation."""
    return [hashlib.blake2b(f"{name} {i}".encode(), digest_size=16).digest() for i in range(count)]


def blocks(ids):
    """As `store` takes them."""
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
def kit():
    return SimpleNamespace(
        BLOCK=BLOCK,
        FILE=BLOCK + 128,
        payload=payload,
        chain=chain,
        blocks=blocks,
        load=load,
        wait_for=wait_for,
    )


@pytest.fixture
def make():
    """BlockTiers that are closed at the end."""
    made = []

    def build(host=0, disk=None, store=None, **more):
        config = TiersConfig(host, disk, store)
        made.append(BlockTiers(config, **({"block_bytes": BLOCK, "namespace": "model"} | more)))
        return made[-1]

    yield build
    for tiers in made:
        tiers.close()
