"""How likely a prefix is wanted again, by how long it has lain idle: learnt from those that came back.

An agent in a tool call is back in seconds or minutes, or it is done; a one-shot prompt never comes back; a
system prompt always does. What tells them apart from the keys alone is how often a stretch of prompt was
used before and how long ago the last time was. So for three classes (used once, a few times, often) the
idle times after which prefixes were wanted again are counted in a histogram, and

    P(wanted again | idle for x) = returns after more than x / (uses - returns after at most x)

which is the survival estimate with those that never came back counted as still idle. The same counts say
how soon: whoever comes back while its endpoint is busy with a long prefill has to wait for the rest of it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import log2
from typing import Final

from sumibi.core.prefixcache import PrefixCache

CLASSES: Final = 3
BINS_PER_DOUBLING: Final = 6
BINS = 18 * BINS_PER_DOUBLING
LONGEST_S = 2.0**18 - 2
"""Three days; whatever is longer counts as this."""
PRIOR_USES: Final = 20.0
"""Until traffic says otherwise prefixes are taken for agents': this many uses are made up for each class."""
PRIOR_RETURNED = (0.5, 0.9, 0.95)
PRIOR_IDLE_S = (1.0, 300.0)
"""Those came back evenly (in the logarithm) between these idle times."""
BLOCKS_AN_END: Final = 10
"""For so many blocks of history the end of one prompt is remembered."""
LONG_ANSWER_TOKENS: Final = 4096
"""The next prompt of a conversation has its last one's end so many tokens at most before what is known."""
FORGET_USES: Final = 20_000.0
"""Beyond so many uses of a class the older ones begin to fade."""
REFRESH_USES: Final = 128
"""Uses after which the probabilities are computed anew."""
BUSY_S = tuple(0.5 * 2.0**i for i in range(9))
"""For how long an endpoint may be busy: `delays` are for these, 0.5 s to 128 s."""


class ReturnTimes:
    """Learns from the prompts of one model; `history_blocks` bounds what it remembers of them."""

    def __init__(self, history_blocks: int) -> None:
        self._history = PrefixCache(history_blocks)
        low, high = (_bin(idle_s) for idle_s in PRIOR_IDLE_S)
        prior = PRIOR_USES / (high - low + 1)
        self._ends: OrderedDict[int, None] = OrderedDict()
        """Last keys of the latest prompts."""
        self._begins: OrderedDict[int, None] = OrderedDict()
        """And first ones."""
        self._most_ends = history_blocks // BLOCKS_AN_END
        self._uses = [PRIOR_USES] * CLASSES
        self._returns = [
            [share * prior if low <= i <= high else 0.0 for i in range(BINS)] for share in PRIOR_RETURNED
        ]
        self._since = 0
        self._forecasts: list[list[tuple[float, tuple[float, ...]]]] = []
        self._returned: list[list[float]] = []
        """By class: part of the uses that was wanted again after at most the middle of each bin."""
        self._compute()

    def known_blocks(self, keys: Sequence[int]) -> int:
        """Leading blocks that a prompt has in common with earlier ones."""
        return self._history.match(keys)

    def forks(self, keys: Sequence[int], known_blocks: int, block_tokens: int) -> bool:
        """Whether a prompt, whose first `known_blocks` blocks are cached somewhere, begins like earlier ones
        without being the next turn of any: a new conversation with a shared beginning.
        """
        if not known_blocks or keys[0] not in self._begins:
            return False
        oldest = max(0, known_blocks - LONG_ANSWER_TOKENS // block_tokens)
        return self._ends.keys().isdisjoint(keys[oldest:known_blocks])

    def used(self, keys: Sequence[int], t: float) -> None:
        """A request with this prompt was placed at `t`."""
        history = self._history
        matched, segment = history.find(keys)
        if matched and segment is not None:
            self._returns[_class(segment.uses)][_bin(t - segment.used_t)] += 1.0
        history.touch(keys, t)
        history.removed.clear()
        _, segment = history.find(keys)
        if segment is not None:
            c = _class(segment.uses)
            self._uses[c] += 1.0
            if self._uses[c] > FORGET_USES:
                self._uses[c] /= 2
                self._returns[c] = [n / 2 for n in self._returns[c]]
        if keys:
            for key, known in ((keys[0], self._begins), (keys[-1], self._ends)):
                known[key] = None
                known.move_to_end(key)
                if len(known) > self._most_ends:
                    known.popitem(last=False)
        self._since += 1
        if self._since >= REFRESH_USES:
            self._since = 0
            self._compute()

    def ended(self, keys: Sequence[int], t: float) -> None:
        """That request is over: from now on its prompt is idle."""
        _, segment = self._history.find(keys)
        if segment is not None:
            segment.used_t = t

    def uses(self, keys: Sequence[int]) -> int:
        """How often the end of this prompt, as far as it is remembered, was used."""
        _, segment = self._history.find(keys)
        return segment.uses if segment is not None else 0

    def back_within(self, uses: int, idle_s: float, within_s: float) -> float:
        """Chance 0..1 that a stretch used so often before, and idle for so long, is wanted again within the
        next `within_s` seconds.
        """
        returned = self._returned[_class(uses)]
        before = _at(returned, idle_s)
        if before >= 1.0:
            return 0.0
        return max(0.0, _at(returned, idle_s + within_s) - before) / (1.0 - before)

    def forecast(self, uses: int, idle_s: float) -> tuple[float, tuple[float, ...]]:
        """(Chance 0..1 that a stretch used so often before, and idle for so long, is wanted again; what it is
        then expected to wait if its endpoint is busy from now on for each of `BUSY_S` seconds: it waits if it
        returns meanwhile, for what is left).
        """
        return self._forecasts[_class(uses)][_bin(idle_s)]

    def chance(self, uses: int, idle_s: float) -> float:
        """That a stretch used so often before, and idle for so long, is wanted again. 0..1."""
        return self.forecast(uses, idle_s)[0]

    def delays_s(self, uses: int, idle_s: float) -> tuple[float, ...]:
        """What such a stretch is expected to wait, see `forecast`."""
        return self.forecast(uses, idle_s)[1]

    def _compute(self) -> None:
        self._forecasts, self._returned = [], []
        for c in range(CLASSES):
            # Part of the uses that were followed by a return after at most the middle of each bin.
            returned, done, uses = [], 0.0, self._uses[c]
            for n in self._returns[c]:
                returned.append((done + n / 2) / uses)
                done += n
            ever = min(1.0, done / uses)
            chances = [max(0.0, (ever - r) / (1 - r)) if r < ever else 0.0 for r in returned]
            self._forecasts.append([(chances[i], _waits(returned, i)) for i in range(BINS)])
            self._returned.append(returned)


def _at(returned: list[float], idle_s: float) -> float:
    """Part that was wanted again after at most `idle_s`: between the middles of two bins, on a line."""
    place = BINS_PER_DOUBLING * log2(1.0 + min(max(0.0, idle_s), LONGEST_S)) - 0.5
    if place <= 0:
        return returned[0] * max(0.0, place + 0.5) * 2
    low = int(place)
    high = min(low + 1, BINS - 1)
    return returned[low] + (returned[high] - returned[low]) * (place - low)


def _waits(returned: list[float], i: int) -> tuple[float, ...]:
    """Expected waits for each of `BUSY_S` from bin `i` on: the integral of P(returned by x) over x."""
    left = 1.0 - returned[i]
    if left <= 0 or returned[i] >= returned[-1]:
        return (0.0,) * len(BUSY_S)
    idle_s = 2.0 ** ((i + 0.5) / BINS_PER_DOUBLING) - 1.0
    waits, wait_s, before_s, before = [], 0.0, 0.0, 0.0
    for busy_s in BUSY_S:
        chance = (returned[_bin(idle_s + busy_s)] - returned[i]) / left
        wait_s += (busy_s - before_s) * (before + chance) / 2
        before_s, before = busy_s, chance
        waits.append(wait_s)
    return tuple(waits)


def _class(uses: int) -> int:
    return 0 if uses <= 1 else 1 if uses <= 3 else 2


def _bin(idle_s: float) -> int:
    return int(BINS_PER_DOUBLING * log2(1.0 + min(max(0.0, idle_s), LONGEST_S)))
