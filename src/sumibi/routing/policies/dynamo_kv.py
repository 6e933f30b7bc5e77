"""`dynamo-kv`: the cost of NVIDIA Dynamo's KV router 1.6.1, in blocks; `dynamo-kv-agentic`: agents' preset.

    cost = prefill scale x max(0, prefill blocks - credits) + decode blocks
           + weight x requests running there,    the least wins (temperature 0)
    credits = credit x matched blocks + 0.75 x those in host memory + 0.25 x on disk + 0.5 x in a shared store

Prefill blocks: tokens that running requests still have to compute there (by the match when they were placed)
and the whole of this prompt, over the block size. Decode blocks: distinct blocks of the prompts that run
there, with this one. Matches are from KV events (what the router's index has), below the device what follows
the device's. Output is not counted, as by default. Its block is the router's. Shared stores are an option
there that is off by default and off in the tokens to compute; here it is on where there is a store.
Source: dynamo 1.6.1, kv-router, scheduling/selector and sequences; docs, router presets (experimental).

Known holes, kept: prefill and decode blocks weigh the same, whatever they take; KV that a prompt would push
out costs nothing.
"""

from collections.abc import Sequence
from typing import Final

from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.policies.base import Ask, Policy
from sumibi.routing.policies.chains import Running
from sumibi.routing.policies.inflight import InFlightTokens

DEFAULT_WEIGHTS = (1.0, 1.0, 0.0)
"""`overlap_score_credit` (device), `prefill_load_scale`, `decode_active_request_weight` (in tokens)."""
AGENTIC_WEIGHTS = (2.0, 4.0, 1024.0)
"""`--agentic`, documented after 1.6.1: 64 blocks of 16 tokens for each running request."""
HOST: Final = 0.75
DISK: Final = 0.25
SHARED: Final = 0.5
"""`host_cache_hit_weight`, `disk_cache_hit_weight`, `shared_cache_multiplier` (where one is configured)."""


class DynamoKv(Policy):
    """See the module."""

    def __init__(self, *, agentic: bool = False) -> None:
        self._credit, self._scale, self._request_tokens = AGENTIC_WEIGHTS if agentic else DEFAULT_WEIGHTS
        self._prefill = InFlightTokens()
        self._running: dict[str, Running] = {}
        self._at: dict[str, str] = {}
        """Running request -> endpoint."""
        self._uncached: dict[str, int] = {}
        """Of the request asked for last, by endpoint."""

    def choose(self, ask: Ask, candidates: Sequence[Candidate], endpoints: Sequence[Endpoint]) -> list[float]:
        """Blocks."""
        self._uncached = {c.endpoint: ask.prompt_tokens - _cached_tokens(c) for c in candidates}
        return [self._cost(ask, c, e.load.inflight) for c, e in zip(candidates, endpoints, strict=True)]

    def _cost(self, ask: Ask, candidate: Candidate, requests: int) -> float:
        prefill = (self._prefill.at(candidate.endpoint) + ask.prompt_tokens) / ask.block_tokens
        credit = self._credit * (candidate.matched_tokens // ask.block_tokens)
        if candidate.fetched_tokens:
            below = (
                HOST * candidate.host_tokens + DISK * candidate.disk_tokens + SHARED * candidate.store_tokens
            )
            credit += below / ask.block_tokens
        running = self._running.get(candidate.endpoint)
        decode = len(ask.keys)
        if running is not None:
            decode += running.blocks - running.shared(ask.keys)
        active = self._request_tokens / ask.block_tokens * requests
        return self._scale * max(0.0, prefill - credit) + decode + active

    def placed(self, ask: Ask, endpoint: Endpoint) -> None:
        """It runs there now."""
        self._at[ask.request] = endpoint.name
        self._running.setdefault(endpoint.name, Running()).add(ask.request, ask.keys)
        self._prefill.add(ask.request, endpoint.name, self._uncached[endpoint.name])

    def first_token(self, request: str) -> None:
        """Its prompt is computed."""
        self._prefill.release(request)

    def ended(self, request: str, event: object) -> None:
        """It runs no more."""
        self._prefill.release(request)
        running = self._running.get(self._at.pop(request, ""))
        if running is not None:
            running.remove(request)

    def gone(self, endpoint: str) -> None:
        """All about it is forgotten."""
        self._running.pop(endpoint, None)
        self._prefill.remove(endpoint)


def _cached_tokens(candidate: Candidate) -> int:
    """Tokens of a prompt that count as computed while it waits there."""
    return candidate.matched_tokens + round(HOST * candidate.host_tokens + DISK * candidate.disk_tokens)
