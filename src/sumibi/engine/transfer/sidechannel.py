"""The prefill side's door: peers connect, name a request and get its blocks.

One thread accepts and watches the leases, one a connection serves it. Nothing that comes in over a
connection can do more than end that connection.
"""

import logging
import socket
import threading
import time

from sumibi.core.errors import EnvironmentProblem
from sumibi.engine.transfer.frames import (
    Beat,
    Block,
    Challenge,
    Channel,
    End,
    Hello,
    Proof,
    Pull,
    Refused,
    Release,
    Taken,
    TransferError,
    Welcome,
    checksum,
)
from sumibi.engine.transfer.memory import BlockMemory
from sumibi.engine.transfer.metrics import TransferMetrics
from sumibi.engine.transfer.offers import Offers
from sumibi.engine.transfer.secret import SideName, nonce, proof, proves
from sumibi.engine.transfer.shared import Slots, attach

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
_HELLO_S = 5.0
_IDLE_S = 60.0
_TICK_S = 0.1
_STOP_S = 5.0
_BROKEN = ("connection", "unwanted", "timeout")
"""How connections end when nobody did anything wrong here."""


class SideChannel:
    """Listens from the time it is made; answers from `start` to `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        offers: Offers,
        memory: BlockMemory,
        metrics: TransferMetrics,
        namespace: bytes,
        engine_id: str,
        secret: bytes | None,
        lease_s: float,
        timeout_s: float,
    ) -> None:
        """Raises EnvironmentProblem naming the flag if the address cannot be had."""
        self._offers = offers
        self._memory = memory
        self._metrics = metrics
        self._namespace = namespace
        self._engine_id = engine_id
        self._secret = secret
        self._told_stranger = False
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as cause:
            raise EnvironmentProblem(
                f"--kv-transfer-config: cannot listen on {host}:{port} ({cause.strerror})"
            ) from cause
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="kv-side-channel", daemon=True)

    def start(self) -> None:
        """Take connections."""
        self._thread.start()

    def stop(self) -> None:
        """Close everything. Peers see closed connections."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                _shut(connection)

    def _accept(self) -> None:
        self._listener.settimeout(_TICK_S)
        while not self._stopping.is_set():
            for key in self._offers.expire():
                self._metrics.expired.inc()
                log.warning("no peer came for the blocks of %s: they are free again", key)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as cause:
                if not self._stopping.is_set():
                    log.warning("the side channel could not take a connection: %s", cause)
                    self._stopping.wait(_TICK_S)  # out of handles, for example
                continue
            with self._lock:
                if len(self._open) >= MAX_CONNECTIONS:
                    self._metrics.busy.inc()
                    connection.close()
                    continue
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="kv-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._converse(Channel(connection, time.monotonic() + _HELLO_S, self._stopping.is_set))
        except TransferError as error:
            if error.reason == "secret":  # we have none, and the peer will not talk to us
                self._turned_away(connection, error.reason)
            elif error.reason not in _BROKEN:
                self._metrics.bad_connections.inc()
                log.warning("a connection to the side channel was closed: %s", error)
        except Exception:
            self._metrics.bad_connections.inc()
            log.exception("a connection to the side channel failed")
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _converse(self, channel: Channel) -> None:
        hello = channel.receive(Hello)
        refused = self._stranger(channel, hello) or self._refusal(hello)
        if refused is not None:
            self._turned_away(channel.socket, refused.reason)
            channel.send(refused)
            return
        slots = attach(hello.memory, self._memory.block_bytes) if hello.memory is not None else None
        try:
            channel.send(Welcome(self._engine_id, "shm" if slots else "tcp", self._lease_s))
            while True:
                channel.deadline_s = time.monotonic() + _IDLE_S
                frame = channel.receive(Pull, Beat, Release, Taken)
                if isinstance(frame, Pull):
                    self._answer(channel, frame, slots)
                elif isinstance(frame, Beat):
                    for key in frame.keys:
                        self._offers.extend(key)
                    channel.send(End())
                elif isinstance(frame, Release):
                    self._offers.end(frame.key, "released")
                    channel.send(End())
        finally:
            if slots is not None:
                slots.close()

    def _turned_away(self, connection: socket.socket, reason: str) -> None:
        """Count it; of those whose secret differs the first is logged."""
        self._metrics.refusal(reason)
        if reason == "secret" and not self._told_stranger:
            self._told_stranger = True
            log.warning(
                "%s does not have the same secret as we: it gets no blocks; more of these are counted only",
                _address(connection),
            )

    def _stranger(self, channel: Channel, hello: Hello) -> Refused | None:
        """None if the peer knows our secret, or there is none. Nothing is said of us before that but that we
        know it ourselves.
        """
        if self._secret is None:
            return None
        number = nonce()
        channel.send(Challenge(number, proof(self._secret, SideName.PREFILL, hello, number)))
        if proves(channel.receive(Proof).proof, self._secret, SideName.DECODE, hello, number):
            return None
        return Refused("secret", "this side channel is for engines that know its secret")

    def _refusal(self, hello: Hello) -> Refused | None:
        if hello.namespace != self._namespace or hello.block_bytes != self._memory.block_bytes:
            return Refused(
                "namespace",
                "another model, revision, dtype, block size or layout is served here: its blocks do not fit",
            )
        if hello.engine_id is not None and hello.engine_id != self._engine_id:
            return Refused("engine", f"engine {hello.engine_id} is not here any more")
        return None

    def _answer(self, channel: Channel, pull: Pull, slots: Slots | None) -> None:
        now_s = time.monotonic()
        until_s = now_s + min(max(0.0, pull.wait_s), self._timeout_s)  # in this order NaN is 0
        channel.deadline_s = now_s + self._timeout_s
        try:
            self._send_blocks(channel, pull, slots, until_s)
            cached = self._offers.cached_tokens(pull.key, until_s=until_s, unwanted=channel.closed_by_peer)
        except TransferError as error:
            if error.reason in _BROKEN:
                raise
            channel.send(Refused(error.reason, str(error)))
            return
        channel.send(End(cached))

    def _send_blocks(self, channel: Channel, pull: Pull, slots: Slots | None, until_s: float) -> None:
        buffer = memoryview(bytearray(0 if slots else self._memory.block_bytes))
        taken = 0
        for sent, wanted in enumerate(pull.content_ids):
            while slots is not None and sent - taken >= slots.count:
                taken = channel.receive(Taken).count
            number = None if slots is None else sent % slots.count
            with self._offers.reading(
                pull.key, pull.first + sent, until_s=until_s, unwanted=channel.closed_by_peer
            ) as kept:
                if kept.content_id != wanted:
                    raise TransferError("content", f"block {pull.first + sent} of {pull.key} is another one")
                target = buffer if slots is None or number is None else slots.slot(number)
                self._memory.read_blocks([kept.block], [target])
            channel.send(
                Block(pull.first + sent, wanted, checksum(target), number),
                target if slots is None else None,
            )
            if slots is not None:
                target.release()


def _address(connection: socket.socket) -> str:
    """Of the peer, without its port."""
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "a peer that has gone"


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has gone already
