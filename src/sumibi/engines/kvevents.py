"""One engine rank's KV events over ZMQ: the live stream, and the replay of what was missed.

Records go to a plain function, one at a time and in the order they came, so nothing is queued here but in
ZMQ itself, whose receive queue is bounded: what it drops shows as a gap in the sequence numbers. What a gap
means, and when to ask for a replay, is for the receiver to decide.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest
from zmq.utils.monitor import parse_monitor_message

from sumibi.core.errors import WireError
from sumibi.core.kvevents import REPLAY_END, EventBatch, decode_batch
from sumibi.engines.discovery import EventSource

_RECEIVE_QUEUE = 20_000
"""Messages ZMQ holds for us; it drops beyond."""
_BURST = 32
"""Messages taken in one go before other work gets its turn."""
_CLOSED = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL


class BatchReceived(msgspec.Struct, frozen=True):
    """One batch. `digest` tells whether a batch seen again is the same one."""

    batch: EventBatch
    digest: int
    replayed: bool


class StreamUp(msgspec.Struct, frozen=True):
    """The publisher is connected (again): what it published before may be missed."""


class StreamLost(msgspec.Struct, frozen=True):
    """The connection to the publisher broke: its process may be gone."""


class MalformedMessage(msgspec.Struct, frozen=True):
    """A message that is no batch; it is skipped, and its number is then missing from the sequence."""

    detail: str


StreamRecord = BatchReceived | StreamUp | StreamLost | MalformedMessage
Sink = Callable[[StreamRecord], None]


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """How long a replay may take before it is given up."""

    total_s: float = 120.0
    idle_s: float = 2.0
    """Without a message: ask again from where it stopped."""
    attempts: int = 3
    """Questions in a row without a message in answer."""


async def follow(source: EventSource, sink: Sink, context: zmq.asyncio.Context) -> None:
    """Hand every record of the live stream to `sink` until cancelled; ZMQ reconnects by itself.

    Raises zmq.ZMQError if the address cannot be bound or is malformed.
    """
    socket = context.socket(zmq.SUB)
    monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | _CLOSED)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        if source.bind:
            socket.bind(source.address)
        else:
            socket.connect(source.address)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_watch(monitor, sink))
            tasks.create_task(_receive(socket, sink))
    finally:
        socket.disable_monitor()
        monitor.close()
        socket.close()


async def replay(
    address: str,
    from_seq: int,
    sink: Sink,
    context: zmq.asyncio.Context,
    limits: ReplayLimits = ReplayLimits(),
) -> bool:
    """Ask for every batch from `from_seq` on and hand them to `sink`; True if the end mark came.

    Accepts both layouts of the answer, with and without a topic frame.
    """
    next_seq, fruitless = from_seq, 0
    try:
        async with asyncio.timeout(limits.total_s):
            while fruitless < limits.attempts:
                before = next_seq
                next_seq, ended = await _replay_once(address, next_seq, sink, context, limits.idle_s)
                if ended:
                    return True
                fruitless = 0 if next_seq > before else fruitless + 1
    except TimeoutError:
        pass
    return False


async def _replay_once(
    address: str, next_seq: int, sink: Sink, context: zmq.asyncio.Context, idle_s: float
) -> tuple[int, bool]:
    """Ask once; (the next sequence number wanted, whether the end mark came)."""
    # DEALER: a REQ socket would see only the first of the answers.
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.connect(address)
        await socket.send_multipart([b"", next_seq.to_bytes(8, "big")])
        taken = 0
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    frames = await socket.recv_multipart()
            except TimeoutError:
                return next_seq, False
            record = _record(frames, replayed=True)
            if record is None:
                return next_seq, True
            if isinstance(record, BatchReceived):
                next_seq = record.batch.seq + 1
            sink(record)
            taken += 1
            if taken % _BURST == 0:
                await asyncio.sleep(0)
    finally:
        socket.close()


async def _watch(monitor: zmq.asyncio.Socket, sink: Sink) -> None:
    """Tell when the connection comes up and when it breaks."""
    connected = False
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            connected = True
            sink(StreamUp())
        elif event & _CLOSED and connected:
            connected = False
            sink(StreamLost())


async def _receive(socket: zmq.asyncio.Socket, sink: Sink) -> None:
    while True:
        for _ in range(_BURST):
            record = _record(await socket.recv_multipart(), replayed=False)
            if record is not None:
                sink(record)
        await asyncio.sleep(0)  # awaiting a message that is already there does not yield


def _record(frames: list[bytes], *, replayed: bool) -> StreamRecord | None:
    """The record of one message, None for the end mark. The last two frames are sequence and payload."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return MalformedMessage(f"{len(frames)} frames, want topic, sequence (8 bytes) and payload")
    seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
    if seq == REPLAY_END:
        return None
    try:
        batch = decode_batch(seq, payload)
    except WireError as cause:
        return MalformedMessage(str(cause))
    return BatchReceived(batch, xxh3_64_intdigest(payload), replayed)
