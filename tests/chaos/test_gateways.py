"""A gateway that is told to go under load while another one is up; clocks that jump; a pause."""

import asyncio
import json
import os
import signal
import time

from benchmarks.soak.client import Client, ask, chat
from benchmarks.soak.processes import GatewayProcess, until

CLIENTS = 24


class Balanced:
    """A client behind a load balancer over two doors: it goes on with the connection it has until that is
    closed, and then to the other door. A request that got no byte of an answer because its connection was
    refused or closed is sent again, as balancers do.
    """

    def __init__(self, ports, at):
        self.clients, self.at = [Client(port) for port in ports], at
        self.again = 0

    async def ask(self, body):
        for _ in range(3):
            seen = await self.clients[self.at].ask(body)
            if seen.closes or seen.refused:
                self.at = 1 - self.at
            if not seen.refused:
                return seen
            self.again += 1
        return seen

    def close(self):
        for client in self.clients:
            client.close()


def test_a_gateway_that_is_told_to_go_under_load_fails_no_request(site_of_all, together, tmp_path):
    doors = [GatewayProcess(site_of_all.engines, tmp_path / name) for name in ("a", "b")]
    going, staying = doors
    ports, end = [door.port for door in doors], time.monotonic() + 4.0

    async def client(number):
        mine, seen = Balanced(ports, number % 2), []
        while time.monotonic() < end:
            body = chat(f"{number}", stream=number % 3 > 0, max_tokens=1 + number % 9, pace_s=0.03)
            seen.append(await mine.ask(body))
        mine.close()
        return seen, mine.again

    async def go():
        await asyncio.sleep(1.0)
        assert going.held()["requests"] > 0
        going.process.send_signal(signal.SIGTERM)

    try:
        *clients, _ = together(*(client(number) for number in range(CLIENTS)), go())
        answers = [one for seen, _ in clients for one in seen]
        assert {one.outcome for one in answers} == {"ok"}
        assert all(len(seen) > 1 for seen, _ in clients)
        assert sum(one.closes for one in answers) > 0  # those in flight were finished, and told to go
        assert going.process.wait(5.0) == 0
        staying.assert_nothing_is_held()
        for door in doors:
            lines = (door.log.parent / "usage.jsonl").read_text().splitlines() if door is going else ()
            assert {json.loads(line)["reason"] for line in lines} <= {"stop"}
    finally:
        assert [door.stop() for door in doors] == [0, 0]


def test_a_wall_clock_that_jumps_by_years_changes_no_decision(site, together):
    gateway = site.another("jumps", timeouts={"first_byte_s": 3.0, "keep_alive_s": 3.0}, jumps=True)
    try:
        bodies = [
            chat(f"{n}", stream=n % 2 > 0, pace_s=0.05, trouble=("well", "reset")[n % 5 == 0])
            for n in range(60)
        ]
        seen = together(*(ask(gateway.port, body) for body in bodies))
        assert {one.outcome for one in seen} <= {"ok", "error event: engine_gone"}
        assert [one.outcome for one in seen].count("ok") == 60
        gateway.assert_nothing_is_held()
        assert all(each["up"] for each in gateway.fleet()["endpoints"])
        assert gateway.metric("sumibi_request_duration_seconds_sum") < 60 * 10
    finally:
        assert gateway.stop() == 0
    records = [json.loads(line) for line in (site.directory / "jumps/usage.jsonl").read_text().splitlines()]
    assert len(records) == 60
    assert all(0 <= record["ttft_s"] <= record["duration_s"] < 10 for record in records)
    assert max(record["t"] for record in records) - min(record["t"] for record in records) > 1e8


def test_a_gateway_that_was_stopped_for_longer_than_its_limits_goes_on_as_if_nothing_was(site, together):
    """A paused container: the time in which nothing ran is nobody's delay."""
    gateway = site.gateway

    async def pause():
        await asyncio.sleep(0.5)
        os.kill(gateway.process.pid, signal.SIGSTOP)
        await asyncio.sleep(4.0)
        os.kill(gateway.process.pid, signal.SIGCONT)

    bodies = [chat(stream=n % 2 > 0, max_tokens=20, pace_s=0.2 if n % 2 else 1.0) for n in range(20)]
    *seen, _ = together(*(ask(gateway.port, body) for body in bodies), pause())
    assert {one.outcome for one in seen} == {"ok"}
    until(lambda: all(each["up"] for each in gateway.fleet()["endpoints"]), "both engines are up")
    assert gateway.metric("sumibi_process_pauses_total") == 1
