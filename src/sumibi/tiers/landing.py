"""Where blocks land that somebody waits for, but not for ever."""

import threading
from collections.abc import Sequence

import numpy as np

from sumibi.tiers.blockfile import Header
from sumibi.tiers.host import Bytes
from sumibi.tiers.words import Tier


class Landing:
    """Buffers of a caller, filled by several threads until it goes. What comes later touches none of them."""

    def __init__(self, targets: Sequence[Bytes]) -> None:
        self.targets = targets
        self.tiers: list[Tier | None] = [None] * len(targets)
        """Where the block in each buffer came from; None: none is there."""
        self.headers: dict[int, Header] = {}
        """Of those that came from below host memory."""
        self._locks = [threading.Lock() for _ in targets]
        self._over = False

    @property
    def missing(self) -> list[int]:
        """Buffers that nothing has come for."""
        return [i for i, tier in enumerate(self.tiers) if tier is None]

    def put(self, i: int, payload: Bytes, tier: Tier, header: Header) -> None:
        """Copy a checked block into buffer `i`. Nothing happens where it comes too late."""
        with self._locks[i]:
            if self._over:
                return
            np.copyto(self.targets[i], payload)
            self.headers[i] = header
            self.tiers[i] = tier  # last: who sees it takes the rest as given

    def close(self) -> None:
        """Nothing more is wanted: on return the buffers stay as they are."""
        self._over = True
        for lock in self._locks:
            with lock:
                pass
