"""A recorded run of a gateway beside what the simulator says of it: replayed, calibrated, predicted.

The first part of a recording calibrates: what the router had learnt of each endpoint by then (step times,
overhead), and what the engines said of themselves (KV tokens, sequences), make a fleet. The workload is then
played on it from arrivals, keys and lengths; how requests fared after that part is only looked at to be
compared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.core.latency import LatencyModel
from sumibi.routing.config import RouterConfig
from sumibi.routing.decisions import Decision, read_decisions
from sumibi.routing.events import AnyEvent, Arrived, Dispatch, Finished, FirstToken
from sumibi.routing.recording import Started
from sumibi.routing.router import Router
from sumibi.routing.views import EndpointView
from sumibi.sim.fleet import FleetSpec, Group
from sumibi.sim.results import Run, percentile
from sumibi.sim.workload import Workload

_decoder: msgspec.json.Decoder[Started | AnyEvent] = msgspec.json.Decoder(Started | AnyEvent)


@dataclass(slots=True)
class Fared:
    """How one request fared. Only requests that were served in full have both figures."""

    arrival_s: float
    """As recorded, after the recording's first arrival."""
    prompt_tokens: int
    ttft_s: float | None = None
    """Arrival at the router to first token."""
    cached_tokens: int | None = None
    """Of its prompt, as the engine counted."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One run of a router, as it was written down."""

    config: RouterConfig
    events: list[AnyEvent]

    @classmethod
    def read(cls, lines: Iterable[bytes]) -> "Recording":
        """From `events.jsonl`. Raises BadRequest: a line that is no record, or not exactly one run."""
        try:
            first, *events = (_decoder.decode(line) for line in lines)
        except (msgspec.MsgspecError, ValueError) as cause:
            raise BadRequest(f"the log is empty or holds a line that is no record: {cause}") from cause
        if not isinstance(first, Started):
            raise BadRequest("the beginning of the run is not in the log")
        run = [event for event in events if not isinstance(event, Started)]
        if len(run) < len(events):
            raise BadRequest("the log holds several runs of a router")
        return cls(first.config, run)

    def arrivals_s(self) -> list[float]:
        """After the first one."""
        times = [event.t for event in self.events if isinstance(event, Arrived)]
        return [t - times[0] for t in times]

    def decisions(self) -> list[Decision]:
        """Those that a fresh router makes of these events, in order."""
        router, made = Router(self.config), list[Decision]()
        for event in self.events:
            for instruction in router.handle(event):
                if isinstance(instruction, Dispatch):
                    decision = router.decision(instruction.decision)
                    assert decision is not None, "the newest decisions are kept"
                    made.append(decision)
        return made

    def learnt(self, requests: int) -> list[EndpointView]:
        """What a router knew of its endpoints when `requests` had arrived."""
        router, left = Router(self.config), requests
        for event in self.events:
            left -= isinstance(event, Arrived)
            if left < 0:
                break
            router.handle(event)
        return router.fleet_view()

    def fared(self) -> list[Fared]:
        """All requests, in order of arrival."""
        found: dict[str, Fared] = {}
        arrived_t: dict[str, float] = {}
        for event in self.events:
            if isinstance(event, Arrived):
                began_t = arrived_t.setdefault(event.request, event.t)
                first_t = next(iter(arrived_t.values()))
                found[event.request] = Fared(began_t - first_t, event.prompt_tokens)
            elif isinstance(event, FirstToken):
                found[event.request].ttft_s = event.t - arrived_t[event.request]
            elif isinstance(event, Finished):
                fared = found[event.request]
                fared.cached_tokens = event.cached_tokens
                fared.prompt_tokens = event.prompt_tokens or fared.prompt_tokens
        return list(found.values())


def differing(made: Sequence[Decision], recorded: Iterable[bytes]) -> tuple[int, int]:
    """(decisions in `decisions.jsonl`, how many of them `made` does not have, bit by bit, in its place).

    Every field of every candidate counts, by its JSON, which holds a float exactly.
    """
    then = [msgspec.json.encode(decision) for decision in read_decisions(recorded)]
    now = [msgspec.json.encode(decision) for decision in made]
    same = sum(a == b for a, b in zip(then, now, strict=False))
    return len(then), max(len(then), len(now)) - same


def fleet(endpoints: Sequence[EndpointView], *, chunk_tokens: int, max_sequences: int) -> FleetSpec:
    """The fleet that a router has learnt, each endpoint with what it knows of that one.

    `chunk_tokens`: the engines' budget of a step; `max_sequences`: that they run at once, unless they said
    so themselves. Raises BadRequest if an engine did not say how much KV it holds.
    """
    groups, overheads_s = [], []
    for number, endpoint in enumerate(endpoints):
        if endpoint.kv_tokens is None:
            raise BadRequest(f"{endpoint.endpoint} does not say how much KV it holds")
        latency, beside_s = by_steps(endpoint.latency, chunk_tokens)
        overheads_s.append(endpoint.overhead_s + beside_s)
        group = Group(
            name=f"engine-{number}",
            model=endpoint.models[0],
            count=1,
            latency=latency,
            kv_tokens=endpoint.kv_tokens,
            chunk_tokens=chunk_tokens,
            max_sequences=endpoint.max_sequences or max_sequences,
        )
        groups.append(group)
    return FleetSpec(name="recorded", groups=groups, overhead_s=sum(overheads_s) / len(overheads_s))


def by_steps(learnt: LatencyModel, chunk_tokens: int) -> tuple[LatencyModel, float]:
    """(coefficients of an engine's steps, seconds of a request beside them) from those of whole prefills.

    A router sees prefills: a + b*n. An engine computes them in ceil(n / chunk) steps, on average half a step
    more than n / chunk, each of which reads the weights (d0) whatever it computes. So d0 / chunk of b is such
    reading, and d0 / 2 of a; the rest of a is spent beside the steps.
    """
    step_s = learnt.d0_s
    latency = msgspec.structs.replace(
        learnt, a_s=step_s, b_s=max(learnt.b_s - step_s / chunk_tokens, learnt.b_s / 2)
    )
    return latency, max(0.0, learnt.a_s - step_s / 2)


def simulated(workload: Workload, run: Run) -> list[Fared]:
    """The same from a simulation of the recorded workload, by recorded arrival."""
    calls, found = run.calls, []
    served = set(calls.done())
    for i in range(len(calls)):
        session = workload.sessions[calls.session[i]]
        arrival_s = (session.start_s or 0.0) + session.turns[calls.turn[i]].offset_ms / 1000
        one = Fared(arrival_s, calls.prompt_tokens[i])
        if i in served:
            one.ttft_s = calls.first_s[i] - calls.arrival_s[i]
            one.cached_tokens = calls.cached_tokens[i]
        found.append(one)
    return sorted(found, key=lambda one: one.arrival_s)


def ttft_p50_s(requests: Iterable[Fared]) -> float:
    """Of those that were served."""
    return percentile([one.ttft_s for one in requests if one.ttft_s is not None], 0.5)


def token_hit_rate(requests: Iterable[Fared]) -> float:
    """Of those that were served; NaN of nothing."""
    served = [(one.cached_tokens, one.prompt_tokens) for one in requests if one.cached_tokens is not None]
    prompt_tokens = sum(prompt for _, prompt in served)
    return sum(cached for cached, _ in served) / prompt_tokens if prompt_tokens else float("nan")
