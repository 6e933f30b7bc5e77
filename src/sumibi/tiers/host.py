"""Blocks in host memory: slots of one size in one allocation, and which block is in which."""

import ctypes
import logging
import mmap
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sumibi.core.errors import EnvironmentProblem
from sumibi.core.memory import available_memory_bytes
from sumibi.tiers.catalog import Catalog, Entry, Order
from sumibi.tiers.words import Buffer

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; elsewhere it is refused."""
_POPULATE_BYTES = 16 << 20

Bytes = npt.NDArray[np.uint8]


def as_bytes(buffer: Buffer) -> Bytes:
    """`buffer` as an array over the same memory; writable if the buffer is. Copies between such arrays let
    other threads run, which slices of a memoryview do not.
    """
    return np.frombuffer(buffer, dtype=np.uint8)


class HostMemory:
    """`slots` slots. The caller holds the lock of the tiers around every call but `view` and `populate`."""

    def __init__(
        self, slots: int, block_bytes: int, order: Order, gone: Callable[[Entry], None], *, keep: int
    ) -> None:
        """`gone` is told what was pushed out. `keep`: so many blocks stay; more are there only while they are
        read, so with 0 it is a staging area.
        """
        self.slots = slots
        self.keep = keep
        self.block_bytes = block_bytes
        self.catalog = Catalog(slots * block_bytes, order)
        self._gone = gone
        try:
            self._memory = np.empty((slots, block_bytes), dtype=np.uint8)
        except MemoryError as cause:
            available_bytes = available_memory_bytes()
            known = f" ({available_bytes / 1e9:.1f} GB are available)" if available_bytes is not None else ""
            raise EnvironmentProblem(
                f"kv tiers: host_bytes {slots * block_bytes} is more than this machine can"
                f" give{known}; give less"
            ) from cause
        self._free = list(range(slots - 1, -1, -1))

    def populate(self, over: Callable[[], bool]) -> None:
        """Have the system find memory for what is kept now, not at the first use of each slot, which then
        takes several times as long. What is there stays as it is, and slots may be used meanwhile. Ends early
        once `over()`.
        """
        page = mmap.PAGESIZE
        first = -(-self._memory.ctypes.data // page) * page
        end = (self._memory.ctypes.data + self.keep * self.block_bytes) // page * page
        for at in range(first, end, _POPULATE_BYTES):
            if over():
                return
            if _libc.madvise(at, min(_POPULATE_BYTES, end - at), _MADV_POPULATE_WRITE):
                why = os.strerror(ctypes.get_errno())
                _log.info("host memory for KV is not found ahead of its use (%s): first uses are slower", why)
                return

    def view(self, slot: int) -> Bytes:
        """The bytes of a slot."""
        row: Bytes = self._memory[slot]
        return row

    def take(self, spare: Callable[[Entry], bool] | None = None, *, beyond: bool = False) -> int | None:
        """An empty slot, made by pushing a block out if need be; None when all are in use. `beyond`: when all
        that are kept are in use, one of the others will do.

        Where only ancestors of blocks in use are left, the oldest of those goes for which `spare` says that
        it lies elsewhere too.
        """
        if self._free and (self.slots - len(self._free) < self.keep or not self.keep):
            return self._free.pop()
        entry = self.catalog.victim()
        if entry is None and beyond and self._free:
            return self._free.pop()
        if entry is None and spare:
            others = (e for e in self.catalog if not e.pins and spare(e))
            entry = min(others, key=lambda e: e.rank, default=None)
        if entry is None:
            return None
        self.remove(entry)
        self._gone(entry)
        return self._free.pop()

    def give(self, slot: int) -> None:
        """A taken slot stays empty after all."""
        self._free.append(slot)

    def settle(self, slot: int, content_id: bytes, parent: bytes | None) -> Entry | None:
        """A taken slot now holds this block; None, and the slot empty, if another slot does already."""
        if content_id in self.catalog:
            self.give(slot)
            return None
        return self.catalog.add(content_id, parent, self.block_bytes, place=slot)

    def remove(self, entry: Entry) -> None:
        """A block leaves; its slot is empty now or when its last reader is done."""
        self.catalog.remove(entry.content_id)
        if entry.pins:
            entry.doomed = True
        else:
            self._free.append(entry.place)

    def pin(self, entry: Entry) -> None:
        """Somebody reads the slot: it stays as it is until `unpin`."""
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """One reader is done."""
        entry.pins -= 1
        if entry.pins:
            return
        if entry.doomed:
            entry.doomed = False
            self._free.append(entry.place)
        elif not self.keep:
            self.remove(entry)
        else:
            self._trim()

    def _trim(self) -> None:
        """What was there only while it was read, or as much of others, goes."""
        while len(self.catalog) > self.keep:
            entry = self.catalog.victim()
            if entry is None:
                return
            self.remove(entry)
            self._gone(entry)
