"""What an endpoint's cache would give up next, and what that is worth.

The engine evicts by age, so its order can be imitated from the requests we sent: each prompt is as old as
its last use. The imitation is kept next to the index, which knows (from KV events) what is really there and
corrects it where an engine has evicted what we thought it had. What is worth something is what comes back:
a victim counts the seconds of its prefill times the chance that it is wanted again (`returns`).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import islice
from operator import add
from typing import Final

from sumibi.core.latency import LatencyModel
from sumibi.core.prefixcache import PrefixCache, Segment
from sumibi.routing.returns import BUSY_S, ReturnTimes

FRESH_S: Final = 1.0
"""How long a computed order of victims is used: chances hardly change within it."""
SEGMENTS: Final = 256
"""Victims that are looked at singly; what is younger has the last one's chance of return at least."""
RARE: Final = 0.02
"""Who returns with less than this chance is not waited for."""


class Recency:
    """One endpoint's blocks in the order of their last use, as far as our requests tell."""

    def __init__(self, limit_blocks: int) -> None:
        self._cache = PrefixCache(limit_blocks)
        self.computed_t = float("-inf")
        """As of when `loss_s`, `live_blocks` and `delay_s` are."""
        self._blocks: list[int] = []
        """Blocks up to the end of the first, second, ... victim."""
        self._losses: list[float] = []
        """What losing these costs in all, s by the endpoint's start coefficients."""
        self._ends: list[tuple[int, float, float]] = []
        """Of each: tokens from the root to its end, and its chance of return times b and q."""
        self._chances: list[float] = []
        """Each one's chance of return."""
        self._block_tokens = 0
        self._live_blocks = 0.0
        self._delays_s = [0.0] * len(BUSY_S)

    def limit(self, blocks: int) -> None:
        """The endpoint has room for so many blocks."""
        self._cache.capacity = blocks

    def begin(self, keys: Sequence[int], t: float) -> Segment | None:
        """A prompt is computed there from `t` on; the answer is for `end`."""
        cache = self._cache
        cache.touch(keys, t)
        cache.removed.clear()
        return cache.pin(keys, cache.match(keys))

    def end(self, prompt: Segment | None, t: float) -> None:
        """That request is over."""
        self._cache.unpin(prompt, t)

    def reach(self, keys: Sequence[int]) -> int:
        """Leading blocks that will still be there when all that was sent there before has been stored."""
        return self._cache.match(keys)

    def moved_away(self, keys: Sequence[int]) -> None:
        """A conversation that lived here goes on elsewhere: its copy here will not be wanted again."""
        matched, segment = self._cache.find(keys)
        if segment is not None and matched == segment.end and not segment.children:
            segment.used_t = float("-inf")
            self.computed_t = float("-inf")

    def clear(self) -> None:
        """Everything is lost."""
        self._cache.clear()
        self.computed_t = float("-inf")

    def refresh(
        self,
        t: float,
        *,
        latency: LatencyModel,
        block_tokens: int,
        returns: ReturnTimes,
        resident: Callable[[int], bool],
    ) -> bool:
        """Have `loss_s` and `live_blocks` as of `t`, or of shortly before. False if they were.

        `latency` prices prefills; `resident` says of a key whether the endpoint has that block.
        """
        if t - self.computed_t <= FRESH_S:
            return False
        self._compute(t, latency, block_tokens, returns, resident)
        return True

    @property
    def pinned_blocks(self) -> int:
        """Blocks in use by requests that were sent there and are not over."""
        return self._cache.pinned

    @property
    def live_blocks(self) -> float:
        """Blocks in use, and idle ones times the chance that they are wanted again."""
        return self._live_blocks

    def delay_s(self, busy_s: float) -> float:
        """How long those who live here are expected to wait in all, if the endpoint is busy for `busy_s`
        from now on: each if it comes back meanwhile, for what is left then.
        """
        delays = self._delays_s
        if busy_s <= BUSY_S[0]:
            part = busy_s / BUSY_S[0]
            return delays[0] * part * part
        if busy_s >= BUSY_S[-1]:
            return delays[-1] * busy_s / BUSY_S[-1]
        i = bisect_left(BUSY_S, busy_s)
        low, high = BUSY_S[i - 1], BUSY_S[i]
        return delays[i - 1] + (delays[i] - delays[i - 1]) * (busy_s - low) / (high - low)

    def loss_s(self, blocks: int) -> float:
        """What evicting the oldest `blocks` blocks costs later, in seconds by the start's latency model."""
        ends, losses = self._blocks, self._losses
        i = bisect_left(ends, blocks)
        if i == len(ends):
            return losses[-1] * blocks / ends[-1] if losses else 0.0
        before, lost = (ends[i - 1], losses[i - 1]) if i else (0, 0.0)
        # The last one loses its end first, which took the most to compute.
        end_tokens, token_s, pair_s = self._ends[i]
        tokens = (blocks - before) * self._block_tokens
        return lost + tokens * (token_s + pair_s * (end_tokens - tokens / 2))

    def wanted_blocks(self, first: int, end: int) -> float:
        """How many of the oldest blocks from `first` to `end` are expected to be wanted again."""
        ends, chances = self._blocks, self._chances
        wanted, at = 0.0, first
        for i in range(bisect_left(ends, first + 1), len(ends)):
            if at >= end:
                return wanted
            upto = min(end, ends[i])
            wanted += (upto - at) * chances[i]
            at = upto
        # Younger than those looked at singly.
        return wanted + max(0, end - at) * (chances[-1] if chances else 0.0)

    def _compute(
        self,
        t: float,
        latency: LatencyModel,
        block_tokens: int,
        returns: ReturnTimes,
        resident: Callable[[int], bool],
    ) -> None:
        self.computed_t = t
        self._block_tokens = block_tokens
        self._blocks, self._losses, self._ends, self._chances = [], [], [], []
        self._drop_evicted(resident)
        cache = self._cache
        total, loss_s, live, chance = 0, 0.0, float(cache.pinned), 0.0
        delays = [0.0] * len(BUSY_S)
        for segment in islice(cache.oldest(), SEGMENTS):
            blocks = segment.end - segment.start
            middle = (segment.start + segment.end) / 2 * block_tokens
            work_s = blocks * block_tokens * (latency.b_s + latency.q_s * middle)
            chance, waits_s = returns.forecast(segment.uses, t - segment.used_t)
            total += blocks
            loss_s += work_s * chance
            live += blocks * chance
            if chance > RARE and not segment.children:
                delays = list(map(add, delays, waits_s))
            self._blocks.append(total)
            self._losses.append(loss_s)
            self._chances.append(chance)
            end_tokens = segment.end * block_tokens
            self._ends.append((end_tokens, chance * latency.b_s, chance * latency.q_s))
        self._delays_s = delays
        self._live_blocks = live + chance * (cache.blocks - cache.pinned - total)

    def _drop_evicted(self, resident: Callable[[int], bool]) -> None:
        """Give up what is the oldest here and no longer there."""
        cache = self._cache
        while (segment := next(cache.oldest(), None)) is not None:
            low, high = segment.start, segment.end
            while low < high:
                middle = (low + high + 1) >> 1
                if resident(segment.keys[middle - 1]):
                    low = middle
                else:
                    high = middle - 1
            if low == segment.end:
                break
            cache.evict(segment.end - low)
            if low > segment.start:
                break
        cache.removed.clear()
