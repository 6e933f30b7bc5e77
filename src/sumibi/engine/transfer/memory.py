"""What transfers need of the model."""

from collections.abc import Sequence
from typing import Protocol


class BlockMemory(Protocol):
    """The device's KV blocks (`sumibi.engine.model.Model`); both copies from any thread."""

    block_bytes: int

    def read_blocks(self, blocks: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Copy blocks out."""
        ...

    def write_blocks(self, blocks: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Copy blocks in."""
        ...
