"""The real router in cache arithmetic: it chooses, `sim.arithmetic` counts.

Residency is instantaneous, engines have no queues of steps: a replica computes prompts one after another at
the speed of a latency model, so that the router sees requests in flight and learns, and nothing more.
Requests longer than a replica are placed like all others (their beginning stays).
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from sumibi.core.errors import SumibiError
from sumibi.core.kvevents import EventBatch
from sumibi.core.latency import LatencyModel
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Change,
    Dispatch,
    Dispatched,
    EndpointUp,
    EngineBatch,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Instruction,
    KeysAdded,
    KeysRemoved,
    Residency,
    Tick,
    WakeAt,
)
from sumibi.routing.router import Router
from sumibi.sim.arithmetic import Fleet, FleetCount, Request, Stream, play

DEVICE = "gpu"


class RouterChooser:
    """A `Router` as a chooser of `sim.arithmetic.play`."""

    def __init__(
        self,
        config: RouterConfig,
        replicas: int,
        capacity_blocks: int,
        block_tokens: int,
        *,
        speed: LatencyModel,
        names_sessions: bool,
        told: LatencyModel | None = None,
    ) -> None:
        self.router = Router(config)
        self._block_tokens = block_tokens
        self._capacity = capacity_blocks
        self._speed = speed
        self._names_sessions = names_sessions
        self._names = [f"replica-{i}" for i in range(replicas)]
        self._free_s = [0.0] * replicas
        self._batches = [0] * replicas
        self._later: list[tuple[float, int, Event]] = []
        self._pushed = 0
        self._made = 0
        self._t = 0.0
        for name in self._names:
            self._tell(
                EndpointUp(
                    t=0.0,
                    endpoint=name,
                    models=["model"],
                    engine_block_tokens=block_tokens,
                    kv_tokens=capacity_blocks * block_tokens,
                    has_events=True,
                    latency=told or speed,
                    process_start_s=0.0,
                )
            )

    def choose(self, request: Request, fleet: Fleet) -> int:
        """Tell the router of all that happened until now and of this request; the replica it names."""
        self._advance(request.arrival_ms / 1000)
        self._made += 1
        name = f"r{self._made}"
        turn, session = request.turn, request.session
        keys = request.keys if turn.tail is None else request.keys[:-1]
        arrived = Arrived(
            t=self._t,
            request=name,
            model="model",
            keys=keys,
            prompt_tokens=turn.prompt_tokens,
            max_tokens=turn.max_tokens,
            session=session.name if self._names_sessions else "",
            priority=session.priority,
            stream=True,
        )
        picked = self._picked(self._tell(arrived) + self._tell(Admitted(t=self._t, request=name)))
        while picked is None:
            if not self._later:
                raise SumibiError(f"the router placed request {name} nowhere")
            picked = self._picked(self._step())
        self._tell(Dispatched(t=self._t, request=name, attempt=picked.attempt, endpoint=picked.endpoint))
        self._attempt = picked.attempt
        return self._names.index(picked.endpoint)

    def placed(
        self, request: Request, replica: int, hit_tokens: int, matched: int, removed: list[Sequence[int]]
    ) -> None:
        """Tell the router what the replica's cache gained and lost; plan the rest of the request."""
        keys = request.keys if request.turn.tail is None else request.keys[:-1]
        known = {request.keys[-1]} if request.turn.tail is not None else set()
        kept = keys[: self._capacity]
        changes: list[Change] = [
            KeysRemoved(DEVICE, [key for key in stretch if key not in known]) for stretch in removed
        ]
        if len(kept) > matched:
            parent = kept[matched - 1] if matched else None
            changes.append(KeysAdded(DEVICE, parent, kept[matched:]))
        if changes:
            self._publish(replica, changes)
        turn, name = request.turn, f"r{self._made}"
        begin_s = max(self._t, self._free_s[replica])
        first_s = begin_s + self._speed.prefill_s(turn.prompt_tokens - hit_tokens, hit_tokens)
        self._free_s[replica] = first_s
        end_s = first_s + turn.output_tokens * self._speed.decode_step_s(1, turn.prompt_tokens)
        self._push(FirstToken(t=first_s, request=name, attempt=self._attempt))
        self._push(
            Finished(
                t=end_s,
                request=name,
                attempt=self._attempt,
                reason=FinishReason.STOP,
                answered=True,
                prompt_tokens=turn.prompt_tokens,
                cached_tokens=hit_tokens,
                output_tokens=turn.output_tokens,
            )
        )

    def _publish(self, replica: int, changes: list[Change]) -> None:
        number = self._batches[replica]
        self._batches[replica] += 1
        batch = EventBatch(seq=number, ts=self._t, events=[])
        name = self._names[replica]
        self._tell(EngineBatch(t=self._t, endpoint=name, batch=batch, digest=number))
        self._tell(Residency(t=self._t, endpoint=name, changes=changes))

    def _advance(self, t: float) -> None:
        while self._later and self._later[0][0] <= t:
            self._step()
        self._t = max(self._t, t)

    def _step(self) -> list[Instruction]:
        """The next thing that happens by itself."""
        at, _, event = heappop(self._later)
        self._t = max(self._t, at)
        return self._tell(event)

    def _push(self, event: Event) -> None:
        self._pushed += 1
        heappush(self._later, (event.t, self._pushed, event))

    def _tell(self, event: Event) -> list[Instruction]:
        told = self.router.handle(event)
        for instruction in told:
            if isinstance(instruction, WakeAt):
                self._push(Tick(t=max(instruction.at, self._t)))
        return told

    @staticmethod
    def _picked(instructions: list[Instruction]) -> Dispatch | None:
        return next((one for one in instructions if isinstance(one, Dispatch)), None)


def play_router(
    stream: Stream,
    replicas: int,
    capacity_blocks: int,
    config: RouterConfig,
    *,
    speed: LatencyModel,
    names_sessions: bool = False,
    told: LatencyModel | None = None,
) -> FleetCount:
    """What the caches of `replicas` give if the real router chooses.

    `told`: the speed that the router starts from, if it is not the true one.
    """
    chooser = RouterChooser(
        config,
        replicas,
        capacity_blocks,
        stream.block_tokens,
        speed=speed,
        names_sessions=names_sessions,
        told=told,
    )
    return play(stream, replicas, capacity_blocks, chooser)
