"""What a policy is: scores for the candidates of a request, the least wins.

A policy is an object of one router for one model. It may keep what it needs to know about requests (its own
index, its own counts); the router tells it when one is placed, brings its first token and ends. It has no
clock and no chance of its own: time and ids come with what it is asked.

The pick is the least score. Of several equal ones a hash of the request's id decides, which is chance that
can be repeated. Scores are kept in the decision record, so the record alone recomputes its pick whatever
the policy has learnt since.
"""

from collections.abc import Callable, Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Finished


class Ask(msgspec.Struct, frozen=True, gc=False):
    """A request that is to be placed, as policies see it: what it carries, and nothing of its answer."""

    request: str
    """Unique id."""
    attempt: int
    number: int
    """Decisions made for the model before this one."""
    t: float
    keys: Sequence[int]
    """Routing keys of the prompt's full blocks."""
    length: int
    """How many of them a cache may spare: never the whole prompt, its last token is always computed."""
    prompt_tokens: int
    block_tokens: int
    session: str
    """Session id that the request carries; empty if none."""
    priority: int
    stream: bool


class Policy:
    """Base of all policies: no hooks, no seconds."""

    priced = False
    """True: the policy looks at the candidates' seconds, so all of them are priced."""

    def choose(self, ask: Ask, candidates: Sequence[Candidate], endpoints: Sequence[Endpoint]) -> list[float]:
        """One score for each candidate (`endpoints` are theirs, in the same order). The least wins."""
        raise NotImplementedError

    def placed(self, ask: Ask, endpoint: Endpoint) -> None:
        """`ask` goes to `endpoint`: it is about to be sent. Comes right after its `choose`."""

    def first_token(self, request: str) -> None:
        """The first byte of an answer to the request that was placed came."""

    def ended(self, request: str, event: Finished) -> None:
        """The attempt that was placed is over, whatever happened to it. It may be placed once more."""

    def gone(self, endpoint: str) -> None:
        """The endpoint was removed for good. Requests placed there may still be told to end."""


Scorer = Callable[[str, int, Sequence[Candidate]], list[float]]
"""(request id, decisions before for the model, candidates) -> scores: a function of the record alone."""


class Pure(Policy):
    """A policy that is nothing but a function of what its decision record holds."""

    def __init__(self, scorer: Scorer, *, priced: bool = False) -> None:
        self._scorer = scorer
        self.priced = priced

    def choose(self, ask: Ask, candidates: Sequence[Candidate], endpoints: Sequence[Endpoint]) -> list[float]:
        """Scores of the function."""
        return self._scorer(ask.request, ask.number, candidates)


def least(request: str, scores: Sequence[float]) -> int:
    """Index of the least score; among equal ones by a hash of the request's id."""
    if len(scores) == 1:
        return 0
    lowest = min(scores)
    first = scores.index(lowest)
    count = scores.count(lowest)
    if count == 1:
        return first
    tied = [i for i, score in enumerate(scores) if score == lowest]
    return tied[xxh3_64_intdigest(request.encode()) % count]


def ranks(keys: Sequence[tuple[float, ...]]) -> list[float]:
    """The keys' dense ranks, the least is 0.0: scores for an order by several criteria."""
    order = {key: float(rank) for rank, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]
