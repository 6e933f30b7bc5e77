"""What the router needs of flow control: one queue (`flow`) before each pool of endpoints.

A pool is the endpoints that serve a model, its adapters included: they compete for the same places. It goes
by the name that the model's prompts are hashed under.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from sumibi.routing.config import RouterConfig
from sumibi.routing.counters import HeldNow
from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Finished
from sumibi.routing.fleet import Fleet
from sumibi.routing.flow import Flow
from sumibi.routing.held import Held
from sumibi.routing.policies import PRICED
from sumibi.routing.requests import Request
from sumibi.routing.sessions import Programs

NOTHING: dict[str, float] = {}


class Gate:
    """All queues of a router, and the programs that requests belong to."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._flows: dict[str, Flow] = {}
        """By pool; made with the first request that is charged or held there."""
        self._programs: dict[str, Programs] = {}
        """By the name that prompts are hashed under."""
        self.held = 0
        """Requests held, all pools together."""
        self.on = config.hold_above_s is not None and config.policy in PRICED
        """False: nothing is ever held, and nobody charged. Other policies are to be seen as they are."""

    def recognise(self, request: Request) -> None:
        """Find out whose it is, before it is held or charged for."""
        event = request.event
        if not self.on or request.program:
            return
        request.program = event.program or event.session
        model = self._fleet.models.get(event.model)
        if not request.program and model is not None:
            programs = self._programs.setdefault(model.key_name, Programs())
            request.program = programs.recognise(event.keys, model.returns.known_blocks(event.keys))

    def ttl_s(self, request: Request) -> float:
        """How long it may wait: its band's limit, or less if it says so."""
        limits = self._limits(request.event.priority)
        longest_s = inf if limits is None else limits
        asked_s = request.event.ttl_s
        return longest_s if asked_s is None else min(longest_s, asked_s)

    def ahead_s(self, request: Request, endpoints: Sequence[Endpoint]) -> dict[str, float]:
        """Endpoint -> seconds of work that is held for it and goes before a request that comes now."""
        flow = self._flows.get(self.pool(endpoints[0])) if self.held else None
        return flow.backlog_s(request.event.priority) if flow is not None and len(flow) else NOTHING

    def holds(self, pick: Candidate) -> bool:
        """Whether a request with this pick is to wait here rather than there."""
        bound_s = self._config.hold_above_s
        return self.on and bound_s is not None and pick.wait_s >= bound_s

    def open(self, endpoints: Sequence[Endpoint], t: float) -> list[Endpoint]:
        """Those of them that could begin soon, whatever the request."""
        bound_s = self._config.hold_above_s
        return [e for e in endpoints if bound_s is None or e.begins_in_s(t) < bound_s]

    def hold(
        self,
        request: Request,
        endpoints: Sequence[Endpoint],
        found: Sequence[Candidate],
        pick: int,
        t: float,
    ) -> bool:
        """Take it in. False if its band is full."""
        flow = self._flow(self.pool(endpoints[0]))
        if flow.full(request):
            return False
        request.pool = self.pool(endpoints[0])
        held = Held(request, request.queued_t, request.queued_t + self.ttl_s(request))
        self._settle(flow, held, found, pick)
        flow.add(held, len(endpoints), t)
        self.held += 1
        return True

    def stays(self, held: Held, found: Sequence[Candidate], pick: int) -> None:
        """It was looked at anew and is held on."""
        self._settle(self._flows[held.request.pool], held, found, pick)

    def leave(self, request: Request, t: float) -> bool:
        """It waits no more. False if it did not wait here."""
        flow = self._flows.get(request.pool) if self.held else None
        if flow is None or flow.remove(request.event.request, t) is None:
            return False
        self.held -= 1
        return True

    def placed(self, request: Request, endpoint: Endpoint, picked: Candidate, t: float) -> None:
        """It goes to `endpoint`: charge its program, instead of what an attempt before was charged."""
        if not self.on:
            return
        self._correct(request, 0, t)
        request.pool = self.pool(endpoint)
        flow, model = self._flow(request.pool), self._fleet.models[request.event.model]
        request.charged_tokens = request.event.prompt_tokens - picked.reused_tokens
        request.charged_s = picked.compute_s / flow.share_per_s(len(model.endpoints))
        request.charged_t = t
        flow.placed(picked.compute_s)
        flow.attained.charge(request.program, request.charged_tokens, request.charged_s, t)

    def ended(self, request: Request, event: Finished) -> None:
        """It is over: what the engine says replaces what was charged."""
        if self.on and event.cached_tokens is not None:
            prompt_tokens = event.prompt_tokens or request.event.prompt_tokens
            self._correct(request, max(0, prompt_tokens - event.cached_tokens), event.t)

    def pools(self) -> list[str]:
        """Those where anybody is held."""
        return [pool for pool, flow in self._flows.items() if len(flow)] if self.held else []

    def pools_of(self, endpoint: Endpoint) -> list[str]:
        """Its pool, if anybody is held there and it might take somebody now."""
        if not self.held or not endpoint.models:
            return []
        pool = self.pool(endpoint)
        return [pool] if len(self._flows.get(pool, ())) else []

    def serve(
        self,
        pool: str,
        t: float,
        place: Callable[[Held, dict[str, float], bool], tuple[str, float, float] | None],
        *,
        anew: bool = False,
    ) -> float | None:
        """Let go whoever may go now. Returns when to look again at the latest, if that was not asked yet."""
        flow = self._flows[pool]
        begins_s = {e.name: e.begins_in_s(t) for e in self._endpoints(pool)}
        flow.serve(t, begins_s, place, anew=anew)
        if flow.wake_t <= t:
            flow.wake_t = inf
        due_t = flow.due_t(t, begins_s)
        if due_t >= flow.wake_t:
            return None
        flow.wake_t = due_t
        return due_t

    def expired(self, t: float) -> Iterable[Held]:
        """Those whose time is over."""
        return [held for pool in self.pools() for held in self._flows[pool].expired(t)]

    def held_now(self) -> list[HeldNow]:
        """All queues that are not empty."""
        return [HeldNow(pool, *band) for pool in self.pools() for band in self._flows[pool].bands()]

    def saturation(self, t: float) -> dict[str, float]:
        """By pool that holds requests: how near its endpoints are to taking none, on the mean."""
        bound_s, result = self._config.hold_above_s, {}
        for pool in self.pools():
            waits_s = [e.begins_in_s(t) for e in self._endpoints(pool)]
            if bound_s is not None and waits_s:
                shares = (min(1.0, wait_s / bound_s) if bound_s else 1.0 for wait_s in waits_s)
                result[pool] = sum(shares) / len(waits_s)
        return result

    def jain(self, t: float) -> dict[str, float]:
        """By pool: how evenly its programs were served lately."""
        return {pool: flow.attained.jain(t) for pool, flow in self._flows.items()}

    def check_integrity(self) -> None:
        """Raises SumibiError if the queues contradict themselves."""
        for flow in self._flows.values():
            flow.check_integrity()

    def _flow(self, pool: str) -> Flow:
        flow = self._flows.get(pool)
        if flow is None:
            flow = self._flows[pool] = Flow(self._config)
        return flow

    def _limits(self, priority: int) -> float | None:
        bands = self._config.bands
        return next((b for b in bands if b.priority == priority), self._config.other_bands).ttl_s

    def pool(self, endpoint: Endpoint) -> str:
        """The pool that an endpoint is in."""
        return self._fleet.key_name(endpoint.models[0])

    def _endpoints(self, pool: str) -> list[Endpoint]:
        """Those of a pool that may take requests now."""
        up = [e for e in self._fleet.endpoints.values() if e.up and e.models and self.pool(e) == pool]
        return [e for e in up if e.unreachable_t is None] or up

    def _correct(self, request: Request, actual_tokens: int, t: float) -> None:
        flow, charged = self._flows.get(request.pool), request.charged_tokens
        if charged and charged != actual_tokens and flow is not None:
            missing = actual_tokens - charged
            due_s = request.charged_s * missing / charged
            flow.attained.correct(request.program, missing, due_s, request.charged_t, t)
            request.charged_tokens, request.charged_s = actual_tokens, request.charged_s + due_s

    def _settle(self, flow: Flow, held: Held, found: Sequence[Candidate], pick: int) -> None:
        """Its home is the pick; of a pair where it waits first."""
        home = found[pick]
        known_blocks = home.reused_tokens // self._fleet.block_tokens(held.request.event.model)
        flow.settle(held, home.prefill or home.endpoint, home.compute_s, known_blocks)
