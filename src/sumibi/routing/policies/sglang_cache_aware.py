"""`sglang-cache-aware`: the cache-aware policy of SGLang's router 0.3.2 (and its fork, vllm-router 0.1.17).

    if most - fewest requests > 64 and most > 1.5 fewest:   the endpoint with the fewest requests
    else, if more than 30 % of the prompt match:            the endpoint with the longest match
    else:                                                   the endpoint with the smallest tree

Requests are this router's own in flight; the tree is a prefix tree of the prompts it sent, each part marked
with the endpoints that got it, cut back least recently used first. The original's tree is of characters;
ours is of the prompt's full blocks, 67,108,864 characters an endpoint being taken for a quarter as many
tokens. Source: sglang-router 0.3.2, policies/cache_aware and tree.

Known holes, kept: a miss goes to the smallest tree, loaded or not (sglang issue 14532); an imbalance
anywhere drops all locality (32195); requests are counted, not tokens (25466); of several endpoints with the
longest match it is always the same one, so a shared system prompt draws everything to one endpoint.
"""

from collections.abc import Sequence
from typing import Final

from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.index import BlockIndex
from sumibi.routing.policies.base import Ask, Policy
from sumibi.routing.recall import Recall

MATCH_SHARE: Final = 0.3
"""`cache_threshold`"""
ABSOLUTE_IMBALANCE: Final = 64
"""`balance_abs_threshold`, requests"""
RELATIVE_IMBALANCE: Final = 1.5
"""`balance_rel_threshold`"""
TREE_CHARACTERS: Final = 67_108_864
"""`max_tree_size`, characters per endpoint. The original cuts back once a minute, we at once."""
CHARACTERS_PER_TOKEN: Final = 4


class CacheAware(Policy):
    """See the module."""

    def __init__(self) -> None:
        self._index = BlockIndex(limit_blocks=1 << 40)
        self._trees: dict[str, Recall] = {}

    def choose(self, ask: Ask, candidates: Sequence[Candidate], endpoints: Sequence[Endpoint]) -> list[float]:
        """Requests in flight, 0 for the longest match and 1 for others, or blocks of the tree."""
        requests = [e.load.inflight for e in endpoints]
        most, fewest = max(requests), min(requests)
        if most - fewest > ABSOLUTE_IMBALANCE and most > RELATIVE_IMBALANCE * fewest:
            return [float(n) for n in requests]
        trees = [self._tree(e, ask.block_tokens) for e in endpoints]
        holders = sum(1 << tree.holder for tree in trees)
        levels = self._index.match(ask.keys, len(ask.keys), holders)
        if levels:
            blocks, holding = max(levels)
            if blocks * ask.block_tokens > MATCH_SHARE * ask.prompt_tokens:
                first = next(i for i, tree in enumerate(trees) if holding >> tree.holder & 1)
                return [float(i != first) for i in range(len(trees))]
        return [float(self._index.counts[tree.holder]) for tree in trees]

    def placed(self, ask: Ask, endpoint: Endpoint) -> None:
        """The prompt becomes part of the endpoint's tree."""
        self._tree(endpoint, ask.block_tokens).remember(ask.keys)

    def gone(self, endpoint: str) -> None:
        """Its tree is dropped."""
        tree = self._trees.pop(endpoint, None)
        if tree is not None:
            tree.close()

    def _tree(self, endpoint: Endpoint, block_tokens: int) -> Recall:
        tree = self._trees.get(endpoint.name)
        if tree is None:
            limit = TREE_CHARACTERS // CHARACTERS_PER_TOKEN // block_tokens
            tree = self._trees[endpoint.name] = Recall(self._index, limit)
        return tree
