"""Which holder has which block: a trie of routing keys in which blocks with the same fate are kept together.

A *holder* is a place for blocks: one endpoint's device memory, its host memory, or what we believe an
endpoint has because we sent it there. Holders are small numbers, sets of them Python integers used as bit
sets.

A *stretch* is a part of one chain without a branch whose blocks are held by the same holders. Prompts come
and go in stretches, so there are far fewer of these than of blocks, and most work is done for a stretch at
a time: to find how far all holders have a prompt is one step for each stretch on its way, some tens for a
long conversation that many endpoints have to different lengths. A prompt follows a stretch to its end if it
has the stretch's last key, for a key is chained: it names all before it. So this equals a scan from the root
block by block, whatever holes the caches have.

Two stretches that could be one are made one only if the shorter is short: cutting and joining cost no more
than what is moved, and branches that come and go do not move the same long stretch again and again.

A block that nobody holds stays only as long as others hang from it. One that is named as a parent only has
no known place (`_UNKNOWN`): what hangs from it is in nobody's run until that place is told.

Stretches live in parallel arrays at small numbers rather than in objects, and their keys in arrays of
machine words: less memory, and next to nothing for the garbage collector to walk.

The index knows nothing of engines, events or endpoints' names.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from sumibi.core.errors import SumibiError
from sumibi.core.keys import common

_NONE: Final = -1
"""No stretch: as a parent, the empty prefix."""
_UNKNOWN: Final = -2
"""A parent that was never named: a run cannot reach this block."""

JOINED_BLOCKS: Final = 64
"""Stretches up to this length are joined with a neighbour that has the same holders."""
BLOCK_BYTES: Final = 100
"""Estimate for one block: its key 48, its dictionary entry 40, its place in a stretch 8 and some spare."""
STRETCH_BYTES: Final = 160
"""Estimate for one stretch beside its blocks."""


class BlockIndex:
    """Blocks of all holders. Every change and question is by holder number and routing keys."""

    def __init__(self, limit_blocks: int) -> None:
        self._limit = limit_blocks
        self._at: dict[int, int] = {}
        """The stretch of each block."""
        self._known = self._at.keys()
        self._keys: list[array[int]] = []
        """Blocks of each stretch in order. Empty: the number is free."""
        self._held: list[int] = []
        self._parent = array("i")
        """The stretch from whose last block each one hangs."""
        self._child = array("i")
        self._next = array("i")
        self._previous = array("i")
        self._free: list[int] = []
        self.counts: list[int] = []
        """Blocks held, by holder. To be read only."""
        self._idle_holders: list[int] = []
        self.refused_blocks = 0
        """Blocks left out because the index was full."""

    def __len__(self) -> int:
        return len(self._at)

    @property
    def stretches(self) -> int:
        """How many stretches the blocks make."""
        return len(self._keys) - len(self._free)

    @property
    def estimated_bytes(self) -> int:
        """Memory of the index, roughly; what engine hashes take is the sources' own."""
        return len(self._at) * BLOCK_BYTES + self.stretches * STRETCH_BYTES

    def new_holder(self) -> int:
        """A number for a new holder, with no blocks."""
        if self._idle_holders:
            return self._idle_holders.pop()
        self.counts.append(0)
        return len(self.counts) - 1

    def remove_holder(self, holder: int) -> None:
        """Forget a holder and its blocks; its number may be given out again."""
        self.clear(holder)
        self._idle_holders.append(holder)

    def holds(self, holder: int, key: int) -> bool:
        """Whether it holds this block (its run may not reach it)."""
        stretch = self._at.get(key)
        return stretch is not None and bool(self._held[stretch] >> holder & 1)

    def holders_of(self, key: int) -> int:
        """Bit set of those that hold this block."""
        stretch = self._at.get(key)
        return 0 if stretch is None else self._held[stretch]

    def add(self, holder: int, parent: int | None, keys: Sequence[int]) -> int:
        """`holder` has the chain `keys` hanging from `parent` (None: the empty prefix). Idempotent.

        Returns how many of them were left out because the index is full.
        """
        at, held, bit = self._at, self._held, 1 << holder
        if parent is not None:
            stretch = at.get(parent)
            if stretch is None:
                if len(at) >= self._limit:
                    return self._refuse(len(keys))
                self._new((parent,), 0, _UNKNOWN)
            elif (
                held[stretch] == bit
                and self._child[stretch] == _NONE
                and self._keys[stretch][-1] == parent
                and len(at) + len(keys) <= self._limit
                and self._known.isdisjoint(keys)
            ):
                # The usual case, as a shortcut: its last chain goes on.
                self._extend(stretch, keys)
                self.counts[holder] += len(keys)
                return 0
        above, i, added, refused = parent, 0, 0, 0
        while i < len(keys):
            stretch = at.get(keys[i])
            if stretch is None:
                new = self._leading_new(keys, i)[: self._limit - len(at)]
                if not new:
                    refused = self._refuse(len(keys) - i)
                    break
                self._hang(above, new, bit)
                found = len(new)
                added += found
            else:
                place = _place(self._keys[stretch], keys[i])
                if (
                    not place
                    and self._parent[stretch] == _UNKNOWN
                    and (above is None or at[above] != stretch)
                ):
                    self._attach(stretch, _NONE if above is None else self._ending(above))
                found = _common(self._keys[stretch], place, keys, i)
                if not held[stretch] & bit:
                    self._give(stretch, place, place + found, bit)
                    added += found
            i += found
            above = keys[i - 1]
        self.counts[holder] += added
        if refused and above is not None:
            self._prune(at[above])
        return refused

    def copy(self, holder: int, keys: Iterable[int]) -> int:
        """`holder` has these blocks too; their place is known if another holder has them.

        Returns how many were left out because no other has them. Quick for stretches of a chain.
        """
        refused, bit, i = 0, 1 << holder, 0
        copied = array("Q", keys)
        while i < len(copied):
            stretch = self._at.get(copied[i])
            place = _place(self._keys[stretch], copied[i]) if stretch is not None else 0
            if stretch is None or (not place and self._parent[stretch] == _UNKNOWN):
                refused += self._refuse(1)
                i += 1
                continue
            found = _equal(self._keys[stretch][place : place + len(copied) - i], copied, i)
            if not self._held[stretch] & bit:
                self._give(stretch, place, place + found, bit)
                self.counts[holder] += found
            i += found
        return refused

    def remove(self, holder: int, keys: Iterable[int]) -> None:
        """`holder` no longer has these blocks. What it does not hold is passed over.

        Quick for stretches of a chain in either direction.
        """
        at, held, bit = self._at, self._held, 1 << holder
        gone = array("Q", keys)
        i, removed = 0, 0
        while i < len(gone):
            key = gone[i]
            stretch = at.get(key)
            if stretch is None or not held[stretch] & bit:
                i += 1
                continue
            blocks = self._keys[stretch]
            place = _place(blocks, key)
            up = _equal(blocks[max(0, place + 1 - len(gone) + i) : place + 1][::-1], gone, i)
            down = _equal(blocks[place : place + len(gone) - i], gone, i) if up == 1 else 1
            if down > up:
                self._take(stretch, place, place + down, bit)
            else:
                self._take(stretch, place + 1 - up, place + 1, bit)
            found = max(up, down)
            removed += found
            i += found
        self.counts[holder] -= removed

    def clear(self, holder: int) -> None:
        """`holder` has nothing any more. Looks at every stretch of the index."""
        if not self.counts[holder]:
            return
        bit, held = 1 << holder, self._held
        touched = [stretch for stretch, holders in enumerate(held) if holders & bit]
        for stretch in touched:
            held[stretch] ^= bit
        self.counts[holder] = 0
        kept = [self._drop(stretch) for stretch in touched if self._keys[stretch]]
        for stretch in kept:
            if stretch >= 0 and self._keys[stretch]:
                self._settle(stretch)

    def match(self, keys: Sequence[int], length: int, holders: int) -> list[tuple[int, int]]:
        """How far the runs of `holders` (a bit set) reach into the first `length` of `keys`.

        Returns (blocks, set of holders whose run ends exactly there), the shortest first; one that has none
        of it is in no set.
        """
        at, held, parents, stretches = self._at, self._held, self._parent, self._keys
        levels: list[tuple[int, int]] = []
        stretch = at.get(keys[0]) if length > 0 else None
        if stretch is None or parents[stretch] != _NONE or stretches[stretch][0] != keys[0]:
            return levels
        done, above = 0, _NONE
        while stretch is not None and parents[stretch] == above:
            blocks = stretches[stretch]
            have = held[stretch] & holders
            if have != holders:
                if done:
                    levels.append((done, holders ^ have))
                holders = have
                if not have:
                    break
            end = done + len(blocks)
            if end > length or blocks[-1] != keys[end - 1]:
                done += _common(blocks, 0, keys, done, length)
                break
            done, above = end, stretch
            if done == length:
                break
            # Behind the end of one stretch a known block is the first of another: keys are chained.
            stretch = at.get(keys[done])
        if done and holders:
            levels.append((done, holders))
        return levels

    def path(self, keys: Sequence[int], length: int) -> list[tuple[int, int]]:
        """Who has the first `length` of `keys`: (blocks from the root, bit set of the holders of those since
        the last), down to the first that the index does not know.
        """
        at, held, parents, stretches = self._at, self._held, self._parent, self._keys
        found: list[tuple[int, int]] = []
        done, above = 0, _NONE
        while done < length:
            stretch = at.get(keys[done])
            if stretch is None or parents[stretch] != above or stretches[stretch][0] != keys[done]:
                break
            blocks = stretches[stretch]
            end = done + len(blocks)
            if end > length or blocks[-1] != keys[end - 1]:
                found.append((done + _common(blocks, 0, keys, done, length), held[stretch]))
                break
            found.append((end, held[stretch]))
            done, above = end, stretch
        return found

    # --- stretches ---

    def _refuse(self, blocks: int) -> int:
        self.refused_blocks += blocks
        return blocks

    def _leading_new(self, keys: Sequence[int], i: int) -> Sequence[int]:
        """Those of `keys` from `i` on that come before the first known one. The one at `i` is new."""
        rest = keys[i:]
        if self._known.isdisjoint(rest):
            return rest
        return rest[: next(j for j, key in enumerate(rest) if key in self._at)]

    def _new(self, keys: Sequence[int], holders: int, parent: int) -> int:
        """A stretch of these blocks, hanging from the last block of `parent`."""
        if self._free:
            stretch = self._free.pop()
            self._keys[stretch] = array("Q", keys)
            self._held[stretch] = holders
            self._child[stretch] = self._next[stretch] = self._previous[stretch] = _NONE
            self._parent[stretch] = _UNKNOWN
        else:
            stretch = len(self._keys)
            self._keys.append(array("Q", keys))
            self._held.append(holders)
            self._parent.append(_UNKNOWN)
            self._child.append(_NONE)
            self._next.append(_NONE)
            self._previous.append(_NONE)
        self._at.update(dict.fromkeys(keys, stretch))
        self._attach(stretch, parent)
        return stretch

    def _extend(self, stretch: int, keys: Sequence[int]) -> None:
        self._keys[stretch].extend(keys)
        self._at.update(dict.fromkeys(keys, stretch))

    def _hang(self, above: int | None, keys: Sequence[int], bit: int) -> None:
        """New blocks of one holder behind `above`."""
        end = _NONE if above is None else self._ending(above)
        if end >= 0 and self._child[end] == _NONE and self._held[end] == bit:
            self._extend(end, keys)
        else:
            self._new(keys, bit, end)

    def _ending(self, key: int) -> int:
        """The stretch that ends with this block: it is cut behind it if need be."""
        stretch = self._at[key]
        blocks = self._keys[stretch]
        if blocks[-1] != key:
            stretch, _ = self._cut(stretch, blocks.index(key) + 1)
        return stretch

    def _give(self, stretch: int, first: int, end: int, bit: int) -> None:
        """Blocks `first` to `end` of a stretch get a holder that none of it has."""
        stretch = self._alone(stretch, first, end)
        self._held[stretch] |= bit
        self._settle(stretch)

    def _take(self, stretch: int, first: int, end: int, bit: int) -> None:
        """Blocks `first` to `end` of a stretch lose a holder that all of it has."""
        blocks = self._keys[stretch]
        if first and end == len(blocks) and self._held[stretch] == bit and self._child[stretch] == _NONE:
            # The usual case, as a shortcut: a chain is given up from its end.
            for key in blocks[first:]:
                del self._at[key]
            del blocks[first:]
            return
        stretch = self._alone(stretch, first, end)
        self._held[stretch] ^= bit
        if self._held[stretch] or self._child[stretch] != _NONE:
            self._settle(stretch)
        else:
            self._prune(stretch)

    def _alone(self, stretch: int, first: int, end: int) -> int:
        """Blocks `first` to `end` of a stretch as a stretch of their own."""
        if end < len(self._keys[stretch]):
            stretch, _ = self._cut(stretch, end)
        if first:
            _, stretch = self._cut(stretch, first)
        return stretch

    def _cut(self, stretch: int, place: int) -> tuple[int, int]:
        """Cut before the block at `place`: (what is before it, the rest). The smaller part moves."""
        blocks = self._keys[stretch]
        holders, child = self._held[stretch], self._child[stretch]
        several = child != _NONE and self._next[child] != _NONE
        if several or 2 * place <= len(blocks):
            # What hangs from the rest need not be told.
            head = self._new(blocks[:place], holders, _UNKNOWN)
            del blocks[:place]
            self._replace(stretch, head)
            self._attach(stretch, head)
            return head, stretch
        tail = self._new(blocks[place:], holders, _UNKNOWN)
        del blocks[place:]
        if child != _NONE:
            self._replace_parent(child, tail)
        self._child[stretch] = _NONE
        self._attach(tail, stretch)
        return stretch, tail

    def _settle(self, stretch: int) -> None:
        """Its holders changed, or what hangs from it: join it with its neighbours where that is right."""
        stretch = self._join(stretch)
        above = self._parent[stretch]
        if above >= 0:
            self._join(above)

    def _join(self, head: int) -> int:
        """Make one of a stretch and the only one that hangs from it, if they may be; which one it is then."""
        tail = self._child[head]
        if tail == _NONE or self._next[tail] != _NONE or self._held[head] != self._held[tail]:
            return head
        before, after = self._keys[head], self._keys[tail]
        child = self._child[tail]
        several = child != _NONE and self._next[child] != _NONE
        if len(after) <= JOINED_BLOCKS and not several:
            self._extend(head, after)
            self._child[head] = _NONE
            if child != _NONE:
                self._replace_parent(child, head)
            self._release(tail)
            return head
        if len(before) <= JOINED_BLOCKS:
            after[0:0] = before
            self._at.update(dict.fromkeys(before, tail))
            self._replace(head, tail)
            self._release(head)
            return tail
        return head

    def _prune(self, stretch: int) -> None:
        """Give up this stretch if nobody holds it and nothing hangs from it, and so on upwards."""
        above = self._drop(stretch)
        if above >= 0:
            self._settle(above)

    def _drop(self, stretch: int) -> int:
        """The same, but joins nothing; the first stretch on the way up that is kept, if there is one."""
        while stretch >= 0 and not self._held[stretch] and self._child[stretch] == _NONE:
            for key in self._keys[stretch]:
                del self._at[key]
            above = self._parent[stretch]
            if above >= 0:
                before, after = self._previous[stretch], self._next[stretch]
                if before == _NONE:
                    self._child[above] = after
                else:
                    self._next[before] = after
                if after != _NONE:
                    self._previous[after] = before
            self._release(stretch)
            stretch = above
        return stretch

    # --- links ---

    def _release(self, stretch: int) -> None:
        """Its number may be used again."""
        self._keys[stretch] = array("Q")
        self._held[stretch] = 0
        self._child[stretch] = _NONE
        self._free.append(stretch)

    def _attach(self, stretch: int, parent: int) -> None:
        """Hang it from the last block of `parent`."""
        self._parent[stretch] = parent
        self._previous[stretch] = self._next[stretch] = _NONE
        if parent < 0:
            return
        first = self._child[parent]
        self._next[stretch] = first
        if first != _NONE:
            self._previous[first] = stretch
        self._child[parent] = stretch

    def _replace(self, old: int, new: int) -> None:
        """`new` hangs where `old` did."""
        parent = self._parent[old]
        before, after = self._previous[old], self._next[old]
        self._parent[new], self._previous[new], self._next[new] = parent, before, after
        if before != _NONE:
            self._next[before] = new
        elif parent >= 0:
            self._child[parent] = new
        if after != _NONE:
            self._previous[after] = new

    def _replace_parent(self, child: int, parent: int) -> None:
        """An only child hangs from `parent`, which had none."""
        self._parent[child] = parent
        self._child[parent] = child

    def check_integrity(self) -> None:
        """Compare links, counts and places with a recount; raises SumibiError where they differ."""
        counts = [0] * len(self.counts)
        blocks = 0
        for stretch, keys in enumerate(self._keys):
            if not keys:
                continue
            blocks += len(keys)
            if any(self._at.get(key) != stretch for key in keys):
                raise SumibiError(f"index: a block of stretch {stretch} is found elsewhere")
            for holder in range(len(counts)):
                counts[holder] += len(keys) * (self._held[stretch] >> holder & 1)
            children = self._children(stretch)
            if any(self._parent[child] != stretch for child in children):
                raise SumibiError(f"index: what hangs from stretch {stretch} says otherwise")
            if not self._held[stretch] and not children:
                raise SumibiError(f"index: stretch {stretch} is kept for nobody")
            parent = self._parent[stretch]
            if parent >= 0 and stretch not in self._children(parent):
                raise SumibiError(f"index: stretch {stretch} hangs from one that does not know it")
        if blocks != len(self._at):
            raise SumibiError(f"index: {len(self._at)} blocks are found, {blocks} are there")
        if counts != self.counts:
            raise SumibiError(f"index: blocks held are {counts}, counters say {self.counts}")

    def _children(self, stretch: int) -> list[int]:
        children: list[int] = []
        child = self._child[stretch]
        while child != _NONE:
            if children and self._previous[child] != children[-1]:
                raise SumibiError(f"index: what hangs from stretch {stretch} is in disorder")
            children.append(child)
            child = self._next[child]
        return children


def _place(blocks: "array[int]", key: int) -> int:
    """Where in a stretch this block of it is; quick at its ends."""
    if blocks[0] == key:
        return 0
    if blocks[-1] == key:
        return len(blocks) - 1
    return blocks.index(key)


def _common(blocks: "array[int]", place: int, keys: Sequence[int], i: int, length: int | None = None) -> int:
    """How many blocks from `place` on are `keys` from `i` (to `length`) on; the first one is."""
    high = place + min(len(blocks) - place, (len(keys) if length is None else length) - i)
    return common(blocks, keys, place + 1, high, i - place) - place


def _equal(blocks: "array[int]", gone: "array[int]", i: int) -> int:
    """How many blocks are `gone` from `i` on; the first one is."""
    if blocks == gone[i : i + len(blocks)]:
        return len(blocks)
    return next(n for n, block in enumerate(blocks) if block != gone[i + n])
