"""Clients that dribble, half-close, do not read or vanish: each costs itself, and gives everything back."""

import asyncio
import socket
import time

from benchmarks.soak.client import ask, chat, request_bytes
from benchmarks.soak.engine import reset
from benchmarks.soak.processes import until

VANISHING = 1000
DRIBBLING = 150


async def opened(port):
    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)


async def dribble(port, data, every_s=0.1):
    """Send a byte now and then until the server has had enough; its answer, and when it came."""
    reader, writer = await opened(port)
    began = time.monotonic()
    answer = asyncio.ensure_future(reader.read())
    for at in range(len(data)):
        if answer.done() or writer.transport.is_closing():
            break
        writer.write(data[at : at + 1])
        await asyncio.wait([answer], timeout=every_s)
    try:
        return await answer, time.monotonic() - began
    except ConnectionError:
        return b"", time.monotonic() - began
    finally:
        writer.close()


def test_slow_lorises_are_let_go_and_hold_up_nobody(site, together):
    port, before = site.gateway.port, site.gateway.fds()
    head = request_bytes(chat("x" * 400)).partition(b"\r\n\r\n")[0]
    slow = [dribble(port, head) for _ in range(DRIBBLING)]

    async def others():
        seen = []
        for _ in range(30):
            began = time.monotonic()
            seen.append(((await ask(port, chat())).outcome, time.monotonic() - began < 5.0))
            await asyncio.sleep(0.05)
        return seen

    *lorises, usual = together(*slow, others())
    assert set(usual) == {("ok", True)}
    for answer, took_s in lorises:
        assert answer.startswith(b"HTTP/1.1 408")
        assert 1.5 < took_s < 15.0
    until(lambda: site.gateway.fds() <= before + 5, lambda: f"{site.gateway.fds()} fds, {before} before")


def test_bodies_that_trickle_are_let_go(site, together):
    whole = request_bytes(chat("x" * 5000))
    cut = whole.index(b"\r\n\r\n") + 4

    async def trickle():
        reader, writer = await opened(site.gateway.port)
        writer.write(whole[:cut])
        for at in range(cut, len(whole)):
            if reader.at_eof() or writer.transport.is_closing() or reader._buffer:
                break
            writer.write(whole[at : at + 1])
            await asyncio.sleep(0.05)
        answer = await reader.read()
        writer.close()
        return answer

    for answer in together(*(trickle() for _ in range(20))):
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_thousand_clients_that_vanish_in_their_streams_leave_nothing(site, together):
    gateway = site.gateway
    gateway.assert_nothing_is_held()
    fds, rss = gateway.fds(), gateway.rss_bytes()
    lost = sum(engine.tell("count")["lost"] for engine in site.engines)
    begun = asyncio.Semaphore(100)

    async def vanish(number):
        async with begun:
            reader, writer = await opened(gateway.port)
            writer.write(request_bytes(chat(f"{number}", stream=True, max_tokens=1000, pace_s=0.5)))
            await reader.readuntil(b"data: ")
        await all_there.wait()
        (reset if number % 2 else asyncio.StreamWriter.close)(writer)

    async def watch():
        while sum(engine.tell("count")["running"] for engine in site.engines) < VANISHING:
            await asyncio.sleep(0.1)
        assert gateway.held()["inflight"] == VANISHING
        all_there.set()

    all_there = asyncio.Event()
    together(*(vanish(number) for number in range(VANISHING)), watch())
    gateway.assert_nothing_is_held()
    until(
        lambda: sum(engine.tell("count")["lost"] for engine in site.engines) == lost + VANISHING,
        "the engines have been told of each",
    )
    until(lambda: gateway.fds() <= fds + 5, lambda: f"{gateway.fds()} fds, {fds} before")
    assert gateway.metric("sumibi_attempts_finished_total", 'reason="client_gone"') >= VANISHING
    assert gateway.rss_bytes() - rss < 60e6  # once; what is freed goes back to Python, not to the system


def test_clients_that_half_close_or_never_read_are_gone(site, together):
    gateway = site.gateway
    lost = sum(engine.tell("count")["lost"] for engine in site.engines)

    async def half_close():
        reader, writer = await opened(gateway.port)
        writer.write(request_bytes(chat(stream=True, max_tokens=1000, pace_s=0.1)))
        await reader.readuntil(b"data: ")
        writer.write_eof()
        await reader.read()
        writer.close()

    async def never_read():
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", gateway.port))
        await loop.sock_sendall(sock, request_bytes(chat(stream=True, max_tokens=400_000)))
        while gateway.metric("sumibi_attempts_finished_total", 'reason="client_gone"') < gone + 14:
            await asyncio.sleep(0.1)
        sock.close()

    gone = gateway.metric("sumibi_attempts_finished_total", 'reason="client_gone"')
    together(*(half_close() for _ in range(10)), *(never_read() for _ in range(4)))
    until(
        lambda: sum(engine.tell("count")["lost"] for engine in site.engines) == lost + 14,
        "the engines have been told of each",
    )
