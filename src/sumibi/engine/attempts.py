"""What the earlier attempts at a request found in the cache, so that its answer does not count its own work.

A request may come again under its name, because a half of a pair failed: then what the first attempt
pulled or computed lies in the cache. The engine uses it, and the client is not told that it was there.
"""

from collections import OrderedDict

from sumibi.engine.sequence import Sequence
from sumibi.engine.transfer.tickets import Fetch

_REMEMBERED = 4096
"""Requests; of older ones a further attempt is taken for the first."""


class Attempts:
    """One engine's. Used by the step thread alone."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def note(self, sequence: Sequence) -> None:
        """`sequence` was admitted (and, later, has its load): remember what of its prompt was there. A
        further attempt learns its limit instead.
        """
        full_blocks = sequence.content_ids
        if not sequence.request_id or not full_blocks or sequence.output_tokens:
            return
        key = (sequence.request_id, full_blocks[-1])
        known = self._found.get(key)
        if sequence.attempt > 1 and known is not None:
            sequence.cached_limit = known
            return
        self._found[key] = _found(sequence)
        self._found.move_to_end(key)
        while len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)


def _found(sequence: Sequence) -> int:
    """Tokens that were there before: a pull's are not, but for those that the peer says it had."""
    if isinstance(sequence.transfer, Fetch):
        return max(sequence.cached_by_source.get("device", 0), sequence.transfer.cached_tokens or 0)
    return sequence.cached_tokens or 0
