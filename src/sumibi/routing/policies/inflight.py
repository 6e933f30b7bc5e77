"""llm-d's in-flight tokens: prompt tokens that an endpoint still has to compute for requests of ours.

Added when a request is placed (by the match of llm-d's own index), released with the first byte of its
answer, at the latest with its end. Source: llm-d-router, inflightload (Aug 2026), without output estimate.
"""


class InFlightTokens:
    """Tokens by endpoint. A request counts at most once; a late release of a gone endpoint's does nothing."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[str, int]] = {}
        self._totals: dict[str, int] = {}

    def at(self, endpoint: str) -> int:
        """Tokens in flight at `endpoint`."""
        return self._totals.get(endpoint, 0)

    def add(self, request: str, endpoint: str, tokens: int) -> None:
        """`request` was placed with so many tokens to compute."""
        self._requests[request] = (endpoint, tokens)
        self._totals[endpoint] = self.at(endpoint) + tokens

    def release(self, request: str) -> None:
        """Its prompt is computed, or it is over."""
        endpoint, tokens = self._requests.pop(request, ("", 0))
        if endpoint in self._totals:
            self._totals[endpoint] -= tokens

    def remove(self, endpoint: str) -> None:
        """Forget an endpoint, with all that is in flight there."""
        self._totals.pop(endpoint, None)
        for request in [name for name, (at, _) in self._requests.items() if at == endpoint]:
            del self._requests[request]
