"""The loop of events around the router and the replicas: a shell like the gateway, with a clock of its own.

The router gets what a gateway would tell it, when it would hear of it: nothing here looks into it, and
nothing of it knows that it is simulated. What it is told can be written down (`log`) and replayed
(`routing.recording`).
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import exp, inf, log
from random import Random

import msgspec

from sumibi.core.errors import ConfigError, SumibiError
from sumibi.core.latency import LatencyModel
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import (
    Admitted,
    Arrived,
    AskReplay,
    Dispatch,
    Dispatched,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Instruction,
    Prefetch,
    Refuse,
    Tick,
    WakeAt,
)
from sumibi.routing.policies import check_pairing
from sumibi.routing.router import Router
from sumibi.sim.faults import Faults
from sumibi.sim.fleet import FleetSpec, Store
from sumibi.sim.hearing import Hearing
from sumibi.sim.pairs import Pairs
from sumibi.sim.replica import Replica, join
from sumibi.sim.results import Calls, Status
from sumibi.sim.sessions import Player, Playing
from sumibi.sim.site import Call, Site
from sumibi.sim.stream import Stream
from sumibi.sim.tiers import Blocks, Link
from sumibi.sim.workload import Workload

WRONG_BY = 3.0
"""Wrong constants are off by a factor between 1/3 and 3, even on a logarithmic scale."""
REPLAY_S = 0.02
"""From the request for missed KV events to the answer."""
WAIT_S = 0.01
"""Between two looks of an engine whether it may go on with what it brings up."""
STALLED_S = 7_200.0
"""Virtual time in which no step of any replica ends although requests are open: a bug, ours or a policy's."""
_PROGRESS_EVERY = 64


class World:
    """One simulation. `run` plays it to its end."""

    def __init__(
        self,
        workload: Workload,
        fleet: FleetSpec,
        config: RouterConfig,
        *,
        users: int | None,
        seed: int,
        wrong_constants: bool,
        noise: float,
        observer: Callable[[Event], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.router = Router(config, observer=observer)
        self.calls = Calls()
        self._workload = workload
        self._numbers = {id(session): number for number, session in enumerate(workload.sessions)}
        self._fleet = fleet
        self._progress = progress
        self._heap: list[tuple[float, int, Callable[[float, object], None], object]] = []
        self._pushed = 0
        self._calls_made = 0
        self._moved_s = 0.0
        """When something happened last that was no clock's doing."""
        self._open: dict[str, Call] = {}
        self._answered: dict[str, list[int]] = {}
        """Prompts that were answered by engines that can be told to bring them up, by request."""
        self._last: dict[tuple[int, str], str] = {}
        """By session and agent, the request of these."""
        self.hints_dropped = 0
        self._seen: set[int] = set()
        """Keys of all prompts so far."""
        self._models = {name for group in fleet.groups for name in (group.model, *group.adapters)}
        self.sites: list[Site] = []
        self._by_name: dict[str, Site] = {}
        self._pairs = Pairs(
            fleet.overhead_s,
            push=self._push,
            tell=self._tell,
            arm=self._arm,
            enter=self._enter,
            close=self._close,
        )
        self._hearing = Hearing(
            fleet, workload.block_tokens, self.sites, self.router, push=self._push, tell=self._tell
        )
        self._faults = Faults(
            fleet,
            self._by_name,
            self._hearing,
            self._pairs,
            push=self._push,
            arm=self._arm,
            attempt_failed=self._attempt_failed,
        )
        self._build(seed, wrong_constants, noise)
        self._player = Player(workload, users, seed, self._expect)
        self._total = self._player.left

    def _build(self, seed: int, wrong_constants: bool, noise: float) -> None:
        """Replicas and endpoints of the fleet."""
        fleet, block_tokens = self._fleet, self._workload.block_tokens
        for group in fleet.groups:
            if group.kv_tokens < block_tokens:
                raise ConfigError(
                    f"fleet {fleet.name}: kv_tokens of group {group.name!r} must hold at least one block of"
                    f" workload {self._workload.name!r}, {block_tokens} tokens, not {group.kv_tokens}"
                )
        store = None
        if fleet.store is not None:
            link = Link(fleet.store.gb_per_s, fleet.store.latency_s)
            store = Blocks(fleet.store.tokens // block_tokens, link)
        told: dict[LatencyModel, LatencyModel] = {}
        engine: list[Site] = []
        for number, (name, group) in enumerate(fleet.endpoints()):
            if group.role != "both":
                check_pairing(self.router.config.policy)
            replica = Replica(
                name,
                group,
                block_tokens,
                noise=noise,
                seed=seed * 1009 + number,
                store=store,
                reads=_reads(fleet.store),
            )
            latency = replica.times.model
            if wrong_constants:
                latency = told.setdefault(latency, wrong(latency, seed, len(told)))
            stream = Stream(name, fleet.kv_replay, self._tell, self._hearing.last_taken)
            site = Site(number, replica, stream, latency, fleet.scrape_interval_s)
            self.sites.append(site)
            self._by_name[name] = site
            engine.append(site)
            if len(engine) == group.ranks:
                join([each.replica for each in engine])
                for each in engine:
                    each.peers = engine
                engine = []

    def run(self) -> float:
        """Play to the end. Returns the virtual time of the last request's end."""
        for site in self.sites:
            self._hearing.up(0.0, site)
        for fault in self._fleet.faults:
            self._push(fault.at_s, self._faults.begin, fault)
        self._push(0.0, self._scrape, None)
        self._player.begin()
        heap, player = self._heap, self._player
        t = 0.0
        while player.left:
            t, _, action, what = heappop(heap)
            action(t, what)
        if self._progress is not None:
            self._progress(self._total, self._total)
        return t

    # --- the loop ---

    def _push(self, t: float, action: Callable[[float, object], None], what: object) -> None:
        self._pushed += 1
        heappush(self._heap, (t, self._pushed, action, what))

    def _tell(self, event: Event) -> None:
        """Give the router an event and carry out what it answers."""
        instructions = self.router.handle(event)
        if instructions:
            self._obey(event.t, instructions)

    def _obey(self, t: float, instructions: Iterable[Instruction]) -> None:
        for instruction in list(instructions):
            match instruction:
                case Dispatch():
                    self._dispatch(t, instruction)
                case Refuse():
                    call = self._open[instruction.request]
                    self._close(t, call, Status.REFUSED)
                case WakeAt():
                    self._push(max(t, instruction.at), self._tick, None)
                case AskReplay():
                    site = self._by_name[instruction.endpoint]
                    site.stream.asked()
                    self._push(t + REPLAY_S, self._hearing.replay, (site, instruction.from_seq))
                case Prefetch():
                    self._bring_up(t, instruction)
                case _:
                    pass

    def _bring_up(self, t: float, hint: Prefetch) -> None:
        """The hint is at the engine at once. It is dropped while others wait for what they fetch."""
        site, keys = self._by_name[hint.endpoint], self._answered.get(hint.request)
        if keys is None or not site.alive or site.replica.fetching:
            self.hints_dropped += 1
        else:
            self._bring_more(t, (site, site.start_s, keys))

    def _bring_more(self, t: float, what: object) -> None:
        """Read some blocks, or wait until nobody else waits for what it fetches."""
        assert isinstance(what, tuple)
        site, start_s, keys = what
        if not site.alive or site.start_s != start_s:
            return
        fetching = site.replica.fetching
        if fetching:
            # They go on at the end of a step, which may be later than when all has come.
            ready_s = max(ready_s for ready_s, _, _ in fetching)
            self._push(max(t + WAIT_S, ready_s), self._bring_more, what)
            return
        reading = site.replica.memory.bring_up(keys, t)
        if reading is not None:
            blocks, ready_s = reading
            self._push(ready_s, self._came_up, (site, start_s, keys, blocks))

    def _came_up(self, t: float, what: object) -> None:
        assert isinstance(what, tuple)
        site, start_s, keys, blocks = what
        if site.alive and site.start_s == start_s:
            site.replica.memory.came_up(blocks, keys)
            self._hearing.publish(t, site)
            self._bring_more(t, (site, start_s, keys))

    def _tick(self, t: float, _: object) -> None:
        self._tell(Tick(t=t))

    # --- requests ---

    def _expect(self, t: float, playing: Playing, index: int) -> None:
        self._push(t, self._arrive, (playing, index))

    def _arrive(self, t: float, what: object) -> None:
        assert isinstance(what, tuple)
        playing, index = what
        session = playing.session
        turn = session.turns[index]
        keys = playing.prompt_keys(turn)
        self._calls_made += 1
        self._moved_s = t
        call = Call(f"r{self._calls_made}", playing, index, keys, t)
        self._open[call.name] = call
        call.unavoidable_tokens = turn.prompt_tokens - self._known(keys, turn.prompt_tokens)
        if self._fleet.timeout_s is not None:
            self._push(t + self._fleet.timeout_s, self._give_up, call)
        self._tell(
            Arrived(
                t=t,
                request=call.name,
                model=self._model(session.model),
                keys=keys,
                prompt_tokens=turn.prompt_tokens,
                max_tokens=turn.max_tokens,
                tenant=session.tenant,
                session=self._workload.session_id(session),
                priority=session.priority,
                stream=True,
            )
        )
        if not call.over:
            self._tell(Admitted(t=t, request=call.name))

    def _model(self, asked: str) -> str:
        """Traces name other models than the fleet serves: where it serves one, that one is meant."""
        if asked in self._models:
            return asked
        if len(self._models) == 1:
            return next(iter(self._models))
        raise ConfigError(f"a session asks for model {asked!r}, the fleet has {sorted(self._models)}")

    def _known(self, keys: list[int], prompt_tokens: int) -> int:
        """Tokens of a prompt that an infinite cache would have; its blocks are known from now on."""
        seen, block = self._seen, self._workload.block_tokens
        low, high = 0, len(keys)
        if high and keys[-1] in seen:
            low = high
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in seen:
                low = middle
            else:
                high = middle - 1
        seen.update(keys[low:])
        return min(low, (prompt_tokens - 1) // block) * block

    def _dispatch(self, t: float, instruction: Dispatch) -> None:
        call = self._open[instruction.request]
        site = self._by_name[instruction.endpoint]
        call.attempt = instruction.attempt
        call.site, call.source, call.job, call.leg = site, None, None, None
        call.dispatch_s = t
        decision = self.router.decision(instruction.decision)
        assert decision is not None
        call.predicted_tokens = decision.picked.reused_tokens
        if instruction.prefill is not None:
            self._pairs.begin(t, call, self._by_name[instruction.prefill])
            return
        self._tell(Dispatched(t=t, request=call.name, attempt=call.attempt, endpoint=instruction.endpoint))
        self._push(t + self._fleet.overhead_s, self._enter, (call, call.attempt))

    def _enter(self, t: float, what: object) -> None:
        """The request comes to the engine's queue."""
        assert isinstance(what, tuple)
        call, attempt = what
        if call.over or call.attempt != attempt:
            return
        site, turn = call.site, call.playing.session.turns[call.index]
        if not site.alive:
            self._attempt_failed(t, call, FinishReason.REFUSED)
        elif not site.replica.fits(turn.prompt_tokens, turn.output_tokens):
            self._finish(t, call, FinishReason.REJECTED, Status.REJECTED)
        else:
            call.job = self._pairs.job(call, max(1, turn.output_tokens))
            site.replica.submit(call.job, t)
            self._arm(site)

    def _advance(self, t: float, what: object) -> None:
        """The phase of a replica may be over: it is, unless it was cut meanwhile."""
        assert isinstance(what, Site)
        if what.armed_s == t:
            what.armed_s = inf
        if what.replica.due_s != t:
            return
        self._moved_s = t
        what.replica.advance(t)
        for site in what.peers:
            replica = site.replica
            if replica.imported:
                for job in replica.imported:
                    call = job.owner
                    assert isinstance(call, Call)
                    self._pairs.fetched(t, call)
                replica.imported.clear()
            if replica.first:
                for job in replica.first:
                    call = job.owner
                    assert isinstance(call, Call)
                    if job is call.leg:
                        continue
                    call.first_s = t
                    self._tell(FirstToken(t=t, request=call.name, attempt=call.attempt))
                replica.first.clear()
            if replica.done:
                for job in replica.done:
                    call = job.owner
                    assert isinstance(call, Call)
                    if job is call.leg:
                        self._pairs.computed(t, call)
                    else:
                        self._finish(t, call, FinishReason.STOP, Status.DONE)
                replica.done.clear()
            if replica.memory.changes:
                self._hearing.publish(t, site)
        self._arm(what)

    def _arm(self, site: Site) -> None:
        """Look at its replica when its phase is over. An event for another time finds nothing to do."""
        leader = site.peers[0]
        due_s = leader.replica.due_s
        if due_s != leader.armed_s:
            leader.armed_s = due_s
            if due_s < inf:
                self._push(due_s, self._advance, leader)

    def _finish(self, t: float, call: Call, reason: FinishReason, status: Status) -> None:
        """An attempt ended for good."""
        self._pairs.end(t, call)
        job, computed = call.job, call.computed
        done = status is Status.DONE
        self._tell(
            Finished(
                t=t,
                request=call.name,
                attempt=call.attempt,
                reason=reason,
                answered=call.first_s == call.first_s,
                prompt_tokens=job.prompt_tokens if done and job else None,
                cached_tokens=computed.cached_tokens if done and computed else None,
                output_tokens=job.output_tokens if done and job else None,
            )
        )
        if done and call.site is not None and call.site.replica.group.prefetches:
            turn = call.playing.session.turns[call.index]
            before = self._last.get((id(call.playing), turn.agent))
            self._answered.pop(before or "", None)
            self._last[id(call.playing), turn.agent] = call.name
            self._answered[call.name] = call.keys
        self._close(t, call, status)

    def _attempt_failed(self, t: float, call: Call, reason: FinishReason) -> None:
        """An attempt ended badly: the router may try another endpoint."""
        self._pairs.end(t, call)
        before = call.attempt
        answered = call.first_s == call.first_s
        self._tell(Finished(t=t, request=call.name, attempt=before, reason=reason, answered=answered))
        if call.attempt == before and not call.over:
            self._close(t, call, Status.FAILED)

    def _give_up(self, t: float, what: object) -> None:
        assert isinstance(what, Call)
        call = what
        if call.over:
            return
        if call.job is not None and call.site is not None and not call.job.over:
            call.site.replica.abort(call.job, t)
            self._arm(call.site)
        self._finish(t, call, FinishReason.CLIENT_GONE, Status.TIMEOUT)

    def _close(self, t: float, call: Call, status: Status) -> None:
        """Write its row; its session goes on."""
        call.over = True
        del self._open[call.name]
        rows, turn, job = self.calls, call.playing.session.turns[call.index], call.computed
        rows.arrival_s.append(call.arrival_s)
        rows.dispatch_s.append(call.dispatch_s)
        rows.first_s.append(call.first_s)
        rows.end_s.append(t)
        rows.endpoint.append(call.site.number if call.site is not None else -1)
        where = call.source if call.leg is not None else call.site
        rows.prefill.append(where.number if where is not None else -1)
        rows.prompt_tokens.append(turn.prompt_tokens)
        rows.cached_tokens.append(job.cached_tokens or 0 if job is not None else 0)
        rows.lower_tokens.append(job.lower_tokens if job is not None else 0)
        rows.predicted_tokens.append(call.predicted_tokens)
        rows.unavoidable_tokens.append(call.unavoidable_tokens)
        rows.output_tokens.append(turn.output_tokens)
        rows.status.append(status)
        rows.attempts.append(call.attempt)
        rows.priority.append(call.playing.session.priority)
        rows.stage.append(call.playing.stage)
        rows.session.append(self._numbers[id(call.playing.session)])
        rows.turn.append(call.index)
        self._player.over(t, call.playing, call.index)
        if self._progress is not None and not len(rows) % _PROGRESS_EVERY:
            self._progress(len(rows), self._total)

    def _scrape(self, t: float, _: object) -> None:
        if self._open and t - self._moved_s > STALLED_S:
            raise SumibiError(f"nothing moves since {self._moved_s:.0f} s: {next(iter(self._open))} is open")
        self._hearing.scrape(t)
        self._push(t + self._fleet.scrape_interval_s, self._scrape, None)


def _reads(store: Store | None) -> Link | None:
    """One replica's own way to the store, if that is narrower than all together have."""
    if store is None or store.reader_gb_per_s is None:
        return None
    return Link(store.reader_gb_per_s, store.latency_s)


def wrong(true: LatencyModel, seed: int, number: int) -> LatencyModel:
    """Coefficients off by one factor for prefill and another for decode."""
    random = Random(f"wrong constants {seed} {number}")
    prefill, decode = (exp((2.0 * random.random() - 1.0) * log(WRONG_BY)) for _ in range(2))
    return msgspec.structs.replace(
        true,
        a_s=true.a_s * prefill,
        b_s=true.b_s * prefill,
        q_s=true.q_s * prefill,
        d0_s=true.d0_s * decode,
        d1_s=true.d1_s * decode,
        d2_s=true.d2_s * decode,
    )
