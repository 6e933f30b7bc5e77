"""`llmd-weighted`: llm-d's weighted scorers over its approximate index (guide "optimized baseline").

    score = 2 queue + 2 free KV + 3 prefix + 2 no-hit-LRU,  the most wins

Known holes: the weights have no unit; a difference of one waiting request is worth a full point of `queue`;
one matched block anywhere switches the spreading of cold prompts off; see `approximate`, too.
"""

from collections.abc import Sequence
from typing import Final

from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.policies import llmd_scores
from sumibi.routing.policies.approximate import ApproximateIndex, capacity_blocks, prompt_blocks
from sumibi.routing.policies.base import Ask, Policy

QUEUE_WEIGHT: Final = 2.0
KV_WEIGHT: Final = 2.0
PREFIX_WEIGHT: Final = 3.0
NO_HIT_WEIGHT: Final = 2.0
"""llm-d guides, optimised baseline (Jun 2026)."""


class Scorers:
    """The weighted sum, whatever index the matches come from."""

    def __init__(self) -> None:
        self._no_hit = llmd_scores.NoHitLru()

    def choose(self, endpoints: Sequence[Endpoint], matched: Sequence[float], blocks: int) -> list[float]:
        """Minus the weighted sum for each endpoint, from its matched blocks of the prompt's `blocks`."""
        parts = zip(
            llmd_scores.queue(endpoints),
            llmd_scores.kv_free(endpoints),
            llmd_scores.prefix(matched, blocks),
            self._no_hit.scores([e.name for e in endpoints], matched),
            strict=True,
        )
        return [
            -(QUEUE_WEIGHT * q + KV_WEIGHT * u + PREFIX_WEIGHT * p + NO_HIT_WEIGHT * n)
            for q, u, p, n in parts
        ]

    def placed(self, endpoint: str) -> None:
        """The request scored last goes there."""
        self._no_hit.placed(endpoint)


class Weighted(Policy):
    """See the module."""

    def __init__(self, match_tokens: int) -> None:
        self._match_tokens = match_tokens
        self._index = ApproximateIndex()
        self._scorers = Scorers()

    def choose(self, ask: Ask, candidates: Sequence[Candidate], endpoints: Sequence[Endpoint]) -> list[float]:
        """Minus the weighted sum."""
        keys, _ = prompt_blocks(ask, self._match_tokens)
        found = self._index.match(keys)
        return self._scorers.choose(endpoints, [found.get(e.name, 0) for e in endpoints], len(keys))

    def placed(self, ask: Ask, endpoint: Endpoint) -> None:
        """Its blocks are believed to be there from now on."""
        keys, block_tokens = prompt_blocks(ask, self._match_tokens)
        self._index.add(endpoint.name, keys, capacity_blocks(endpoint, block_tokens))
        self._scorers.placed(endpoint.name)

    def gone(self, endpoint: str) -> None:
        """Its blocks are forgotten."""
        self._index.remove(endpoint)
