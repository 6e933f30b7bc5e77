"""Which holder has which block: a trie of routing keys with two sets of holders at each block.

A *holder* is a place for blocks: one endpoint's device memory, its host memory, or what we believe an
endpoint has because we sent it there. Holders are small numbers, sets of them Python integers used as bit
sets. Each block has the set of holders that *hold* it, and the set whose *run* reaches it: they hold it and
every block before it, up to the empty prefix. Only a run is worth anything to a prompt.

Runs shrink along a chain, so the longest run of every holder over a prompt's keys is found by bisection on
the keys, all holders at once: two look-ups when everybody agrees, some eleven for each holder that ends
elsewhere in 1,500 blocks, and never more than one for each key. Because runs are kept up to date when
blocks come and go (a block stored or removed in the middle of a chain changes those behind it), this equals
a scan from the root even when caches have holes.

Blocks live in parallel arrays at small slot numbers rather than in objects: less memory, and nothing for
the garbage collector to walk. A block that nobody holds stays only as long as others hang from it.

The index knows nothing of engines, events or endpoints' names.
"""

from array import array
from collections.abc import Iterable, Sequence

from sumibi.core.errors import SumibiError

_NONE = -1
"""No slot: as a parent, the empty prefix."""
_UNKNOWN = -2
"""A parent that was never named: a run cannot reach this block."""

BLOCK_BYTES = 150
"""Estimate for one block: its dictionary entry, key and slot number 110, arrays 40; most sets are shared."""


class BlockIndex:
    """Blocks of all holders. Every change and question is by holder number and routing keys."""

    def __init__(self, limit_blocks: int) -> None:
        self._limit = limit_blocks
        self._slots: dict[int, int] = {}
        self._key = array("Q")
        self._parent = array("i")
        self._child = array("i")
        self._next = array("i")
        self._previous = array("i")
        self._held: list[int] = []
        self._run: list[int] = []
        self._free: list[int] = []
        self._bits: list[int] = []
        self.counts: list[int] = []
        """Blocks held, by holder. To be read only."""
        self._idle_holders: list[int] = []
        self.refused_blocks = 0
        """Blocks left out because the index was full."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def estimated_bytes(self) -> int:
        """Memory of the index, roughly; what engine hashes take is the sources' own."""
        return len(self._slots) * BLOCK_BYTES

    def new_holder(self) -> int:
        """A number for a new holder, with no blocks."""
        if self._idle_holders:
            return self._idle_holders.pop()
        self.counts.append(0)
        self._bits.append(1 << len(self._bits))
        return len(self.counts) - 1

    def remove_holder(self, holder: int) -> None:
        """Forget a holder and its blocks; its number may be given out again."""
        self.clear(holder)
        self._idle_holders.append(holder)

    def holds(self, holder: int, key: int) -> bool:
        """Whether it holds this block (its run may not reach it)."""
        slot = self._slots.get(key)
        return slot is not None and bool(self._held[slot] >> holder & 1)

    def add(self, holder: int, parent: int | None, keys: Sequence[int]) -> int:
        """`holder` has the chain `keys` hanging from `parent` (None: the empty prefix). Idempotent.

        Returns how many of them were left out because the index is full.
        """
        bit = self._bits[holder]
        slots, held, run = self._slots, self._held, self._run
        above = _NONE
        if parent is not None:
            found = slots.get(parent)
            if found is None:
                if len(slots) >= self._limit:
                    return self._refuse(len(keys))
                found = self._new(parent, _UNKNOWN)
            above = found
        added = refused = 0
        for i, key in enumerate(keys):
            slot = slots.get(key)
            if slot is None:
                if len(slots) >= self._limit:
                    refused = self._refuse(len(keys) - i)
                    break
                slot = self._new(key, above)
            elif self._parent[slot] == _UNKNOWN:
                self._attach(slot, above)
                gained = held[slot] if above == _NONE else held[slot] & run[above]
                run[slot] = gained
                self._reach(slot, gained)
            if not held[slot] & bit:
                # Where it is the only one, the set is one shared object.
                held[slot] = held[slot] | bit if held[slot] else bit
                added += 1
                if above == _NONE or run[above] & bit:
                    run[slot] = run[slot] | bit if run[slot] else bit
                    if self._child[slot] != _NONE:
                        self._reach(slot, bit)
            above = slot
        self.counts[holder] += added
        if above >= 0 and not held[above]:
            self._prune(above)
        return refused

    def copy(self, holder: int, keys: Iterable[int]) -> int:
        """`holder` has these blocks too; their place is known if another holder has them.

        Returns how many were left out because no other has them.
        """
        refused = 0
        for key in keys:
            slot = self._slots.get(key)
            if slot is None or self._parent[slot] == _UNKNOWN:
                refused += self._refuse(1)
                continue
            above = self._parent[slot]
            self.add(holder, None if above == _NONE else self._key[above], (key,))
        return refused

    def remove(self, holder: int, keys: Iterable[int]) -> None:
        """`holder` no longer has these blocks. What it does not hold is passed over."""
        bit = 1 << holder
        for key in keys:
            slot = self._slots.get(key)
            if slot is None or not self._held[slot] & bit:
                continue
            self._held[slot] ^= bit
            self.counts[holder] -= 1
            if self._run[slot] & bit:
                self._run[slot] ^= bit
                if self._child[slot] != _NONE:
                    self._cut(slot, bit)
            if not self._held[slot]:
                self._prune(slot)

    def clear(self, holder: int) -> None:
        """`holder` has nothing any more. Looks at every block of the index (40 ms a million)."""
        if not self.counts[holder]:
            return
        bit = 1 << holder
        held, run = self._held, self._run
        touched = [slot for slot, holders in enumerate(held) if holders & bit]
        for slot in touched:
            held[slot] ^= bit
            run[slot] &= ~bit
        for slot in touched:
            if not held[slot]:
                self._prune(slot)
        self.counts[holder] = 0

    def match(self, keys: Sequence[int], length: int, holders: int) -> list[tuple[int, int]]:
        """How far the runs of `holders` (a bit set) reach into the first `length` of `keys`.

        Returns (blocks, set of holders whose run ends exactly there); one that has none of it is in no set.
        """
        if length <= 0:
            return []
        slots, run = self._slots, self._run
        slot = slots.get(keys[length - 1])
        last = run[slot] & holders if slot is not None else 0
        levels = [(length, last)] if last else []
        stack = [(0, holders, length, last)]
        while stack:
            low, at_low, high, at_high = stack.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                if low:
                    levels.append((low, at_low & ~at_high))
                continue
            middle = (low + high) >> 1
            slot = slots.get(keys[middle - 1])
            at_middle = run[slot] & at_low if slot is not None else 0
            stack.append((low, at_low, middle, at_middle))
            stack.append((middle, at_middle, high, at_high))
        return levels

    def _refuse(self, blocks: int) -> int:
        self.refused_blocks += blocks
        return blocks

    def _new(self, key: int, parent: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._key[slot] = key
            self._child[slot] = self._next[slot] = self._previous[slot] = _NONE
            self._parent[slot] = _UNKNOWN
        else:
            slot = len(self._key)
            self._key.append(key)
            self._parent.append(_UNKNOWN)
            self._child.append(_NONE)
            self._next.append(_NONE)
            self._previous.append(_NONE)
            self._held.append(0)
            self._run.append(0)
        self._slots[key] = slot
        if parent != _UNKNOWN:
            self._attach(slot, parent)
        return slot

    def _attach(self, slot: int, parent: int) -> None:
        self._parent[slot] = parent
        if parent < 0:
            return
        first = self._child[parent]
        self._next[slot] = first
        if first != _NONE:
            self._previous[first] = slot
        self._child[parent] = slot

    def _prune(self, slot: int) -> None:
        """Give up blocks that nobody holds and nothing hangs from, upwards from `slot`."""
        while slot >= 0 and not self._held[slot] and self._child[slot] == _NONE:
            parent = self._parent[slot]
            if parent >= 0:
                before, after = self._previous[slot], self._next[slot]
                if before == _NONE:
                    self._child[parent] = after
                else:
                    self._next[before] = after
                if after != _NONE:
                    self._previous[after] = before
            key = self._key[slot]
            if self._slots.get(key) == slot:
                del self._slots[key]
                self._free.append(slot)
            self._parent[slot] = _UNKNOWN
            slot = parent

    def _reach(self, slot: int, holders: int) -> None:
        """The runs of `holders` have come to `slot`: carry them on to the blocks behind."""
        held, run = self._held, self._run
        stack = [(slot, holders)]
        while stack:
            slot, holders = stack.pop()
            child = self._child[slot]
            while child != _NONE:
                gained = held[child] & holders & ~run[child]
                if gained:
                    run[child] |= gained
                    stack.append((child, gained))
                child = self._next[child]

    def _cut(self, slot: int, bit: int) -> None:
        """The run of `bit` no longer comes to `slot`: take it from those behind."""
        run = self._run
        stack = [slot]
        while stack:
            child = self._child[stack.pop()]
            while child != _NONE:
                if run[child] & bit:
                    run[child] ^= bit
                    stack.append(child)
                child = self._next[child]

    def check_integrity(self) -> None:
        """Recompute counts and runs the slow way; raises SumibiError where they differ. For tests."""
        counts = [0] * len(self.counts)
        for key, slot in self._slots.items():
            if self._key[slot] != key:
                raise SumibiError(f"index: slot {slot} has another key than the one it is found by")
            reach = -1
            at = slot
            while at >= 0:
                reach &= self._held[at]
                at = self._parent[at]
            expected = reach if at == _NONE else 0
            if self._run[slot] != expected:
                raise SumibiError(f"index: run of {key} is {self._run[slot]:b}, by scan {expected:b}")
            if not self._held[slot] and self._child[slot] == _NONE:
                raise SumibiError(f"index: {key} is kept for nobody")
            for holder in range(len(counts)):
                counts[holder] += self._held[slot] >> holder & 1
        if counts != self.counts:
            raise SumibiError(f"index: blocks held are {counts}, counters say {self.counts}")
