"""KV events on the wire: a PUB socket for what happens now, a ROUTER socket for what was missed.

The wire is vLLM's. Each batch is three frames, `[topic, sequence (8 bytes, big-endian), payload]`; sequence
numbers start at 0 with the process and a batch holds the events of one engine step. A replay request
`[b"", first sequence]` is answered by `[b"", topic, sequence, payload]` for every batch still kept, then
by an end mark with the sequence -1 and an empty payload.

One thread owns both sockets, because a ZeroMQ socket belongs to one thread and a replay must be answered
while the engine idles. The engine's thread hands batches over by an in-process pipe and never waits: at the
pipe's limit (`max_queue_size`) a batch is dropped and counted, and its number stays unused, so that
subscribers see the gap.
"""

import logging
import threading
from collections import deque
from typing import Protocol

import zmq

from sumibi.core.errors import EnvironmentProblem
from sumibi.core.kvevents import REPLAY_END, KVEvent, encode_batch
from sumibi.engine.options import KVEventsConfig

log = logging.getLogger(__name__)

_STOP_S = 5.0
"""Longest wait for the thread to end; what subscribers have not taken by then is lost."""


class EventSink(Protocol):
    """Where the engine's thread puts the events of a step."""

    def publish(self, ts: float, events: list[KVEvent]) -> None:
        """`ts` is wall-clock seconds. Must not block."""


class NullPublisher:
    """For an engine without KV events."""

    def publish(self, ts: float, events: list[KVEvent]) -> None:
        """Do nothing."""


def binds(endpoint: str) -> bool:
    """Whether a publisher binds `endpoint` (True) or connects to it: vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def bind_address(endpoint: str, host: str) -> str:
    """`endpoint` with its `*` made narrower: an engine that serves HTTP on one address (`--host`) has its
    event sockets there too, not on every interface. `tcp://*:5557` on 127.0.0.1 is `tcp://127.0.0.1:5557`.
    """
    if host in ("", "0.0.0.0", "::") or not endpoint.startswith("tcp://*:"):
        return endpoint
    return endpoint.replace("*", f"[{host}]" if ":" in host else host, 1)


class ZmqPublisher:
    """Publishes from `start` to `stop`; `publish` is for one thread, the engine's."""

    def __init__(self, config: KVEventsConfig, *, host: str) -> None:
        """Bind (or connect) the sockets. Raises EnvironmentProblem naming the endpoint."""
        self.dropped = 0
        """Batches lost at the pipe's limit."""
        self.unanswered_replays = 0
        """Replays broken off because their client did not take the answers."""
        self._topic = config.topic.encode()
        self._sequence = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._serve, name="kv-events", daemon=True)
        self._pub = self._socket(zmq.PUB, config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        self._inbox = self._socket(zmq.PULL, 1)  # an in-process pipe holds the sum of both limits
        self._outbox = self._socket(zmq.PUSH, config.max_queue_size)
        try:
            self._inbox.bind("inproc://batches")
            self._outbox.connect("inproc://batches")
            endpoint, replay = config.endpoint, config.replay_endpoint
            if binds(endpoint):
                endpoint = self._bind(self._pub, endpoint, host)
            else:
                self._connect(self._pub, endpoint)
            if replay is not None:
                self._replay = self._socket(zmq.ROUTER, config.buffer_steps + 1)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # full queues are errors, not silent drops
                replay = self._bind(self._replay, replay, host)
        except EnvironmentProblem:
            self._context.destroy(linger=0)
            raise
        self.endpoint = endpoint
        """As configured, with the real port in place of port 0 or `*`."""
        self.replay_endpoint = replay

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def stop(self) -> None:
        """Publish what was handed over, then close the sockets."""
        if self._thread.is_alive():
            self._outbox.send(b"")
            self._thread.join(_STOP_S)
        self._context.destroy(linger=int(1000 * _STOP_S))

    def publish(self, ts: float, events: list[KVEvent]) -> None:
        """Hand a batch to the thread; never waits. See the module's note about the limit."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        try:
            self._outbox.send_multipart([_number(sequence), encode_batch(ts, events)], zmq.NOBLOCK)
        except zmq.Again:
            if self.dropped == 0:
                log.warning("KV events come faster than they can be published: subscribers will see gaps")
            self.dropped += 1

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            # In this order: what was handed over before a request came is part of its answer.
            if not self._take_batches():
                return
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay, self._replay.recv_multipart())

    def _take_batches(self) -> bool:
        """Publish what was handed over; False once `stop` has said that nothing more comes."""
        while self._inbox.poll(0):
            frames = self._inbox.recv_multipart()
            if len(frames) == 1:
                return False
            number, payload = frames
            self._kept.append((number, payload))
            self._pub.send_multipart([self._topic, number, payload])
        return True

    def _answer(self, replay: "zmq.Socket[bytes]", request: list[bytes]) -> None:
        """Send what is kept from the wanted sequence on; a request of another form is ignored."""
        if len(request) != 3 or len(request[2]) != 8:
            log.warning("a replay request has frames of %s bytes: ignored", [len(frame) for frame in request])
            return
        client, _, first = request
        try:
            for number, payload in self._kept:
                if number >= first:  # big-endian: bytes compare as the numbers do
                    replay.send_multipart([client, b"", self._topic, number, payload], zmq.NOBLOCK)
            replay.send_multipart([client, b"", b"", _number(REPLAY_END), b""], zmq.NOBLOCK)
        except zmq.ZMQError as cause:
            self.unanswered_replays += 1
            log.warning("a replay was broken off, its client does not take it: %s", cause)

    def _socket(self, kind: int, limit: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(limit)
        return socket

    def _bind(self, socket: "zmq.Socket[bytes]", endpoint: str, host: str) -> str:
        try:
            socket.bind(bind_address(endpoint, host))
        except zmq.ZMQError as cause:
            raise EnvironmentProblem(
                f"--kv-events-config: cannot bind {endpoint} ({cause.strerror})"
            ) from cause
        if not endpoint.startswith("tcp://"):
            return endpoint
        port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"{endpoint.rpartition(':')[0]}:{port}"

    def _connect(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as cause:
            raise EnvironmentProblem(
                f"--kv-events-config: cannot connect to {endpoint} ({cause.strerror})"
            ) from cause


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")
