"""The segment cache against an LRU that is kept block by block."""

import random
from collections import OrderedDict

import pytest

from sumibi.core.prefixcache import PrefixCache


class BlockLRU:
    """The plain way: touch the blocks of a prompt from last to first, keep the most recent."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict[int, None] = OrderedDict()

    def touch(self, keys: list[int]) -> int:
        matched = 0
        while matched < len(keys) and keys[matched] in self.order:
            matched += 1
        for key in reversed(keys):
            self.order[key] = None
            self.order.move_to_end(key)
        while len(self.order) > self.capacity:
            self.order.popitem(last=False)
        return matched


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that grow, fork and begin anew; the key of a block names its whole chain."""
    names: dict[tuple[int, ...], int] = {}
    chains: list[list[int]] = [[]]
    made = []
    for _ in range(count):
        base = rng.choice(chains)
        base = base[: rng.randint(0, len(base))] if rng.random() < 0.5 else base
        chain = base + [rng.randint(0, 3) for _ in range(rng.randint(0, 12))]
        chains.append(chain)
        chains = chains[-20:]
        made.append([names.setdefault(tuple(chain[: i + 1]), len(names)) for i in range(len(chain))])
    return made


def resident(cache: PrefixCache, universe: list[list[int]]) -> set[int]:
    found: set[int] = set()
    for keys in universe:
        found.update(keys[: cache.match(keys)])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_equals_block_lru(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([1, 5, 17, 40, 200])
    fast, slow = PrefixCache(capacity), BlockLRU(capacity)
    universe = prompts(rng, 300)
    for i, keys in enumerate(universe):
        assert fast.touch(keys) == slow.touch(keys)
        assert fast.blocks == len(slow.order)
        if i % 20 == 0:
            assert resident(fast, universe) == set(slow.order)


@pytest.mark.parametrize("seed", range(10))
def test_in_use_stays_and_what_is_removed_is_told(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(60)
    universe = prompts(rng, 300)
    mirror: set[int] = set()
    running: list[tuple[list[int], object, int]] = []
    for keys in universe:
        if len(running) > 3 or (running and rng.random() < 0.3):
            done = running.pop(rng.randrange(len(running)))
            cache.unpin(done[1])  # type: ignore[arg-type]
            cache.hold(-done[2])
        matched = cache.match(keys)
        last = cache.pin(keys, matched)
        held = rng.randint(0, 2)
        if not cache.make_room(len(keys) - matched + held):
            cache.unpin(last)
        else:
            for end in range(matched, len(keys) + 1, 5):
                last = cache.extend(last, keys, end)
            last = cache.extend(last, keys, len(keys))
            cache.hold(held)
            mirror.update(keys)
            running.append((keys, last, held))
        for removed in cache.removed:
            mirror.difference_update(removed)
        cache.removed.clear()
        assert resident(cache, universe) == mirror
        assert cache.blocks == len(mirror)
        assert cache.blocks + cache.held <= cache.capacity
        in_use = {key for each, _, _ in running for key in each}
        assert in_use <= mirror
        assert cache.pinned == len(in_use)
    for _, last, held in running:
        cache.unpin(last)  # type: ignore[arg-type]
        cache.hold(-held)
    assert cache.pinned == 0
    assert cache.available == 60
    cache.evict(60)
    assert cache.blocks == 0


def test_oldest_use_goes_first_and_from_the_end() -> None:
    cache = PrefixCache(6)
    cache.touch([1, 2, 3])
    cache.touch([10, 11, 12])
    assert cache.touch([1, 2, 3, 4]) == 3
    assert [list(keys) for keys in cache.removed] == [[12]]
    assert cache.match([10, 11, 12]) == 2
