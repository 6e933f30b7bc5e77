"""The pool of KV blocks: who holds which, which hold a known prefix, which goes next.

Knows block numbers, content ids and reference counts; the numbers inside blocks are the model's, and
requests are the scheduler's. A block is in exactly one place:

    held      some sequence counts on it; it may have a content id, once it is full and computed
    cached    nobody holds it, its content id is known: a later prompt may take it up again
    blank     nobody holds it and nothing is known of it

There is at most one block per content id: a sequence that fills a block which another has filled before
it is given that one, and its own goes blank. So whoever holds a block holds the blocks before it too,
and a plain LRU queue to which sequences return their blocks last one first can never drop an ancestor
before its descendants. Because the cached set is closed under "what comes before", the longest cached
prefix is found by bisection.

Questions (`match`, `available`) change nothing; acts (`take`, `fill`, `give_back`) never fail half-way.
What becomes known or is dropped is kept as KV events in vLLM's form, until `drain_events`.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sumibi.core.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

MEDIUM = "GPU"
"""What vLLM calls the device pool, also on a CPU."""

FULL_ATTENTION = "full_attention"


def wire_hash(content_id: bytes) -> int:
    """A content id as KV events carry it: its low 64 bits, as vLLM does by default."""
    return int.from_bytes(content_id[-8:], "big")


@dataclass(frozen=True, slots=True)
class FullBlock:
    """What a computed full block holds: enough to find it again and to announce it."""

    content_id: bytes
    parent: bytes | None
    """Content id of the block before, None for the first of a prompt."""
    token_ids: Sequence[int]
    salt: str = ""
    """The prompt's cache salt; announced with the first block only, as vLLM does."""


class BlockPool:
    """`num_blocks` blocks of `block_tokens` tokens, numbered from 0."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._references = [0] * num_blocks
        self._content: list[bytes | None] = [None] * num_blocks
        self._parent: dict[bytes, bytes | None] = {}
        self._by_content: dict[bytes, int] = {}
        # A stack with the lowest number on top: what was used lately is used again, so memory that was
        # never needed is never touched.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._events: list[KVEvent] = []

    @property
    def available(self) -> int:
        """Blocks that nobody holds (blank or cached)."""
        return len(self._blank) + len(self._cached)

    @property
    def held(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need, a partial last one included."""
        return -(-tokens // self.block_tokens)

    def match(self, content_ids: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a prompt whose full blocks have `content_ids`, in order."""
        return [self._by_content[content_id] for content_id in content_ids[: self.match_length(content_ids)]]

    def match_length(self, content_ids: Sequence[bytes]) -> int:
        """Length in blocks of what `match` would return: a handful of look-ups, whatever the length."""
        return bisect_left(content_ids, True, key=lambda content_id: content_id not in self._by_content)

    def can_take(self, hit: Sequence[int], fresh: int) -> bool:
        """Whether `take(hit, fresh)` would succeed; blocks of `hit` that nobody holds count as needed."""
        return self.available >= fresh + sum(self._references[block] == 0 for block in hit)

    def take(self, hit: Sequence[int], fresh: int) -> list[int]:
        """Hold the blocks of `hit` (one more holder each) and `fresh` empty ones; all of them, in order.

        Empty ones come from the blank blocks, then from the cached block unused for longest. The caller
        has asked `can_take`.
        """
        for block in hit:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        return [*hit, *(self._take_empty() for _ in range(fresh))]

    def fill(self, block: int, full: FullBlock) -> int:
        """Say that the held `block` is computed to its end. Returns the block to use from now on:

        itself, or the one that holds the same content already (held in its place, and `block` goes
        blank). The block before must have been filled first.
        """
        known = self._by_content.get(full.content_id)
        if known is not None:
            self.take([known], 0)
            self._drop_reference(block)
            self._blank.append(block)
            return known
        self._content[block] = full.content_id
        self._by_content[full.content_id] = block
        self._parent[full.content_id] = full.parent
        self._announce(full)
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder's blocks, in order of the sequence. Those with known content stay cached."""
        for block in reversed(blocks):
            if self._drop_reference(block) > 0:
                continue
            if self._content[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def clear(self) -> bool:
        """Forget every cached block. False, and nothing done, while any block is held."""
        if self.held:
            return False
        for block in self._cached:
            self._content[block] = None
        self._blank += self._cached
        self._cached.clear()
        self._by_content.clear()
        self._parent.clear()
        self._events.append(AllBlocksCleared())
        return True

    def drain_events(self) -> list[KVEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def known_contents(self) -> set[bytes]:
        """Content ids of all blocks whose content is known, held or cached."""
        return set(self._by_content)

    def known_blocks(self) -> set[int]:
        """Blocks whose content is known, held or cached."""
        return set(self._by_content.values())

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with itself and with the tables of its `holders`."""
        counts = Counter(block for table in holders for block in table)
        assert all(self._references[b] == counts[b] for b in range(self.num_blocks)), "reference counts"
        places = [*self._blank, *self._cached, *counts]
        assert sorted(places) == list(range(self.num_blocks)), "each block in exactly one place"
        named = {content: block for block, content in enumerate(self._content) if content is not None}
        assert named == self._by_content, "one block per content id, and back"
        assert self._parent.keys() == named.keys(), "one parent per content id"
        assert all(self._content[b] is None for b in self._blank), "blank blocks hold nothing known"
        assert all(self._content[b] is not None for b in self._cached), "cached blocks hold something known"
        age = {block: position for position, block in enumerate(self._cached)}
        for content, parent in self._parent.items():
            if parent is None:
                continue
            assert parent in named, "the block before a known block is known"
            before, after = named[parent], named[content]
            assert self._references[before] >= self._references[after], "who holds a block holds its prefix"
            assert before not in age or age[after] < age[before], "descendants are dropped first"

    def _take_empty(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def _drop_reference(self, block: int) -> int:
        if self._references[block] == 0:
            raise ValueError(f"block {block} is given back, but nobody holds it")
        self._references[block] -= 1
        return self._references[block]

    def _forget(self, block: int) -> None:
        content_id = self._content[block]
        assert content_id is not None
        self._content[block] = None
        del self._by_content[content_id], self._parent[content_id]
        if self._events and isinstance(last := self._events[-1], BlockRemoved):
            last.block_hashes.append(wire_hash(content_id))
        else:
            self._events.append(
                BlockRemoved(block_hashes=[wire_hash(content_id)], medium=MEDIUM, group_idx=0)
            )

    def _announce(self, full: FullBlock) -> None:
        name = wire_hash(full.content_id)
        parent = None if full.parent is None else wire_hash(full.parent)
        last = self._events[-1] if self._events else None
        if parent is not None and isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            assert last.extra_keys is not None
            last.block_hashes.append(name)
            last.token_ids += full.token_ids
            last.extra_keys.append(None)
            return
        self._events.append(
            BlockStored(
                block_hashes=[name],
                parent_block_hash=parent,
                token_ids=list(full.token_ids),
                block_size=self.block_tokens,
                medium=MEDIUM,
                extra_keys=[[full.salt] if full.salt and parent is None else None],
                group_idx=0,
                kv_cache_spec_kind=FULL_ATTENTION,
            )
        )
