"""Files of blocks read past the page cache, into aligned memory of the thread that reads.

A block file is read once and is then in host memory. Through the page cache the kernel would copy it page by
page, for twice the processor time and about two thirds of the speed (docs/decisions/0019). A file system that
knows no such reads is told apart by its first refusal.
"""

import errno
import logging
import mmap
import os
import threading
from contextlib import suppress

import numpy as np

from sumibi.tiers.blockfile import Corrupt
from sumibi.tiers.host import Bytes

_log = logging.getLogger(__name__)
_ALIGNED = 4096
_HUGE = 2 << 20
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectReads:
    """Reads files of up to `most` blocks of `block_bytes` bytes (with their headers). Any thread may call."""

    def __init__(self, block_bytes: int, most: int, name: str) -> None:
        """`name`: for the log."""
        self.block_bytes = block_bytes
        # What is read begins and ends at a page.
        self._room = _page_up(most * block_bytes) + _ALIGNED
        self._name = name
        self._ready: list[Bytes] = []
        self._local = threading.local()
        self.direct = hasattr(os, "O_DIRECT")
        """False once the file system has refused: then files are read through the page cache."""

    def prepare(self, threads: int) -> None:
        """Have memory ready for so many threads, which else find it when they first read."""
        self._ready += [self._new_memory() for _ in range(threads)]

    def read(self, path: str, file_bytes: int, start: int, length: int) -> Bytes:
        """`length` bytes from `start` of a file that should have `file_bytes`: in memory that the calling
        thread's next call fills anew. Raises OSError, and Corrupt where the file has more or fewer.
        """
        if self.direct:
            try:
                return self._read(path, os.O_DIRECT, file_bytes, start, length)
            except OSError as cause:
                if cause.errno not in _REFUSALS:
                    raise
                self._fall_back(cause)
        return self._read(path, 0, file_bytes, start, length)

    def _read(self, path: str, flag: int, file_bytes: int, start: int, length: int) -> Bytes:
        memory = self._memory()
        from_page = start // _ALIGNED * _ALIGNED
        whole = memory.data[: _page_up(start + length) - from_page]
        wanted = start + length - from_page
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
        try:
            if os.fstat(fd).st_size != file_bytes:
                raise Corrupt("the file is shorter or longer than its blocks")
            total = 0
            while total < wanted:
                done = os.preadv(fd, [whole[total:]], from_page + total)
                total += done
                if not done or (flag and total % _ALIGNED):
                    break  # the end: a direct read ends between two pages only there
        finally:
            os.close(fd)
        if total < wanted:
            raise Corrupt("the file became shorter")
        return memory[start - from_page : wanted]

    def _fall_back(self, cause: OSError) -> None:
        if self.direct:
            self.direct = False
            _log.warning(
                "kv tier %s: no direct reads here (%s): blocks are read through the page cache, "
                "which is slower",
                self._name,
                cause.strerror,
            )

    def _memory(self) -> Bytes:
        """`_room` bytes of this thread."""
        memory: Bytes | None = getattr(self._local, "memory", None)
        if memory is None:
            try:
                memory = self._ready.pop()
            except IndexError:
                memory = self._new_memory()
            self._local.memory = memory
        return memory

    def _new_memory(self) -> Bytes:
        """On huge pages, if there are any: the device then writes a few long stretches instead of one for
        each page.
        """
        raw = mmap.mmap(-1, self._room + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                raw.madvise(mmap.MADV_HUGEPAGE)
        everything = np.frombuffer(raw, dtype=np.uint8)
        first = -everything.ctypes.data % _HUGE
        memory: Bytes = everything[first : first + self._room]
        memory[:] = 0  # the system gives pages when they are first touched
        return memory


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED) * _ALIGNED
