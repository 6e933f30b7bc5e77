"""Mixed exits by the hundred thousand: clients and engines without sockets around the real gateway, in a time
of their own. A million takes some ten minutes.

Real are: `http1`, `app`, `completion`, `reply`, `pairs`, `shell`, the router. Made up are the ways in and out
and the clock. At every step something happens to somebody: a request comes, an engine says a little more or
breaks, a client leaves, half-closes, stops reading; engines go, come back and become others.

The oracle is `Parts`: a count of its own of what was reserved and given back, by what goes into the router
and what comes out of it, in the words of the design: a part for the prefill until the first token, one for
decoding until the end. It never looks at the ledger; both are compared on the way, endpoint by endpoint.
"""

import argparse
import asyncio
import heapq
import itertools
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from sumibi.engines.connectors import CONNECTORS
from sumibi.gateway.app import App, Served
from sumibi.gateway.deadlines import Deadlines
from sumibi.gateway.http1 import Connection, Limits
from sumibi.gateway.metrics import Metrics
from sumibi.gateway.prompting import ModelReaders
from sumibi.gateway.server import HttpServer
from sumibi.gateway.shell import Shell, Target
from sumibi.gateway.tenants import Tenants
from sumibi.gateway.transfers import Transfer
from sumibi.routing.config import BandLimits, RouterConfig
from sumibi.routing.events import (
    Dispatch,
    EndpointDown,
    EndpointSuspect,
    EndpointUp,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Prefilled,
    Role,
    Signals,
)
from sumibi.routing.router import Router

MODEL = "m"
ENGINES = (Role.BOTH, Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE, Role.DECODE)
CLIENTS = 60
CHECK_EVERY = 2_000
"""Exits between two comparisons."""
_HOST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n"
_FAILURES = (FinishReason.REFUSED, FinishReason.ENGINE_GONE, FinishReason.TIMEOUT)
_STREAM = (b"content-type", b"content-type", b"text/event-stream")
_TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
_LAST = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
_WHOLE = b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'
_RETURNED = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 5600,
    "remote_block_ids": [[1]],
}


Place = tuple[str, int, int]
"""An endpoint, how often it was removed before, which of its lives."""


class Timer:
    """What `Loop.call_later` gives."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work

    def cancel(self) -> None:
        """Never mind."""
        self.work = None


class Loop:
    """Time that goes on when it is told to; as much of an event loop as the gateway's parts use."""

    def __init__(self) -> None:
        self.t = 1000.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._number = itertools.count()

    def time(self) -> float:
        """Now."""
        return self.t

    def call_later(self, delay_s: float, work: Callable[..., None], *arguments: Any) -> Timer:
        """Do it then."""
        timer = Timer(lambda: work(*arguments))
        heapq.heappush(self._timers, (self.t + delay_s, next(self._number), timer))
        return timer

    def call_soon(self, work: Callable[..., None], *arguments: Any) -> Timer:
        """Do it with the next step."""
        return self.call_later(0.0, work, *arguments)

    def go_on(self, seconds: float) -> None:
        """Let time pass, and do what is due in it, in order."""
        until = self.t + seconds
        while self._timers and self._timers[0][0] <= until:
            due, _, timer = heapq.heappop(self._timers)
            self.t = max(self.t, due)
            if timer.work is not None:
                timer.work()
        self.t = until


class Parts:
    """The oracle: what is reserved and not given back, by events and instructions alone."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.reserved = self.released = 0
        self.now: dict[str, tuple[int, Place | None, Place]] = {}
        """Request -> attempt, where its prefill part is (None: given back), where its decode part is."""
        self.finished: Counter[str] = Counter()
        self._lives: dict[str, int] = {}
        self._removals: Counter[str] = Counter()  # one that comes again counts its lives anew

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)

    def handle(self, event: Event) -> list[Any]:
        """As the router does, with a look at it."""
        instructions = self._router.handle(event)
        match event:
            case FirstToken() | Prefilled(failed=None):
                self._prefill_over(event.request, event.attempt)
            case Prefilled():
                self._over(event.request, event.attempt)
            case Finished():
                self._over(event.request, event.attempt)
                self.finished[event.reason.value] += 1
            case EndpointUp() | EndpointDown() | EndpointSuspect() | Signals():
                if isinstance(event, EndpointDown) and event.removed:
                    self._removals[event.endpoint] += 1
                self._lives = {each.endpoint: each.epoch for each in self._router.fleet_view()}
        for instruction in instructions:
            if isinstance(instruction, Dispatch):
                assert instruction.request not in self.now, "an attempt begins while another one is under way"
                decode = self._place(instruction.endpoint)
                prefill = self._place(instruction.prefill) if instruction.prefill else decode
                self.now[instruction.request] = instruction.attempt, prefill, decode
                self.reserved += 2
        return instructions

    def compare(self) -> None:
        """The router's word on every endpoint is what was counted here."""
        self._router.check_integrity()
        for each in self._router.fleet_view():
            place = self._place(each.endpoint)
            held = prefilling = decoding = coming = 0
            for _, prefill, decode in self.now.values():
                held += place in (prefill, decode)
                prefilling += place == prefill
                decoding += place == decode and prefill is None
                coming += place == decode and prefill not in (None, place)
            theirs = (each.inflight, each.prefilling, each.decoding, each.coming)
            assert theirs == (held, prefilling, decoding, coming), (
                f"{each.endpoint}: {theirs} by the router, {(held, prefilling, decoding, coming)} counted"
            )

    def _place(self, endpoint: str) -> Place:
        return endpoint, self._removals[endpoint], self._lives.get(endpoint, 0)

    def _prefill_over(self, request: str, attempt: int) -> None:
        held = self.now.get(request)
        if held is not None and held[0] == attempt and held[1] is not None:
            self.now[request] = attempt, None, held[2]
            self.released += 1

    def _over(self, request: str, attempt: int) -> None:
        held = self.now.get(request)
        if held is not None and held[0] == attempt:
            del self.now[request]
            self.released += 1 if held[1] is None else 2


class Call:
    """One try of a request at an engine without a socket."""

    def __init__(self, world: "World", endpoint: str, body: bytes, sink: Any) -> None:
        self.endpoint, self.body, self.sink = endpoint, body, sink
        self.status = 0
        self.streams = b'"stream":true' in body.replace(b" ", b"")
        self.is_prefill = b'"do_remote_decode":true' in body
        self.paused = False
        self._world = world

    def cancel(self) -> None:
        """The gateway does not want it any more."""
        self._world.forget(self)

    deliver = cancel

    def pause(self) -> None:
        """The client does not read."""
        self.paused = True

    def resume(self) -> None:
        """It does."""
        self.paused = False


class Door:
    """Where requests to one engine go."""

    def __init__(self, world: "World", endpoint: str) -> None:
        self._world, self._endpoint = world, endpoint

    def call(self, head: bytes, body: bytes, sink: Any) -> Call:
        """Send a request: something will come of it."""
        call = Call(self._world, self._endpoint, body, sink)
        self._world.calls.append(call)
        return call


class Wire:
    """A client's transport: throws away what is sent to it."""

    def __init__(self, world: "World") -> None:
        self.closed = False
        self._world = world
        self.connection: Connection

    def write(self, data: bytes) -> None:
        """Not of interest."""

    writelines = write

    def close(self) -> None:
        """It is lost with the next step."""
        if not self.closed:
            self.closed = True
            self._world.loop.call_soon(self._world.lose, self)

    abort = write_eof = close

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.closed

    def get_extra_info(self, _name: str) -> None:
        """No socket."""

    def can_write_eof(self) -> bool:
        """It can be half-closed."""
        return True

    def pause_reading(self) -> None:
        """Nothing is read by itself."""

    resume_reading = pause_reading


class World:
    """Clients, engines and what is between them."""

    def __init__(self, seed: int, policy: str, connector: str) -> None:
        self.draw = random.Random(f"{seed}/{policy}")
        self.loop = Loop()
        self.calls: list[Call] = []
        self.wires: list[Wire] = []
        config = RouterConfig(
            policy=policy, wait_for_endpoint_s=2.0, hold_above_s=0.2, other_bands=BandLimits(max_requests=40)
        )
        self.router = Router(config)
        self.parts = Parts(self.router)
        self.usage_records = 0
        metrics = Metrics()
        metrics.serve(MODEL)
        shell = Shell(
            cast("Router", self.parts), metrics, record_usage=self._used, recorder=None, wall_clock=time.time
        )
        shell.now, shell._loop = self.loop.time, cast("Any", self.loop)
        shell.decode_wait_s = 5.0
        self.shell = shell
        readers = ModelReaders(None, self.router.block_tokens, self.router.key_name)
        app = App(
            shell, readers, Served(), Tenants.load(None), {"urgent": 5}, admin_key=None, render_metrics=bytes
        )
        self.deadlines = Deadlines(cast("Any", self.loop))
        limits = Limits(head_s=5.0, body_s=5.0, keep_alive_s=10.0, write_s=5.0)
        self.server = HttpServer(app.respond, limits, self.deadlines)
        self.connector = CONNECTORS[connector]
        self.roles = {f"http://e{n}:1#0": role for n, role in enumerate(ENGINES)}
        self.starts = dict.fromkeys(self.roles, 1000.0)
        for endpoint in self.roles:
            transfer = Transfer(self.connector, "h", 5600)
            shell.targets[endpoint] = Target(cast("Any", Door(self, endpoint)), b"e", None, transfer)
            self.come_up(endpoint)

    # -- what may happen

    def step(self) -> None:
        """Something happens to somebody, and time goes on a little."""
        draw = self.draw
        if len(self.shell.completions) < CLIENTS:
            self.request()
        for _ in range(3):
            if self.calls:
                self.answer(draw.choice(self.calls))
        if self.wires and draw.random() < 0.25:
            self.misbehave(draw.choice(self.wires))
        if draw.random() < 0.01:
            self.trouble(draw.choice(list(self.roles)))
        self.loop.go_on(draw.choice((0.0, 0.001, 0.01, 0.05)) if draw.random() < 0.995 else 3.0)

    def request(self) -> None:
        """A client asks; on a connection that it has, or a new one."""
        draw = self.draw
        free = [wire for wire in self.wires[-8:] if not wire.closed and wire.connection._in_flight is None]
        wire = draw.choice(free) if free and draw.random() < 0.6 else self.connect()
        body = {
            "model": MODEL if draw.random() < 0.97 else "unknown",
            "messages": [{"role": "user", "content": f"{draw.randrange(50)}" * draw.choice((20, 400, 4000))}],
            "stream": draw.random() < 0.6,
            "max_tokens": draw.choice((1, 100, 10_000, -1) if draw.random() < 0.1 else (1, 50)),
        }
        if draw.random() < 0.03:
            body["n"] = 2
        data = json.dumps(body).encode()[: -1 if draw.random() < 0.02 else None]
        more = b"X-Llm-D-Inference-Ttl: 100ms\r\n" if draw.random() < 0.1 else b""
        head = b"%b%bContent-Length: %d\r\n\r\n" % (_HOST, more, len(data))
        if draw.random() < 0.02:
            data = data[:-5]  # never whole
        wire.connection.data_received(head + data)

    def connect(self) -> Wire:
        """A new client."""
        wire = Wire(self)
        wire.connection = Connection(self.server)
        self.wires.append(wire)
        wire.connection.connection_made(cast("Any", wire))
        return wire

    def answer(self, call: Call) -> None:
        """An engine says a little more, or breaks."""
        draw, sink = self.draw, call.sink
        chance = draw.random()
        if chance < 0.04:
            self.forget(call)
            sink.answer_failed(draw.choice(_FAILURES), "made up")
        elif not call.status:
            call.status = 200 if chance < 0.9 else draw.choice((400, 429, 500, 503))
            sink.answer_head(call.status, [_STREAM] if call.streams and call.status == 200 else [])
        elif call.paused:
            pass
        elif chance < 0.5 and call.streams:
            sink.answer_body([_TOKEN], last=False)
        else:
            self.forget(call)
            body = _LAST if call.streams else _WHOLE
            if call.is_prefill:
                body = json.dumps({"kv_transfer_params": _RETURNED if chance < 0.95 else None}).encode()
            if call.status == 200 or chance < 0.9:
                sink.answer_body([body], last=True)
            sink.answer_end()

    def misbehave(self, wire: Wire) -> None:
        """A client leaves, half-closes, stops reading or goes on."""
        match self.draw.randrange(4):
            case 0:
                self.lose(wire)
            case 1:
                wire.connection.eof_received()
                wire.close()
            case 2:
                wire.connection.pause_writing()
            case _ if wire.connection._full:
                wire.connection.resume_writing()

    def trouble(self, endpoint: str) -> None:
        """An engine goes, comes back, becomes another, or is only said to be busy."""
        t, draw = self.loop.t, self.draw
        match draw.randrange(5):
            case 0:
                self.shell.tell(EndpointSuspect(t=t, endpoint=endpoint, cause="made up"))
            case 1:
                self.shell.tell(
                    EndpointDown(t=t, endpoint=endpoint, cause="made up", removed=draw.random() < 0.3)
                )
                self.loop.call_later(draw.choice((0.1, 1.0, 3.0)), self.come_up, endpoint)
            case 2:
                self.starts[endpoint] += 1
                self.come_up(endpoint)
            case _:
                self.shell.tell(
                    Signals(
                        t=t,
                        endpoint=endpoint,
                        scraped_t=t,
                        running=draw.randrange(20),
                        waiting=draw.randrange(20),
                        kv_usage=draw.random(),
                        process_start_s=self.starts[endpoint],
                    )
                )

    def come_up(self, endpoint: str) -> None:
        """An engine is there (again)."""
        self.shell.tell(
            EndpointUp(
                t=self.loop.t,
                endpoint=endpoint,
                models=[MODEL],
                engine_block_tokens=16,
                kv_tokens=50_000,
                max_sequences=8,
                process_start_s=self.starts[endpoint],
                role=self.roles[endpoint],
            )
        )

    # -- inside

    def forget(self, call: Call) -> None:
        """Nothing more comes of a call."""
        if call in self.calls:
            self.calls.remove(call)

    def lose(self, wire: Wire) -> None:
        """A client's connection is gone."""
        if wire in self.wires:
            self.wires.remove(wire)
            wire.closed = True
            wire.connection.connection_lost(None)
            del wire.connection  # as transports do

    def _used(self, record: Any) -> None:
        self.usage_records += 1

    def play(self, exits: int, report: Callable[[int], None]) -> None:
        """Until so many requests are over; then everybody leaves, and nothing may be left."""
        next_check = CHECK_EVERY
        while self.usage_records < exits:
            self.step()
            if self.usage_records >= next_check:
                next_check += CHECK_EVERY
                self.parts.compare()
                report(self.usage_records)
        for completion in list(self.shell.completions.values())[::2]:
            completion.shut_down()
        for wire in list(self.wires):
            self.lose(wire)
        self.loop.go_on(30.0)
        self.check_empty()

    def check_empty(self) -> None:
        """Nothing of anybody is left."""
        self.parts.compare()
        counters = self.router.counters()
        left = {
            "requests": len(self.shell.completions),
            "parts": len(self.parts.now),
            "parts reserved and not released": self.parts.reserved - self.parts.released,
            "entries of the ledger": len(self.router._ledger),
            "requests of the router": counters.requests_now + counters.waiting_now,
            "held": sum(held.requests for held in counters.held_now),
            "bytes of bodies": self.server.buffered_bytes,
            "connections": self.server.connections,
            "calls": len(self.calls),
            "waiters": len(self.deadlines.waiting),
            "faults": self.server.faults,
        }
        assert not any(left.values()), left


RUNS = (("cost", "nixlv2"), ("cost", "stream"), ("round-robin", "nixlv2"), ("random", "stream"))
"""Policies and connectors, a part of the exits each."""


def run(exits: int, seed: int, report: Callable[[str], None] = lambda said: None) -> dict[str, int]:
    """Play it; how many parts were reserved, and attempts by how they ended. Raises AssertionError."""
    log = logging.getLogger("sumibi")
    level = log.level
    total: Counter[str] = Counter()

    async def all_of_it() -> None:  # a loop has to be there when a shell is made
        for policy, connector in RUNS:
            world = World(seed, policy, connector)
            world.play(
                exits // len(RUNS),
                lambda done, name=f"{policy}, {connector}": report(f"{name}: {done:,} exits"),
            )
            total.update(world.parts.finished)
            total.update({"parts": world.parts.reserved, "exits": world.usage_records})
            total.update(
                {f"refused: {reason}": count for reason, count in world.router.counters().refused.items()}
            )
            legs = world.shell.metrics.legs
            total.update({f"pairs: {outcome}": count for (_, outcome), count in legs.items()})

    log.setLevel(logging.CRITICAL)  # every change of what is known of an engine is told there
    try:
        asyncio.run(all_of_it())
    finally:
        log.setLevel(level)
    return dict(total)


def main() -> None:
    """Play, and say what happened."""
    known = argparse.ArgumentParser(prog="python -m benchmarks.soak.exits", description=__doc__)
    known.add_argument("--exits", type=int, default=1_000_000, help="[default: 1000000]")
    known.add_argument("--seed", type=int, default=1, help="of everything that is drawn [default: 1]")
    options = known.parse_args()
    began = time.monotonic()
    found = run(options.exits, options.seed, lambda said: print(said, flush=True))
    print(json.dumps(found, indent=1))
    print(f"nothing is left; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
