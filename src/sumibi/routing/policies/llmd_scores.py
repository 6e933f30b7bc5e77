"""llm-d's scorers: each gives every candidate 0..1, the sum weighted is maximised.

Source: llm-d-router, plugins/scheduling/scorer (Aug 2026). Queue length and KV use are what the last scrape
said, however old; nothing scraped yet counts as idle.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from sumibi.routing.endpoint import Endpoint

LRU_ENDPOINTS: Final = 1024
"""Endpoints whose turn `NoHitLru` remembers."""


def queue(endpoints: Sequence[Endpoint]) -> list[float]:
    """(longest queue - queue) / (longest - shortest); 1 for all if they are equal."""
    waiting = [(e.signals.waiting or 0) if e.signals else 0 for e in endpoints]
    longest, shortest = max(waiting), min(waiting)
    if longest == shortest:
        return [1.0] * len(waiting)
    return [(longest - q) / (longest - shortest) for q in waiting]


def kv_free(endpoints: Sequence[Endpoint]) -> list[float]:
    """1 - KV cache use."""
    return [1.0 - ((e.signals.kv_usage or 0.0) if e.signals else 0.0) for e in endpoints]


def prefix(matched: Sequence[float], blocks: int) -> list[float]:
    """Matched blocks / blocks of the prompt; 0 for a prompt without a block."""
    return [m / blocks if blocks else 0.0 for m in matched]


class NoHitLru:
    """Spreads cold prompts, those that no candidate has any of: least recently used first."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, None] = OrderedDict()
        self._cold = False

    def scores(self, names: Sequence[str], matched: Sequence[float]) -> list[float]:
        """0.5 for all if one has a match. Else by rank: never used ones in order, then the oldest use first;
        1 - rank / (candidates - 1), at least 0.
        """
        self._cold = not any(matched)
        if not self._cold:
            return [0.5] * len(names)
        if len(names) == 1:
            return [1.0]
        position = {name: i for i, name in enumerate(self._used)}
        fresh = [name for name in names if name not in position]
        rank = {name: i for i, name in enumerate(fresh)}
        rank |= {name: len(fresh) + position[name] for name in names if name in position}
        return [max(0.0, 1.0 - rank[name] / (len(names) - 1)) for name in names]

    def placed(self, name: str) -> None:
        """The prompt scored last goes there. Only cold ones count as a use."""
        if self._cold:
            self._used[name] = None
            self._used.move_to_end(name)
            if len(self._used) > LRU_ENDPOINTS:
                self._used.popitem(last=False)
