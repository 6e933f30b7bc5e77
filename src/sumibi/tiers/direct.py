"""Whole files read past the page cache, into aligned memory of the thread that reads.

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

from sumibi.tiers.host import Bytes

_log = logging.getLogger(__name__)
_ALIGNED = 4096
_HUGE = 2 << 20
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectReads:
    """Reads files of up to `file_bytes` bytes under `name` (for the log). Any thread may call."""

    def __init__(self, file_bytes: int, name: str) -> None:
        # One byte more than the largest good file has, so that a longer one is seen.
        self._room = -(-(file_bytes + 1) // _ALIGNED) * _ALIGNED
        self._name = name
        self._local = threading.local()
        self.direct = hasattr(os, "O_DIRECT")
        """False once the file system has refused: then files are read through the page cache."""

    def read(self, path: str) -> Bytes:
        """The file's bytes from its start, at most a page more than `file_bytes`: in memory that the calling
        thread's next call fills anew. Raises OSError.
        """
        if self.direct:
            try:
                return self._read(path, os.O_DIRECT)
            except OSError as cause:
                if cause.errno not in _REFUSALS:
                    raise
                self._fall_back(cause)
        return self._read(path, 0)

    def _read(self, path: str, flag: int) -> Bytes:
        memory = self._memory()
        whole = memory.data
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
        try:
            total = 0
            while total < self._room:
                done = os.preadv(fd, [whole[total:]], total)
                total += done
                if not done or (flag and total % _ALIGNED):
                    break  # the end: a direct read ends between two pages only there
        finally:
            os.close(fd)
        return memory[:total]

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
        """`_room` bytes of this thread. On huge pages, if there are any: the device then writes a few long
        stretches instead of one for each page.
        """
        memory: Bytes | None = getattr(self._local, "memory", None)
        if memory is None:
            raw = mmap.mmap(-1, self._room + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without huge pages
                    raw.madvise(mmap.MADV_HUGEPAGE)
            everything = np.frombuffer(raw, dtype=np.uint8)
            first = -everything.ctypes.data % _HUGE
            memory = everything[first : first + self._room]
            self._local.memory = memory
        return memory
