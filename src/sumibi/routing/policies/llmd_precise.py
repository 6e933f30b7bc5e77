"""`llmd-precise`: llm-d's weighted scorers over the index of KV events, with speculative entries.

The sum is that of `llmd_weighted`. A match is the longest unbroken run of blocks that KV events announced
(what the router's index has; where no events come, what the router remembers), those in host memory counting
0.8, or the start of a prompt that was sent there less than two seconds ago: events come only after a prompt
was computed. Stores that no events tell of are not known to it.
Source: llm-d-router, preciseprefixcache (Aug 2026), speculativeTTL 2 s, weights of media `gpu` 1.0 and `cpu`
0.8; guide "precise" (Jun 2026).

Known holes: those of the sum; a prefill that waits for longer than two seconds is forgotten meanwhile.
The original also pays some 30-60 ms for tokenising elsewhere, which is not imitated.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.policies.base import Ask, Policy
from sumibi.routing.policies.chains import common_blocks
from sumibi.routing.policies.llmd_weighted import Scorers

SPECULATIVE_S: Final = 2.0
"""Life of a speculative entry."""
HOST: Final = 0.8
"""What a block in host memory counts; one on the device or on a disk of its own counts 1."""


class Precise(Policy):
    """See the module."""

    def __init__(self) -> None:
        self._scorers = Scorers()
        self._sent: dict[str, deque[tuple[float, Sequence[int]]]] = {}
        """Per endpoint (t, keys) of the prompts sent there lately, the oldest first."""

    def choose(self, ask: Ask, candidates: Sequence[Candidate], endpoints: Sequence[Endpoint]) -> list[float]:
        """Minus the weighted sum."""
        matched = [self._matched(ask, c) for c in candidates]
        return self._scorers.choose(endpoints, matched, len(ask.keys))

    def placed(self, ask: Ask, endpoint: Endpoint) -> None:
        """Its blocks are believed to come there soon."""
        self._sent.setdefault(endpoint.name, deque()).append((ask.t, ask.keys))
        self._scorers.placed(endpoint.name)

    def gone(self, endpoint: str) -> None:
        """Its entries are forgotten."""
        self._sent.pop(endpoint, None)

    def _matched(self, ask: Ask, candidate: Candidate) -> float:
        """Blocks."""
        below = (HOST * candidate.host_tokens + candidate.disk_tokens) / ask.block_tokens
        return max(self._on_device(ask, candidate), candidate.matched_tokens // ask.block_tokens + below)

    def _on_device(self, ask: Ask, candidate: Candidate) -> int:
        """Blocks that are there or will be soon."""
        most = candidate.matched_tokens // ask.block_tokens
        sent = self._sent.get(candidate.endpoint)
        if sent:
            while sent and sent[0][0] <= ask.t - SPECULATIVE_S:
                sent.popleft()
            for _, keys in sent:
                most = common_blocks(ask.keys, keys, most)
        return most
