"""Blocks that nobody has asked for yet are brought up to host memory, while nobody waits for others."""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from sumibi.tiers.books import Books
from sumibi.tiers.up import Up
from sumibi.tiers.workers import Workers

_TASKS = 64
_BLOCKS = 1 << 14
"""Brought up or waiting for it at once; what is more is dropped."""
_AT_ONCE = 8
"""Blocks read before it is looked whether somebody waits."""
_LOOK_S = 0.005
_PATIENCE_S = 5.0
"""Others have been waiting without a pause for so long: the rest is given up."""


class Prefetch:
    """Brings up what `up` can read. Any thread may call."""

    def __init__(self, books: Books, up: Up) -> None:
        self._books = books
        self._up = up
        self._worker = Workers("kv-prefetch", 1, _TASKS)
        self._waiting: set[bytes] = set()
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """Blocks that are still to come up."""
        return len(self._waiting)

    def bring_up(self, ids: Sequence[bytes]) -> int:
        """See `BlockTiers.prefetch`."""
        books = self._books
        if not books.keeps_host:
            return 0
        with books.lock:
            wanted = [i for i in ids if i not in books.host.catalog and i not in self._waiting]
            room = _BLOCKS - len(self._waiting)
            self.dropped += max(0, len(wanted) - room)
            wanted = wanted[:room]
            self._waiting.update(wanted)
        if not wanted or self._worker.submit(partial(self._run, wanted)):
            return len(wanted)
        with books.lock:
            self._waiting.difference_update(wanted)
            self.dropped += len(wanted)
        return 0

    def close(self, timeout_s: float) -> None:
        """Stop."""
        self._worker.close(timeout_s)

    def _run(self, ids: list[bytes]) -> None:
        """A few blocks at a time, as far as there are any and room for them."""
        books = self._books
        scratch = [np.empty(books.block_bytes, dtype=np.uint8) for _ in range(min(_AT_ONCE, len(ids)))]
        try:
            for first in range(0, len(ids), len(scratch)):
                part = ids[first : first + len(scratch)]
                if not self._others_are_done():
                    with books.lock:
                        self.dropped += len(ids) - first
                    return
                tiers = self._up.read(part, scratch[: len(part)])
                with books.lock:
                    came = [
                        i for i, tier in zip(part, tiers, strict=True) if tier and i in books.host.catalog
                    ]
                    books.brought.update(came)
                    books.prefetched += len(came)
                if None in tiers:
                    return
        finally:
            with books.lock:
                self._waiting.difference_update(ids)

    def _others_are_done(self) -> bool:
        """Wait while somebody loads; False if that does not end, or all does."""
        until_s = time.monotonic() + _PATIENCE_S
        while self._up.loading and not self._books.closed and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return not self._up.loading and not self._books.closed
