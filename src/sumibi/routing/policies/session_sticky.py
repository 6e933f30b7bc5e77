"""`session-sticky`: a session stays where its first request went.

The session is the one that the request names (`Arrived.session`). It is bound to the endpoint with the
fewest tokens in flight (prompts to compute and contexts that decode), of several the one with the fewest
sessions. It is bound anew when its endpoint takes no requests, or after 300 idle seconds. A request that
names none goes where the fewest tokens are in flight.
Source: llm-d-router, session affinity by header (idle TTL 300 s, sweep 10 s); SGLang router's `manual`
policy (min_load, min_group) for the choice.

Known holes: blind to load once bound, to what sub-agents share, and to when moving would pay.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Finished
from sumibi.routing.policies.base import Ask, Policy, ranks

IDLE_S: Final = 300.0


class SessionSticky(Policy):
    """See the module."""

    def __init__(self) -> None:
        self._bound: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Session -> (endpoint, last use), the oldest use first."""
        self._sessions: dict[str, int] = {}
        """Sessions by endpoint."""
        self._running: dict[str, str] = {}
        """Request -> session."""

    def choose(self, ask: Ask, candidates: Sequence[Candidate], endpoints: Sequence[Endpoint]) -> list[float]:
        """0 for the session's endpoint and 1 for the others; else the rank by load and sessions."""
        while self._bound and next(iter(self._bound.values()))[1] <= ask.t - IDLE_S:
            self._unbind(next(iter(self._bound)))
        home, _ = self._bound.get(ask.session, ("", 0.0))
        if ask.session and any(e.name == home for e in endpoints):
            return [float(e.name != home) for e in endpoints]
        return ranks(
            [
                (e.load.prefill_tokens + e.load.decode_kv_tokens, self._sessions.get(e.name, 0))
                for e in endpoints
            ]
        )

    def placed(self, ask: Ask, endpoint: Endpoint) -> None:
        """The session is bound there."""
        if ask.session:
            self._running[ask.request] = ask.session
            self._bind(ask.session, endpoint.name, ask.t)

    def ended(self, request: str, event: Finished) -> None:
        """Its session is idle from now on, if it runs nothing else."""
        session = self._running.pop(request, "")
        if session in self._bound:
            self._bind(session, self._bound[session][0], event.t)

    def gone(self, endpoint: str) -> None:
        """Its sessions are bound anew when they come back."""
        for session in [session for session, (at, _) in self._bound.items() if at == endpoint]:
            self._unbind(session)

    def _bind(self, session: str, endpoint: str, t: float) -> None:
        self._unbind(session)
        self._bound[session] = (endpoint, t)
        self._sessions[endpoint] = self._sessions.get(endpoint, 0) + 1

    def _unbind(self, session: str) -> None:
        endpoint, _ = self._bound.pop(session, ("", 0.0))
        if endpoint:
            self._sessions[endpoint] -= 1
            if not self._sessions[endpoint]:
                del self._sessions[endpoint]
