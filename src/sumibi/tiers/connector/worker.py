"""The worker's side: owns the tiers, copies blocks out of the device and into it.

Blocks leave the device within the step that filled them, into a staging area that is touched already; a
thread takes them from there to the tiers, whose host memory costs page faults where it is used for the first
time, many times the copy. Blocks come up on threads of their own, into memory of the loader first: what is
broken or late never touches the device. A load whose request is gone cannot write to what is someone else's
by then, because its device blocks come back only when it says that it is done.
"""

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from queue import Queue
from typing import Protocol

import numpy as np

from sumibi.tiers.connector.messages import Change, Hello, Load, Orders, Report, Save
from sumibi.tiers.host import Bytes
from sumibi.tiers.tiers import BlockTiers
from sumibi.tiers.words import Tier, TiersStats
from sumibi.tiers.workers import Workers

_log = logging.getLogger(__name__)
_LOADERS = 2
_LOADS = 1024
BATCH = 16
"""Blocks copied at once."""
_STAGING_BYTES = 64 << 20
_STAGING_WAIT_S = 5.0
_NAP_S = 0.005


class DeviceBlocks(Protocol):
    """The KV of a device, block by block. Any thread may call; a call returns when the copy is done."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""

    def read(self, blocks: Sequence[int], into: Bytes) -> None:
        """Copy blocks out: `into` is (len(blocks), block_bytes)."""

    def write(self, blocks: Sequence[int], source: Bytes) -> None:
        """Copy blocks in."""


class HostBlocks:
    """Blocks of a device that is host memory: one array (blocks, bytes) a layer."""

    def __init__(self, layers: Sequence[Bytes]) -> None:
        self._layers = list(layers)
        self._ends = np.cumsum([layer.shape[1] for layer in layers]).tolist()

    @property
    def block_bytes(self) -> int:
        """See `DeviceBlocks`."""
        return int(self._ends[-1])

    def read(self, blocks: Sequence[int], into: Bytes) -> None:
        """See `DeviceBlocks`."""
        for row, block in zip(into, blocks, strict=True):
            for layer, end in zip(self._layers, self._ends, strict=True):
                np.copyto(row[end - layer.shape[1] : end], layer[block])

    def write(self, blocks: Sequence[int], source: Bytes) -> None:
        """See `DeviceBlocks`."""
        for row, block in zip(source, blocks, strict=True):
            for layer, end in zip(self._layers, self._ends, strict=True):
                np.copyto(layer[block], row[end - layer.shape[1] : end])


class TierWorker:
    """Steps call `begin`, `save`, `finished` and `report`, in this order, on one thread. None of them raises
    for what a tier does.
    """

    def __init__(self, tiers: BlockTiers, device: DeviceBlocks, hello: Hello, *, keeps_host: bool) -> None:
        self._tiers = tiers
        self._device = device
        self._hello: Hello | None = hello
        self._keeps_host = keeps_host
        self._generation = b""
        self._local = threading.local()
        self._loaders = Workers("kv-load", _LOADERS, _LOADS)
        batches = min(64, max(2, _STAGING_BYTES // (BATCH * device.block_bytes)))
        self._storer = Workers("kv-store", 1, batches)
        self._staging: Queue[Bytes] = Queue()
        for _ in range(batches):
            self._staging.put(np.ones((BATCH, device.block_bytes), dtype=np.uint8))  # touched
        self._changed = threading.Condition()
        # Under `_changed`:
        self._loading = 0
        self._done: set[str] = set()
        self._failed: set[int] = set()
        self._missing: list[bytes] = []
        self._staged = 0
        self._confirmed: list[Change] = []

    def begin(self, orders: Orders) -> None:
        """Start this step's loads. Where a new generation begins everything older is thrown away first."""
        if orders.generation != self._generation:
            self._generation = orders.generation
            try:
                # Others go on with what they have in the store, and this engine does not find it any more.
                self._tiers.clear(shared=False)
            except OSError:
                # No harm: the ids of this generation are others.
                _log.exception("KV tiers: what is void could not all be removed; it will make room by and by")
        for load in orders.loads:
            with self._changed:
                self._loading += 1
            if not self._loaders.submit(partial(self._load, load)):
                _log.warning("KV tiers: more than %d loads wait; one more is computed instead", _LOADS)
                self._end_load(load, 0, [])

    def save(self, orders: Orders) -> None:
        """Take away what this step has filled. Waits where more comes than memory takes."""
        try:
            for first in range(0, len(orders.saves), BATCH):
                self._stage(orders.saves[first : first + BATCH], orders.generation)
        except Exception:
            _log.exception("KV tiers: blocks of a step could not be stored")

    def finished(self, *, idle: bool) -> tuple[set[str], set[int]]:
        """Requests whose loads are done, and device blocks that they did not fill, since the last call. With
        nothing to compute it waits a moment for them, rather than being asked a thousand times.
        """
        with self._changed:
            if idle and self._loading and not self._done:
                self._changed.wait(_NAP_S)
            done, failed = self._done, self._failed
            self._done, self._failed = set(), set()
        return done, failed

    def report(self, *, idle: bool) -> Report:
        """What happened since the last report."""
        writing = self._writing()
        if idle and writing and not self._loading:
            # The engine is kept awake only to hear of these: not at full speed.
            time.sleep(_NAP_S)
            writing = self._writing()
        changes = [Change(e.stored, e.content_id, e.tier) for e in self._tiers.drain_events()]
        with self._changed:
            changes += self._confirmed
            self._confirmed = []
            missing, self._missing = self._missing, []
        hello, self._hello = self._hello, None
        return Report(self._generation, hello, changes, missing, writing)

    def stats(self) -> TiersStats:
        """What the tiers count."""
        return self._tiers.stats()

    def close(self) -> None:
        """Write what waits, within a bound, and stop."""
        self._loaders.close(1.0)
        self._storer.close(1.0)
        self._tiers.close()

    def _writing(self) -> int:
        with self._changed:
            staged = self._staged
        return staged + sum(tier.queue_blocks for tier in self._tiers.stats().tiers.values())

    def _buffers(self, count: int) -> Bytes:
        """Memory of the calling thread for `count` blocks, used again in its next call."""
        kept: Bytes | None = getattr(self._local, "buffers", None)
        if kept is None:
            kept = self._local.buffers = np.empty((BATCH, self._device.block_bytes), dtype=np.uint8)
        return kept[:count]

    def _stage(self, saves: Sequence[Save], generation: bytes) -> None:
        """Copy blocks off the device. Raises Empty where the tiers take nothing for too long."""
        staging = self._staging.get(timeout=_STAGING_WAIT_S)
        try:
            self._device.read([save.block for save in saves], staging[: len(saves)])
            with self._changed:
                self._staged += len(saves)
            if not self._storer.submit(partial(self._store, saves, staging, generation)):
                self._unstage(saves, staging)
        except BaseException:
            self._staging.put(staging)
            raise

    def _store(self, saves: Sequence[Save], staging: Bytes, generation: bytes) -> None:
        try:
            if generation != self._generation:
                return
            blocks = zip(saves, staging, strict=False)
            self._tiers.store([(save.content_id, save.parent, buffer) for save, buffer in blocks])
            # Also of those that were here already, which no event tells: the scheduler did not know.
            places = [(save, tier) for save in saves for tier in self._tiers.match([save.content_id])]
            with self._changed:
                for save, tier in places:
                    if tier is not Tier.HOST or self._keeps_host:
                        self._confirmed.append(Change(True, save.content_id, tier))
        finally:
            self._unstage(saves, staging)

    def _unstage(self, saves: Sequence[Save], staging: Bytes) -> None:
        self._staging.put(staging)
        with self._changed:
            self._staged -= len(saves)

    def _load(self, load: Load) -> None:
        came = 0
        missing: list[bytes] = []
        try:
            while came < len(load.content_ids) and not missing:
                ids = load.content_ids[came : came + BATCH]
                buffers = self._buffers(len(ids))
                places = self._tiers.load(ids, list(buffers))
                good = places.index(None) if None in places else len(places)
                self._device.write(load.blocks[came : came + good], buffers[:good])
                missing = [i for i, place in zip(ids, places, strict=True) if place is None]
                came += good
        except Exception:
            _log.exception("KV tiers: a load failed; the rest is computed")
            missing = missing or load.content_ids[came : came + 1]
        self._end_load(load, came, missing)

    def _end_load(self, load: Load, came: int, missing: list[bytes]) -> None:
        with self._changed:
            self._loading -= 1
            self._done.add(load.request_id)
            self._failed.update(load.blocks[came:])
            self._missing += missing
            self._changed.notify_all()
