"""Memory that two processes of one machine share: a few block-sized slots, used in turn.

The decode side makes it under a name that cannot be guessed and writes a proof into it; the prefill side
maps it if it finds that name with that proof. The name is taken away as soon as both are connected, so a
killed process leaves nothing behind but what it had just made.
"""

import mmap
import os
import re
import secrets
import stat
from pathlib import Path

from sumibi.engine.transfer.frames import SharedMemory

DIRECTORY = Path("/dev/shm")
SLOTS = 8
PROOF_BYTES = 16
_NAME = re.compile(r"sumibi-kv-[0-9a-f]{32}")
_OFFSET = 4096
"""Slots begin here: after the proof, on a page."""


class Slots:
    """The mapped memory."""

    def __init__(self, pages: mmap.mmap, slots: int, block_bytes: int) -> None:
        self.count = slots
        self._pages = pages
        self._view = memoryview(pages)
        self._block_bytes = block_bytes

    def slot(self, number: int) -> memoryview:
        """The bytes of slot `number`."""
        begin = _OFFSET + number * self._block_bytes
        return self._view[begin : begin + self._block_bytes]

    def close(self) -> None:
        """Unmap. Views of slots must be gone; those that are not keep the pages."""
        self._view.release()
        try:
            self._pages.close()
        except BufferError:
            pass


def make(slots: int, block_bytes: int) -> tuple[SharedMemory, Slots]:
    """New memory, for the decode side. Raises OSError where there is none to be had."""
    name, proof = f"sumibi-kv-{secrets.token_hex(16)}", secrets.token_bytes(PROOF_BYTES)
    path = DIRECTORY / name
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Allocated now: a full file system is an error here, not a SIGBUS in the middle of a copy.
        os.posix_fallocate(handle, 0, _OFFSET + slots * block_bytes)
        pages = mmap.mmap(handle, _OFFSET + slots * block_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(handle)
    pages[:PROOF_BYTES] = proof
    return SharedMemory(name, proof, slots), Slots(pages, slots, block_bytes)


def unlink(memory: SharedMemory) -> None:
    """Take the name away; who has mapped it keeps it."""
    (DIRECTORY / memory.name).unlink(missing_ok=True)


def attach(memory: SharedMemory, block_bytes: int) -> Slots | None:
    """The memory that a peer offers, None if it is not on this machine (or not this user's)."""
    if not _NAME.fullmatch(memory.name) or not 0 < memory.slots <= SLOTS:
        return None
    try:
        handle = os.open(DIRECTORY / memory.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(handle)
        size = _OFFSET + memory.slots * block_bytes
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != size:
            return None
        pages = mmap.mmap(handle, size)
    except OSError:
        return None
    finally:
        os.close(handle)
    if pages[:PROOF_BYTES] != memory.proof:
        pages.close()
        return None
    return Slots(pages, memory.slots, block_bytes)
