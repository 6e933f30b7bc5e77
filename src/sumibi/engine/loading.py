"""KV that is not computed here: where it may come from, and who is told what was computed.

A waiting sequence that is admitted may find, after the blocks that the device has, more of its prompt at an
outside `KVSource`: a tier below the device, another engine. It then gets all its blocks, and a `Load` holds
them while the source fills them on threads of its own; the sequence is in no step, and everybody else goes
on. What came whole becomes known as if it had been computed, the rest is computed.

Blocks that somebody may still write to never go back to the pool: a load whose sequence has been given up
(aborted, too slow) keeps them until the source has said that it is done.

A `KVSink` is told of blocks that were computed and of sequences that ended, so that it can copy them away.
To read a block later than in the call it holds it with `Scheduler.pin`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sumibi.engine.sequence import Sequence

Done = Callable[[list[str]], None]
"""Called once, from any thread, when nothing more will be written to a load's blocks: where each of the
leading good blocks came from ("host", "disk", ...). Shorter than the load's blocks if not all are good."""


@dataclass(eq=False, slots=True)
class Load:
    """Blocks of one sequence that a source fills."""

    sequence: Sequence
    table: list[int]
    """All physical blocks of the sequence; the load holds them until it is done."""
    first_block: int
    """Index in `table` of the first block to fill."""
    tokens: int
    """Tokens to be had from there on; the last block may be partial."""
    block_tokens: int
    counts: bool
    """Whether what comes counts as the prompt's cached tokens: at the first admission only."""
    deadline_s: float = 0.0
    """The engine loop's clock: then the sequence goes on without it."""
    begun_s: float = 0.0
    abandoned: bool = False
    """Nobody waits for it any more. The source may stop early; it must still say that it is done."""

    @property
    def end_block(self) -> int:
        """Index in `table` after the last block to fill."""
        return self.first_block - (-self.tokens // self.block_tokens)

    @property
    def blocks(self) -> list[int]:
        """Physical blocks to fill, in order."""
        return self.table[self.first_block : self.end_block]

    @property
    def content_ids(self) -> list[bytes]:
        """Of the blocks to fill; shorter by one if the last is not full."""
        return self.sequence.content_ids[self.first_block : self.end_block]


class KVSource(Protocol):
    """Where KV can be had from."""

    @property
    def timeout_s(self) -> float:
        """Longest that a sequence waits for a load."""
        ...

    def look(self, sequence: Sequence) -> None:
        """Find out what `offer` will say of a new sequence. Called once, before it is queued, on a thread
        that may wait (for seconds at most: the request waits too).
        """
        ...

    def offer(self, sequence: Sequence, first_block: int) -> int:
        """Tokens from block `first_block` of `sequence` on whose KV can be had now: whole blocks, unless
        they are all tokens but the last. Step thread: memory look-ups only, no side effects.
        """
        ...

    def load(self, load: Load, done: Done) -> None:
        """Begin to fill `load.blocks`; `done` must be called, whatever happens. Step thread: never waits."""
        ...


class KVSink(Protocol):
    """Who is told what has been computed. Both are called in the step thread and never wait."""

    def filled(self, sequence: Sequence, first_block: int) -> None:
        """The blocks `first_block` to `sequence.filled` of the sequence's table were computed to their end.

        Blocks before `first_block` were told of earlier, or were cached or loaded.
        """
        ...

    def ended(self, sequence: Sequence) -> None:
        """The sequence has ended, as its `finish` says; what it holds it gives back after the call."""
        ...
