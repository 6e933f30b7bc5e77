"""A request that the router knows, from its arrival to its end, whatever door it came in by.

What both doors have in common: who asks for what, which attempt is under way, and what the router is told of
it. The HTTP gateway's requests are `completion.Completion`s, the endpoint picker's `epp.exchange.Exchange`s.
"""

from collections.abc import Sequence
from typing import Protocol

from sumibi.gateway.metrics import Metrics, ModelCounters, seconds
from sumibi.gateway.readings import Usage
from sumibi.gateway.terms import Terms
from sumibi.prompts.dialects import PromptRequest
from sumibi.prompts.keys import Prompt
from sumibi.routing.events import Admitted, Arrived, Dispatch, Event, Finished, FinishReason, PromptGrade

_QUEUE_OUTCOMES = {
    FinishReason.CLIENT_GONE: "rejected-context-cancelled",
    FinishReason.SHUTDOWN: "rejected-shutting-down",
}


class Teller(Protocol):
    """What every request needs around it."""

    metrics: Metrics

    def now(self) -> float:
        """Seconds on the clock of all events."""

    def tell(self, event: Event) -> None:
        """Hand an event to the router and carry out what it answers."""

    def over(self, request: "InFlight", reason: FinishReason, usage: Usage | None) -> None:
        """The request is over: count it, write its usage record, forget it."""


class InFlight:
    """See the module."""

    def __init__(
        self,
        teller: Teller,
        asked: PromptRequest,
        *,
        request_id: str,
        tenant: str,
        terms: Terms,
        counters: ModelCounters,
    ) -> None:
        self.id = request_id
        self.asked = asked
        self.tenant = tenant
        self.counters = counters
        """Of its model, from its arrival to its end."""
        self.endpoint = ""
        self.decision = ""
        self.attempt = 0
        self.prompt_tokens = 0
        """By our own count; the engine's replaces it when it comes."""
        self.arrived_t = teller.now()
        self.first_token_t: float | None = None
        self.prefill = ""
        """Where the prompt was computed, if that was elsewhere."""
        self.finish = ""
        """Why the whole answer ended, in the engine's word (`stop`, `length`, ...); empty: it gave none."""
        self.refusal = ""
        """Drop reason, if the router refused the request."""
        self._teller = teller
        self._terms = terms
        self._queued_t: float | None = None  # since when it waits for its first endpoint
        self._arrived = False  # the router knows of the request
        self._over = False

    # -- what the router says

    def dispatch(self, instruction: Dispatch) -> None:
        """Send the request to the endpoint chosen."""
        raise NotImplementedError

    def refuse(self, status: int, reason: str, message: str) -> None:
        """Answer with an error: no endpoint will take the request."""
        raise NotImplementedError

    # -- what its door says

    def arrive(self, prompt: Prompt, only: Sequence[str] | None = None, *, followed: bool = True) -> None:
        """The prompt is known: let the router choose (unless the client left meanwhile), among the endpoints
        `only` if that is given. `followed`: its answer will be seen.
        """
        if self._over:
            return
        asked, teller, terms = self.asked, self._teller, self._terms
        self.prompt_tokens = prompt.prompt_tokens
        self._arrived = True
        teller.tell(
            Arrived(
                t=teller.now(),
                request=self.id,
                model=asked.model,
                keys=prompt.keys,
                prompt_tokens=prompt.prompt_tokens,
                max_tokens=asked.max_tokens,
                tenant=self.tenant,
                session=terms.session,
                program=terms.program,
                priority=terms.priority,
                ttl_s=terms.ttl_s,
                prompt_grade=PromptGrade(prompt.grade),
                stream=asked.stream,
                only=None if only is None else list(only),
                followed=followed,
            )
        )
        if not self._over:
            self._queued_t = teller.now()
            teller.tell(Admitted(t=self._queued_t, request=self.id))

    def shut_down(self) -> None:
        """The drain time is over: end the request with an error."""
        raise NotImplementedError

    # -- inside

    def _chosen(self, instruction: Dispatch) -> None:
        """Take note of where it goes."""
        if instruction.attempt == 1:
            self._left_queue("dispatched")
        self.attempt = instruction.attempt
        self.endpoint = instruction.endpoint
        self.decision = instruction.decision
        self.prefill = instruction.prefill or ""

    def _tell_finished(self, reason: FinishReason, usage: Usage | None, *, answered: bool) -> None:
        if not self._arrived:
            return
        teller = self._teller
        teller.tell(
            Finished(
                t=teller.now(),
                request=self.id,
                attempt=self.attempt,
                reason=reason,
                answered=answered,
                prompt_tokens=usage.prompt_tokens if usage is not None and usage.exact else None,
                cached_tokens=usage.cached_tokens if usage is not None else None,
                output_tokens=usage.output_tokens if usage is not None else None,
            )
        )

    def _left_queue(self, outcome: str) -> None:
        """It waited for its first endpoint no longer: because it has one, or for the reason given."""
        if self._queued_t is not None:
            queue_s = self._teller.metrics.queue_s
            waited = queue_s.get(outcome) or queue_s.setdefault(outcome, seconds())
            waited.observe(self._teller.now() - self._queued_t)
            self._queued_t = None

    def _close(self, reason: FinishReason, usage: Usage | None) -> None:
        """It is over."""
        self._over = True
        self._left_queue(_QUEUE_OUTCOMES.get(reason, "failed"))
        self._teller.over(self, reason, usage)
