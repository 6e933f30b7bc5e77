"""One request inside the router, from its arrival to its end."""

from enum import Enum

from sumibi.core.prefixcache import Segment
from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Arrived, PromptGrade
from sumibi.routing.ledger import Load, Owner


class State(Enum):
    """Where a request is."""

    ARRIVED = "arrived"
    """Known, nothing decided."""
    WAITING = "waiting"
    """For an endpoint of its model."""
    HELD = "held"
    """Until one can begin with it soon (`flow`)."""
    RUNNING = "running"
    """Placed: it holds a reservation."""


class Attempt:
    """One placement of a request: where, on what grounds, and how far it is."""

    __slots__ = (
        "candidate",
        "decision",
        "decodes",
        "dispatched_t",
        "endpoint",
        "first_token_t",
        "leg",
        "life",
        "number",
        "overhead_s",
        "prompt",
        "sent_t",
    )

    def __init__(self, number: int, endpoint: Endpoint, candidate: Candidate, decision: str) -> None:
        self.number = number
        self.endpoint = endpoint
        self.life: Load = endpoint.load
        """The life of the endpoint that it was placed in."""
        self.candidate = candidate
        self.decision = decision
        self.overhead_s = endpoint.learner.overhead_s
        """Expected beside waiting and computing, the same wherever it goes."""
        self.dispatched_t: float | None = None
        self.first_token_t: float | None = None
        """Of a leg: when it was over."""
        self.leg: Attempt | None = None
        """Of a pair: the prefill elsewhere, as an attempt of its own."""
        self.sent_t: float | None = None
        """Of a pair: when it was sent to `endpoint`, too."""
        self.decodes = 0
        """Requests that decoded there when its first token came, itself included."""
        self.prompt: Segment | None = None
        """Its blocks in the endpoint's `recency`, if the policy prices evictions."""

    @property
    def computes(self) -> "Attempt":
        """Where its prompt is computed: its leg, or itself."""
        return self.leg or self

    @property
    def current(self) -> bool:
        """The process that it was sent to still serves there."""
        return self.life is self.endpoint.load


class Request:
    """A request and its last attempt."""

    __slots__ = (
        "attempt",
        "charged_s",
        "charged_t",
        "charged_tokens",
        "deadline_t",
        "event",
        "owner",
        "pool",
        "program",
        "queued_t",
        "state",
    )

    def __init__(self, event: Arrived, owner: Owner) -> None:
        self.event = event
        self.owner = owner
        self.state = State.ARRIVED
        self.deadline_t = 0.0
        """While it waits: when it is refused."""
        self.queued_t = event.t
        """When it was admitted."""
        self.program = ""
        """Whom its work is charged to; known once it is held or placed."""
        self.pool = ""
        """Of endpoints, by the name of their model, that it was last held for or placed in."""
        self.charged_tokens = 0
        """To its program, at `charged_t`."""
        self.charged_s = 0.0
        """What that put its program's clock forward."""
        self.charged_t = 0.0
        self.attempt: Attempt | None = None

    def running(self, number: int) -> Attempt | None:
        """The attempt with this number, if it is the one under way."""
        attempt = self.attempt
        if self.state is State.RUNNING and attempt is not None and attempt.number == number:
            return attempt
        return None

    def common_blocks(self, other: "Request") -> int:
        """Leading blocks that both prompts have. Keys are chained: one that is equal says that all before
        it are.
        """
        mine, theirs = self.event.keys, other.event.keys
        low, high = 0, min(len(mine), len(theirs))
        while low < high:
            middle = (low + high) // 2
            if mine[middle] == theirs[middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def announced(self, endpoint: Endpoint) -> bool:
        """Whether KV events of `endpoint` will tell of this prompt's blocks."""
        return endpoint.has_events and self.event.prompt_grade is not PromptGrade.APPROXIMATE
