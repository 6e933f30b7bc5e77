"""Between the engine and `sumibi.tiers`: prompts find KV below the device, computed blocks go there.

Up: `offer` looks in memory, `look` (before a request is queued) asks the shared store; a load reads into
memory of its own, verified there, and only then writes to the engine's blocks: a reader that hangs, or finds
rubbish, never touches them.

Down: a block that became full is held (`pin`) until a thread has copied it, so decodes never wait for a copy.
At most `_PINNED_SHARE` of the device is held that way; what comes when so much waits is dropped and counted,
and stored when it is computed again.

What the tiers say they hold is published as KV events, with tokens and parent. Files found after a restart
tell no tokens: their blocks are announced when the first prompt that has them comes by.
"""

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty, Full, Queue

from sumibi.core.kvevents import BlockRemoved, BlockStored, KVEvent
from sumibi.core.priority import give_way
from sumibi.engine.blocks import FULL_ATTENTION, BlockPool, wire_hash
from sumibi.engine.loading import Done, Load
from sumibi.engine.model import Model
from sumibi.engine.publisher import EventSink
from sumibi.engine.scheduler import Scheduler
from sumibi.engine.sequence import Sequence
from sumibi.engine.speeds import Speeds
from sumibi.tiers import BlockTiers, Tier, TierEvent, TiersStats

log = logging.getLogger(__name__)

_LOADERS = 2
_BATCH_BYTES = 48 << 20
_BATCH_MOST = 64
_PINNED_SHARE = 0.5
"""A step's blocks wait while the next step computes as many, and a device may hold few steps' blocks."""
_EVENTS_EVERY_S = 0.25
_REMEMBERED = 1 << 17
"""Blocks whose tokens are kept for events; the oldest go first and are then not announced any more. That
one which was announced is gone is told without them."""
_ANSWERED = 1 << 17
"""Blocks of answered requests that are remembered by the request's name, to be brought up on a hint."""
_HINTED_BLOCKS = 1 << 12
"""So many blocks are still to be brought up: further hints are refused."""
_SETTLE_S = 10.0


class Hint(StrEnum):
    """What became of a hint."""

    TAKEN = "taken"
    UNKNOWN = "unknown"
    """No such request is remembered: never seen, without a name, forgotten, or of an earlier process."""
    BUSY = "busy"


@dataclass(slots=True)
class _Told:
    """What an event says of a block beside its hash."""

    parent: bytes | None
    token_ids: list[int]
    salt: str


@dataclass(slots=True)
class _Copy:
    """Blocks to be copied down."""

    pinned: list[int]
    blocks: list[tuple[bytes, bytes | None]]


class TierLink:
    """A `KVSource` and a `KVSink` over one `BlockTiers`. `start` it once the engine is there."""

    timeout_s = 30.0

    def __init__(self, tiers: BlockTiers, model: Model, pool: BlockPool, *, store: str | None) -> None:
        """`store`: what KV events call the shared store, which others may have filled; None: no store."""
        self._tiers = tiers
        self._model = model
        self._pool = pool
        self._store = store
        self.media = {tier: tier.medium for tier in Tier} | ({Tier.STORE: store} if store else {})
        """What KV events call each tier."""
        self._batch = batch_blocks(model.block_bytes)
        self._copies: Queue[_Copy | None] = Queue(1 << 16)
        self._pinned_most = max(8, int(_PINNED_SHARE * pool.num_blocks))
        self._pinned = 0  # the step thread's
        self.speeds = Speeds()
        """Of loads, by tier."""
        self._copied: deque[_Copy] = deque()
        self.dropped = 0
        """Blocks not copied down because too many waited."""
        self._lock = threading.Lock()
        self._told: OrderedDict[bytes, _Told] = OrderedDict()
        # Where blocks are, as published or without: no more of them than the tiers hold.
        self._announced: dict[bytes, set[Tier]] = {}
        self._untold: dict[bytes, set[Tier]] = {}
        self._answered: OrderedDict[str, list[bytes]] = OrderedDict()
        self._answered_blocks = 0
        self.hints = dict.fromkeys(Hint, 0)
        """Hints by what became of them."""
        self._loaders = ThreadPoolExecutor(_LOADERS, "kv-load")
        self._local = threading.local()
        self._writer = threading.Thread(target=self._write, name="kv-copy", daemon=True)

    def start(
        self, scheduler: Scheduler, events: EventSink, post: Callable[[Callable[[], None]], None]
    ) -> None:
        """Begin. `post` runs a call in the step thread, where pins and events belong."""
        self._scheduler = scheduler
        self._events = events
        self._post = post
        self._writer.start()

    def close(self) -> None:
        """Copy what waits, stop. The step thread has ended."""
        self._copies.put(None)
        self._writer.join(_SETTLE_S)
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._tiers.close()

    def stats(self) -> TiersStats:
        """What the tiers count."""
        return self._tiers.stats()

    @property
    def prefetches(self) -> bool:
        """Whether a hint can be of use: there is host memory, and something below it."""
        return self._tiers.prefetches

    # Up

    def prefetch(self, request_id: str) -> Hint:
        """Bring up, to host memory, what lower tiers have of a request that was answered. From any thread.

        Not further: what the device has empty it has for those who run, and what is not empty somebody else
        would lose; from host memory a block takes a fraction of what it takes from disk.
        """
        outcome = Hint.TAKEN
        with self._lock:
            ids = self._answered.get(request_id)
            if ids is None:
                outcome = Hint.UNKNOWN
            elif self._tiers.prefetching >= _HINTED_BLOCKS:
                outcome = Hint.BUSY
            self.hints[outcome] += 1
        if ids is not None and outcome is Hint.TAKEN:
            self._post(lambda: self._bring_up(ids))
        return outcome

    def _bring_up(self, ids: list[bytes]) -> None:
        """Step thread: what the device has is not needed from below."""
        on_device = self._pool.match_length(ids)
        self._tiers.prefetch(ids[on_device:])

    def look(self, sequence: Sequence) -> None:
        """See `KVSource`: ask the shared store, and announce what was found without its tokens."""
        ids = sequence.content_ids
        found = self._tiers.find(ids) if self._store is not None else self._tiers.match(ids)
        with self._lock:
            new = [index for index, _ in enumerate(found) if ids[index] in self._untold]
            events = [
                TierEvent(True, ids[index], ids[index - 1] if index else None, tier)
                for index in new
                for tier in self._untold.pop(ids[index])
            ]
            for index in new:
                self._remember(sequence, index)
        self._publish(events)

    def offer(self, sequence: Sequence, first_block: int) -> int:
        """See `KVSource`."""
        return len(self._tiers.match(sequence.content_ids[first_block:])) * self._pool.block_tokens

    def load(self, load: Load, done: Done) -> None:
        """See `KVSource`."""
        self._loaders.submit(self._load, load, done)

    def _load(self, load: Load, done: Done) -> None:
        sources: list[str] = []
        begun_s = time.monotonic()
        try:
            ids, blocks = load.content_ids, load.blocks
            for first in range(0, len(ids), self._batch):
                buffers = self._buffers(min(self._batch, len(ids) - first))
                tiers = self._tiers.load(ids[first : first + self._batch], buffers)
                good = tiers.index(None) if None in tiers else len(tiers)
                if load.abandoned:
                    break
                self._model.write_blocks(blocks[first : first + good], buffers[:good])
                sources += [tier.value for tier in tiers[:good] if tier is not None]
                if good < len(tiers):
                    break
        except Exception:
            log.exception("a load from the KV tiers failed: the rest is computed")
        took_s = time.monotonic() - begun_s
        done(sources)
        if sources and len(sources) == len(load.content_ids) and sources.count(sources[0]) == len(sources):
            self.speeds.loaded(Tier(sources[0]), len(sources) * self._model.block_bytes, took_s)

    def _buffers(self, count: int) -> list[memoryview]:
        """Memory of the calling thread for `count` blocks, used again in its next call."""
        kept: list[memoryview] = self._local.__dict__.setdefault("buffers", [])
        while len(kept) < count:
            kept.append(memoryview(bytearray(self._model.block_bytes)))
        return kept[:count]

    # Down

    def filled(self, sequence: Sequence, first_block: int) -> None:
        """See `KVSink`."""
        new = []
        with self._lock:
            for index in range(first_block, sequence.filled):
                if self._tiers.match([sequence.content_ids[index]]) != [Tier.HOST]:
                    new.append(index)
                    self._remember(sequence, index)
        if not new:
            return
        self._unpin_copied()
        if excess := max(0, self._pinned + len(new) - self._pinned_most):
            if not self.dropped:
                log.warning("KV is computed faster than it is copied to the tiers: some is not stored")
            self.dropped += excess
            new = new[: len(new) - excess]  # the first ones: without them the others are of no use
            if not new:
                return
        ids = sequence.content_ids
        # `fill` may have given the sequence another's block; the one in its table holds the same.
        copy = _Copy(
            self._scheduler.pin([sequence.table[index] for index in new]),
            [(ids[index], ids[index - 1] if index else None) for index in new],
        )
        self._pinned += len(new)
        try:
            self._copies.put_nowait(copy)
        except Full:
            self.dropped += len(new)
            self._unpin(copy)

    def ended(self, sequence: Sequence) -> None:
        """See `KVSink`: remember what a request with a name has, for a hint."""
        name, ids = sequence.request_id, sequence.content_ids[: sequence.filled]
        if not name or sequence.index or not ids or not self.prefetches:
            return
        with self._lock:
            self._answered_blocks += len(ids) - len(self._answered.pop(name, ()))
            self._answered[name] = ids
            while self._answered_blocks > _ANSWERED:
                self._answered_blocks -= len(self._answered.popitem(last=False)[1])

    def settle(self) -> None:
        """Wait until what was held for copying is free again (or, at the latest, a bound): blocks the caller,
        which must not be the step thread.
        """
        free = threading.Event()
        until_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < until_s:
            free.clear()
            idle: list[bool] = []

            def ask(idle: list[bool] = idle) -> None:
                idle.append(self._pinned == 0)
                free.set()

            self._post(ask)
            if not free.wait(max(0.0, until_s - time.monotonic())) or idle[0]:
                return
            time.sleep(0.01)

    def clear(self) -> None:
        """Nothing that lies below now is found by this engine any more. In the shared store it stays for the
        others: the engine goes on in a part of it that is its own until it starts again. Blocks; raises
        OSError.
        """
        if self._store is not None:
            self._leave_store(self._store)
        self._tiers.clear(shared=False)
        self._publish([])

    def _leave_store(self, store: str) -> None:
        self._publish([])
        generation = secrets.token_hex(4)
        self._tiers.leave_store(generation)
        with self._lock:
            # Its name means what others find, too: of that nothing has gone, and what comes is elsewhere.
            self.media[Tier.STORE] = f"{store}-{generation}"
            for places in (self._untold, self._announced):
                for content_id in list(places):
                    _forget(places, content_id, Tier.STORE)

    def _unpin_copied(self) -> None:
        """Let go of what has been copied. Step thread."""
        while self._copied:
            self._unpin(self._copied.popleft())

    def _unpin(self, copy: _Copy) -> None:
        self._scheduler.unpin(copy.pinned)
        self._pinned -= len(copy.pinned)

    def _write(self) -> None:
        give_way()
        while True:
            try:
                copy = self._copies.get(timeout=_EVENTS_EVERY_S)
            except Empty:
                self._publish([])
                continue
            if copy is None:
                return
            try:
                self._copy_down(copy)
            except Exception:
                log.exception("blocks could not be copied to the KV tiers")
            # Let go by a command or the next `filled`: commands wait for a step, whose blocks need room.
            self._copied.append(copy)
            self._post(self._unpin_copied)
            self._publish([])

    def _copy_down(self, copy: _Copy) -> None:
        for first in range(0, len(copy.blocks), self._batch):
            names = copy.blocks[first : first + self._batch]
            buffers = self._buffers(len(names))
            self._model.read_blocks(copy.pinned[first : first + self._batch], buffers)
            self._tiers.store(
                [(name, parent, buffer) for (name, parent), buffer in zip(names, buffers, strict=True)]
            )

    # Events

    def _remember(self, sequence: Sequence, index: int) -> None:
        """Keep what an event will say of a block. The lock is held."""
        content_id = sequence.content_ids[index]
        if content_id in self._told:
            self._told.move_to_end(content_id)
            return
        size = self._pool.block_tokens
        self._told[content_id] = _Told(
            sequence.content_ids[index - 1] if index else None,
            sequence.tokens[index * size : (index + 1) * size],
            sequence.salt,
        )
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)

    def _publish(self, more: list[TierEvent]) -> None:
        """Announce what the tiers say, then `more`."""
        with self._lock:
            events: list[KVEvent] = []
            for change in [*self._tiers.drain_events(), *more]:
                if change.stored:
                    self._stored(change, events)
                else:
                    self._removed(change, events)
            if events:
                # Inside the lock, so that the order of two threads' events is that of what happened.
                self._post(lambda: self._events.publish(time.time(), events))

    def _stored(self, change: TierEvent, events: list[KVEvent]) -> None:
        told = self._told.get(change.content_id)
        if change.tier in self._announced.get(change.content_id, ()):
            return
        if told is None:
            self._untold.setdefault(change.content_id, set()).add(change.tier)
            return
        self._announced.setdefault(change.content_id, set()).add(change.tier)
        name = wire_hash(change.content_id)
        parent = None if told.parent is None else wire_hash(told.parent)
        last = events[-1] if events else None
        follows = isinstance(last, BlockStored) and last.block_hashes[-1] == parent
        medium = self.media[change.tier]
        if parent is not None and follows and last.medium == medium:  # type: ignore[union-attr]
            assert isinstance(last, BlockStored)
            assert last.extra_keys is not None
            last.block_hashes.append(name)
            last.token_ids += told.token_ids
            last.extra_keys.append(None)
            return
        events.append(
            BlockStored(
                block_hashes=[name],
                parent_block_hash=parent,
                token_ids=list(told.token_ids),
                block_size=self._pool.block_tokens,
                medium=medium,
                extra_keys=[[told.salt] if told.salt and parent is None else None],
                group_idx=0,
                kv_cache_spec_kind=FULL_ATTENTION,
            )
        )

    def _removed(self, change: TierEvent, events: list[KVEvent]) -> None:
        _forget(self._untold, change.content_id, change.tier)
        if not _forget(self._announced, change.content_id, change.tier):
            return
        if change.content_id not in self._announced:
            self._told.pop(change.content_id, None)
        name = wire_hash(change.content_id)
        last = events[-1] if events else None
        medium = self.media[change.tier]
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(name)
        else:
            events.append(BlockRemoved(block_hashes=[name], medium=medium, group_idx=0))


def _forget(places: dict[bytes, set[Tier]], content_id: bytes, tier: Tier) -> bool:
    """Take a block's tier out of `places`; False if it was not there."""
    tiers = places.get(content_id)
    if tiers is None or tier not in tiers:
        return False
    tiers.discard(tier)
    if not tiers:
        del places[content_id]
    return True


def batch_blocks(block_bytes: int) -> int:
    """Blocks read from the tiers at once before they are written to the device, and the other way round: each
    thread has memory for so many. With more, fewer waits for the last block of a batch.
    """
    return min(_BATCH_MOST, max(1, _BATCH_BYTES // block_bytes))
