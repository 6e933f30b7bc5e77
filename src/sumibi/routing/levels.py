"""How far a prompt is known where: what the index says of it, asked by endpoint.

`BlockIndex.match` answers with *levels*: (blocks, holders whose run ends exactly there), the shortest first.
Few endpoints of a large fleet are ever asked about, so nothing is made of the levels for all of them.
"""

from collections.abc import Mapping, Sequence

Levels = Sequence[tuple[int, int]]


def blocks_of(levels: Levels, own: int) -> int:
    """Leading blocks of the prompt at the endpoint with these holders (a bit set)."""
    for blocks, here in reversed(levels):
        if here & own:
            return blocks
    return 0


def deepest(levels: Levels, places: Mapping[int, int], few: int) -> tuple[dict[int, int], int]:
    """Those that have most of the prompt: (place -> blocks, the most that any other one has).

    `places`: holder -> place. A level is in as a whole or not at all; about `few` places at most.
    """
    found: dict[int, int] = {}
    left = few
    for blocks, here in reversed(levels):
        left -= here.bit_count()
        if left < 0:
            return found, blocks
        while here:
            holder = here.bit_length() - 1
            found.setdefault(places[holder], blocks)
            here ^= 1 << holder
    return found, 0


def beyond(levels: Levels, places: Mapping[int, int], blocks: int) -> dict[int, int]:
    """Place -> blocks there, of those that have more than so many."""
    found: dict[int, int] = {}
    for there, here in reversed(levels):
        if there <= blocks:
            break
        while here:
            holder = here.bit_length() - 1
            found.setdefault(places[holder], there)
            here ^= 1 << holder
    return found
