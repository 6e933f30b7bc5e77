"""Pending blocks: what requests of ours are computing where, until the index knows it by itself.

A pending block lives with the reservation that computes it, plus the time by which its event may lag: it
leaves when the endpoint's KV events show the prompt's last block, or, after the request's end, when they
would have by now (a lag learnt per endpoint). Where no events tell, it leaves when the request ends and the
prompt is remembered instead.

To another request with the same prefix it is never a hit: it has to wait for the owner's prefill.
"""

from collections.abc import Sequence

from sumibi.routing.fleet import Endpoint
from sumibi.routing.index import BlockIndex
from sumibi.routing.ledger import Owner
from sumibi.routing.requests import Request


class Computing:
    """The prompts that are being computed or whose events are still to come."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._prompts: dict[Owner, Request] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, request: Request) -> None:
        """It was placed: its blocks are pending there."""
        self._prompts[request.owner] = request

    def computed(self, request: Request, t: float) -> None:
        """Its prefill is over: the events may have come before."""
        self._settle(request, t)

    def end(self, request: Request, t: float, *, computed: bool) -> None:
        """Its attempt is over."""
        attempt = request.attempt
        assert attempt is not None
        feed = attempt.endpoint.feed
        if computed and attempt.current and feed is not None and request.announced(attempt.endpoint):
            attempt.settled_by_t = t + feed.lag_s
        else:
            self._prompts.pop(request.owner, None)

    def announced(self, endpoint: Endpoint, t: float) -> None:
        """Events of `endpoint` were taken into the index."""
        for request in list(self._prompts.values()):
            attempt = request.attempt
            if attempt is not None and attempt.endpoint is endpoint and attempt.first_token_t is not None:
                self._settle(request, t)

    def expire(self, t: float) -> None:
        """Let go of what should have been announced by now."""
        for owner, request in list(self._prompts.items()):
            attempt = request.attempt
            if attempt is not None and attempt.settled_by_t is not None and attempt.settled_by_t < t:
                del self._prompts[owner]

    def pending(
        self, keys: Sequence[int], length: int, have: dict[Endpoint, int], t: float
    ) -> dict[Endpoint, tuple[int, float]]:
        """For endpoints where more than `have` blocks of the first `length` of `keys` are coming:
        (blocks from the root, seconds until they are computed).
        """
        found: dict[Endpoint, tuple[int, float]] = {}
        for owner, request in self._prompts.items():
            attempt = request.attempt
            assert attempt is not None
            endpoint = attempt.endpoint
            known = have.get(endpoint)
            if known is None or not attempt.current:
                continue
            if endpoint in found:
                known = found[endpoint][0]
            theirs = request.event.keys
            if known >= length or known >= len(theirs) or keys[known] != theirs[known]:
                continue
            blocks = _common(keys, theirs, known + 1, min(length, len(theirs)))
            left_s = endpoint.prefill_left_s(t, owner) if owner in endpoint.load.prefills else 0.0
            found[endpoint] = (blocks, left_s)
        return found

    def _settle(self, request: Request, t: float) -> None:
        attempt = request.attempt
        assert attempt is not None
        feed, keys = attempt.endpoint.feed, request.event.keys
        if feed is None or not attempt.current or not request.announced(attempt.endpoint):
            return
        if not keys or self._index.holds(feed.device, keys[-1]):
            assert attempt.first_token_t is not None
            feed.learn_lag(t - attempt.first_token_t)
            del self._prompts[request.owner]


def _common(ours: Sequence[int], theirs: Sequence[int], low: int, high: int) -> int:
    """How many leading keys are equal: `low` at least, `high` at most. Keys are chained, so this bisects."""
    while low < high:
        middle = (low + high + 1) >> 1
        if ours[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
