"""Pending blocks: what requests of ours are computing where, until the index knows it by itself.

A pending block lives with the reservation that computes it, plus the time by which its event may lag: it
leaves when the endpoint's KV events show the prompt's last block, or, after the request's end, when they
would have by now (a lag learnt per endpoint). Where no events tell, it leaves when the request ends and the
prompt is remembered instead.

To another request with the same prefix it is never a hit: it has to wait for the owner's prefill.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from sumibi.routing.endpoint import Endpoint
from sumibi.routing.index import BlockIndex
from sumibi.routing.requests import Attempt, Request
from sumibi.routing.underway import Underway


class Computing:
    """The prompts that are being computed, or whose events are still to come."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._prompts: dict[Endpoint, dict[Attempt, Request]] = {}
        """By attempt, not by request: clients may use the name of a request again."""
        self._underway = Underway()
        self._ended: list[tuple[float, int, Attempt, Request]] = []
        """A heap of attempts that were over and not announced: (settled by when, number, ...)."""
        self._endings = 0

    def begin(self, request: Request, attempt: Attempt) -> None:
        """It was placed: its blocks are pending there."""
        self._prompts.setdefault(attempt.endpoint, {})[attempt] = request
        self._underway.add(request, attempt)

    def computed(self, request: Request, attempt: Attempt, t: float) -> None:
        """Its prefill is over; the events may have come before."""
        self._settle(request, attempt, t)

    def end(self, request: Request, attempt: Attempt, t: float, *, computed: bool) -> None:
        """Its attempt is over."""
        feed = attempt.endpoint.feed
        if computed and attempt.current and feed is not None and request.announced(attempt.endpoint):
            if attempt in self._prompts.get(attempt.endpoint, ()):
                self._endings += 1
                heappush(self._ended, (t + feed.lag_s, self._endings, attempt, request))
        else:
            self._forget(request, attempt)

    def announced(self, endpoint: Endpoint, t: float) -> None:
        """Events of `endpoint` were taken into the index."""
        for attempt, request in list(self._prompts.get(endpoint, {}).items()):
            if attempt.first_token_t is not None:
                self._settle(request, attempt, t)

    def expire(self, t: float) -> None:
        """Let go of what should have been announced by now."""
        while self._ended and self._ended[0][0] < t:
            _, _, attempt, request = heappop(self._ended)
            self._forget(request, attempt)

    def pending(
        self, keys: Sequence[int], length: int, have: Callable[[Endpoint], int], t: float
    ) -> dict[Endpoint, tuple[int, float]]:
        """For endpoints where more blocks of the first `length` of `keys` are coming than they `have`:
        (blocks from the root, seconds until they are computed).
        """
        found: dict[Endpoint, tuple[int, float]] = {}
        for endpoint, blocks, attempt, request in self._underway.reach(keys, length, have):
            owner, where = request.owner, attempt.computes
            if where.first_token_t is None and not where.current:
                continue  # a leg whose process is gone: nothing will come of it
            left_s = 0.0
            if where.first_token_t is None and owner in where.life.prefills:
                where.endpoint.learner.sync()
                left_s = where.endpoint.prefill_left_s(t, owner)
            if where is not attempt and attempt.first_token_t is None:
                left_s += attempt.candidate.transfer_s
            found[endpoint] = (blocks, left_s)
        return found

    def _settle(self, request: Request, attempt: Attempt, t: float) -> None:
        feed, keys = attempt.endpoint.feed, request.event.keys
        if feed is None or not attempt.current or not request.announced(attempt.endpoint):
            return
        if not keys or self._index.holds(feed.device, keys[-1]):
            assert attempt.first_token_t is not None
            feed.learn_lag(t - attempt.first_token_t)
            self._forget(request, attempt)

    def _forget(self, request: Request, attempt: Attempt) -> None:
        prompts = self._prompts.get(attempt.endpoint)
        if prompts is not None and prompts.pop(attempt, None) is not None:
            self._underway.remove(request, attempt)
            if not prompts:
                del self._prompts[attempt.endpoint]
