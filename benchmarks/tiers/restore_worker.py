"""Restores and copies as contestants: blocks of random bytes come out of `BlockTiers`, or out of one array.

Tasks: {"do": "fill"} writes every block to the disk tier and answers the files; {"do": "open", "host": bytes}
opens the tiers anew on what is there; {"do": "load"} brings all blocks up, as the engine does, a batch of
buffers after the other; {"do": "copy"} copies the same bytes from one array to another.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contestant import serve

from sumibi.engine.kvtiers import batch_blocks
from sumibi.tiers import BlockTiers, DiskTier, TiersConfig
from sumibi.tiers.tiers import POPULATING

BLOCK_BYTES = 737_280
"""Of SmolLM2-135M in bf16, 32 tokens: 30 layers, keys and values, 3 heads of 64."""


class Restorer:
    """See the module. `where`: "host", "disk" or "copy"."""

    def __init__(self, where: str, directory: Path, blocks: int, seed: int) -> None:
        self._where = where
        self._directory = directory
        random = np.random.default_rng(seed)
        self._data = random.integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
        self._into = np.ones_like(self._data)  # touched: nobody's time is page faults
        self._ids = [i.to_bytes(16, "big") for i in range(blocks)]
        self._tiers: BlockTiers | None = None
        if where == "host":
            self._tiers = self._opened(self._data.nbytes, disk=False)
            self._store()

    def run(self, task: dict[str, Any]) -> Any:
        """Do one task."""
        if task["do"] == "fill":
            self._tiers = self._opened(self._data.nbytes, disk=True)
            self._store()
            self._tiers.close()
            return sorted(str(path) for path in self._directory.rglob("*.kv"))
        if task["do"] == "open":
            if self._tiers:
                self._tiers.close()
            self._tiers = self._opened(task["host"], disk=True)
            assert self._tiers.flush(60)
            while any(thread.name == POPULATING for thread in threading.enumerate()):
                time.sleep(0.01)
            return True
        self._into[:] = 1
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        if task["do"] == "copy":
            np.copyto(self._into, self._data)
        else:
            self._load()
        took = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}
        assert np.array_equal(self._into, self._data), "what came is not what was written"
        return took

    def _opened(self, host_bytes: int, *, disk: bool) -> BlockTiers:
        tier = DiskTier(str(self._directory), 2 * self._data.nbytes) if disk else None
        return BlockTiers(TiersConfig(host_bytes, tier), block_bytes=BLOCK_BYTES, namespace="restore")

    def _store(self) -> None:
        assert self._tiers
        for i, content_id in enumerate(self._ids):
            parent = self._ids[i - 1] if i else None
            assert self._tiers.store([(content_id, parent, self._data[i])]) == 1
            if i % 8 == 7:
                assert self._tiers.flush(60)
        assert self._tiers.flush(60)

    def _load(self) -> None:
        assert self._tiers
        size = batch_blocks(BLOCK_BYTES)
        for first in range(0, len(self._ids), size):
            came = self._tiers.load(self._ids[first : first + size], list(self._into[first : first + size]))
            assert all(tier == self._where for tier in came), came


def main() -> None:
    """`WHERE DIRECTORY BLOCKS SEED`."""
    where, directory, blocks, seed = sys.argv[1:]
    serve(
        lambda: (
            Restorer(where, Path(directory), int(blocks), int(seed)).run,
            f"numpy {np.__version__}",
        )
    )


if __name__ == "__main__":
    main()
