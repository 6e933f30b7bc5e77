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
from sumibi.routing.requests import Attempt, Request


class Computing:
    """The prompts that are being computed, or whose events are still to come."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._prompts: dict[Endpoint, dict[Owner, tuple[Request, Attempt]]] = {}
        self._ended: dict[Owner, Attempt] = {}
        """Those whose attempt is over: they have until `settled_by_t`."""

    def begin(self, request: Request, attempt: Attempt) -> None:
        """It was placed: its blocks are pending there."""
        self._prompts.setdefault(attempt.endpoint, {})[request.owner] = (request, attempt)

    def computed(self, request: Request, attempt: Attempt, t: float) -> None:
        """Its prefill is over; the events may have come before."""
        self._settle(request, attempt, t)

    def end(self, request: Request, attempt: Attempt, t: float, *, computed: bool) -> None:
        """Its attempt is over."""
        feed = attempt.endpoint.feed
        if computed and attempt.current and feed is not None and request.announced(attempt.endpoint):
            if request.owner in self._prompts.get(attempt.endpoint, ()):
                attempt.settled_by_t = t + feed.lag_s
                self._ended[request.owner] = attempt
        else:
            self._forget(request.owner, attempt)

    def announced(self, endpoint: Endpoint, t: float) -> None:
        """Events of `endpoint` were taken into the index."""
        for request, attempt in list(self._prompts.get(endpoint, {}).values()):
            if attempt.first_token_t is not None:
                self._settle(request, attempt, t)

    def expire(self, t: float) -> None:
        """Let go of what should have been announced by now."""
        late = [owner for owner, attempt in self._ended.items() if attempt.settled_by_t < t]
        for owner in late:
            self._forget(owner, self._ended[owner])

    def pending(
        self, keys: Sequence[int], length: int, have: dict[Endpoint, int], t: float
    ) -> dict[Endpoint, tuple[int, float]]:
        """For endpoints where more than `have` blocks of the first `length` of `keys` are coming:
        (blocks from the root, seconds until they are computed).
        """
        found: dict[Endpoint, tuple[int, float]] = {}
        for endpoint, prompts in self._prompts.items():
            known = have.get(endpoint)
            if known is None:
                continue
            for owner, (request, attempt) in prompts.items():
                theirs = request.event.keys
                if known >= length or known >= len(theirs) or keys[known] != theirs[known]:
                    continue
                if attempt.life is endpoint.load:
                    known = _common(keys, theirs, known + 1, min(length, len(theirs)))
                    computing = owner in attempt.life.prefills
                    found[endpoint] = (known, endpoint.prefill_left_s(t, owner) if computing else 0.0)
        return found

    def _settle(self, request: Request, attempt: Attempt, t: float) -> None:
        feed, keys = attempt.endpoint.feed, request.event.keys
        if feed is None or not attempt.current or not request.announced(attempt.endpoint):
            return
        if not keys or self._index.holds(feed.device, keys[-1]):
            assert attempt.first_token_t is not None
            feed.learn_lag(t - attempt.first_token_t)
            self._forget(request.owner, attempt)

    def _forget(self, owner: Owner, attempt: Attempt) -> None:
        self._ended.pop(owner, None)
        prompts = self._prompts.get(attempt.endpoint)
        if prompts is not None:
            prompts.pop(owner, None)
            if not prompts:
                del self._prompts[attempt.endpoint]


def _common(ours: Sequence[int], theirs: Sequence[int], low: int, high: int) -> int:
    """How many leading keys are equal: `low` at least, `high` at most. Keys are chained, so this bisects."""
    while low < high:
        middle = (low + high + 1) >> 1
        if ours[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
