"""`llmd-sticky-until-saturated`: llm-d's default since Aug 2026.

    S = the endpoints that have at least 80 % of the prompt's blocks (by the approximate index)
    if S is not empty, and the least busy of S would begin at most 18 s later than the least busy other:
        only S is considered, else all are
    then: fewest tokens, in flight there plus those of this prompt that are not there

An endpoint begins after (prompt tokens in flight) / R_peak; R_peak is the rate at which an idle one
computes a chunk of 8,192 tokens.
Source: llm-d-router, prefixcacheaffinity, inflightload and tokenload (Aug 2026).

Known holes, kept: the gate is binary (a turn that adds more than a quarter to its prompt has no home); once
it is open all endpoints are equal; it sees only prefills; it knows no KV capacity; one R_peak for all.
"""

from collections.abc import Sequence
from typing import Final

from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.policies.approximate import ApproximateIndex, capacity_blocks, prompt_blocks
from sumibi.routing.policies.base import Ask, Policy
from sumibi.routing.policies.inflight import InFlightTokens

AFFINITY: Final = 0.80
"""Share of a prompt's blocks that makes an endpoint sticky."""
TOKEN_LIMIT: Final = 4_194_304
"""Where the token-load scorer saturates: above it all are equal."""
CHUNK_TOKENS: Final = 8_192

R_PEAK_TOKENS_PER_S = {
    "qwen3-32b 2xH100": 15_928.0,
    "qwen3-32b 2xH100 (blog, with a limit of 14 s)": 20_480.0,
    "qwen3-32b 2xH100 SGLang": 15_360.0,
    "qwen3-32b TPU v7x": 27_336.0,
    "qwen3-32b TPU v6e": 26_290.0,
    "gpt-oss-120b 1xH100": 39_065.0,
    "gpt-oss-120b H200 (prefill)": 33_821.0,
    "glm-5.2 8xB200 SGLang": 24_027.0,
    "qwen3-coder-480b TPU v7x": 16_444.0,
    "qwen3-vl-32b H200": 15_751.0,
}
"""As published by llm-d (guides and blog, Jun-Aug 2026). Elsewhere it is measured: a prompt of one chunk on
an idle endpoint, over its time to first token."""


class StickyUntilSaturated(Policy):
    """See the module."""

    def __init__(self, r_peak_tokens_per_s: float, limit_s: float, match_tokens: int) -> None:
        self._r_peak = r_peak_tokens_per_s
        self._limit_s = limit_s
        self._match_tokens = match_tokens
        self._index = ApproximateIndex()
        self._inflight = InFlightTokens()
        self._uncached: dict[str, int] = {}
        """Of the request asked for last, by endpoint."""

    def choose(self, ask: Ask, candidates: Sequence[Candidate], endpoints: Sequence[Endpoint]) -> list[float]:
        """Tokens (capped at the limit); those that are not considered lie above the limit."""
        keys, block_tokens = prompt_blocks(ask, self._match_tokens)
        found = self._index.match(keys)
        matched = [found.get(e.name, 0) for e in endpoints]
        uncached = [max(0, ask.prompt_tokens - m * block_tokens) for m in matched]
        self._uncached = {e.name: tokens for e, tokens in zip(endpoints, uncached, strict=True)}
        inflight = [self._inflight.at(e.name) for e in endpoints]
        sticky = [bool(keys) and m / len(keys) >= AFFINITY for m in matched]
        considered = self._considered(sticky, inflight)
        tokens = [float(min(t + new, TOKEN_LIMIT)) for t, new in zip(inflight, uncached, strict=True)]
        return [t if ok else TOKEN_LIMIT + 1 + t for t, ok in zip(tokens, considered, strict=True)]

    def _considered(self, sticky: list[bool], inflight: list[int]) -> list[bool]:
        every = [True] * len(sticky)
        if not any(sticky) or all(sticky):
            return every
        begin_s = [tokens / self._r_peak for tokens in inflight]
        soonest_s = min(s for s, yes in zip(begin_s, sticky, strict=True) if yes)
        others_s = min(s for s, yes in zip(begin_s, sticky, strict=True) if not yes)
        return every if soonest_s - others_s > self._limit_s else sticky

    def placed(self, ask: Ask, endpoint: Endpoint) -> None:
        """Its blocks are believed to be there from now on, its tokens are in flight."""
        keys, block_tokens = prompt_blocks(ask, self._match_tokens)
        self._index.add(endpoint.name, keys, capacity_blocks(endpoint, block_tokens))
        self._inflight.add(ask.request, endpoint.name, self._uncached[endpoint.name])

    def first_token(self, request: str) -> None:
        """Its prompt is computed."""
        self._inflight.release(request)

    def ended(self, request: str, event: object) -> None:
        """It is over."""
        self._inflight.release(request)

    def gone(self, endpoint: str) -> None:
        """All about it is forgotten."""
        self._index.remove(endpoint)
        self._inflight.remove(endpoint)
