"""What goes over the side channel: frames with a version and a bound, and sockets with a deadline.

    frame   "SKVT", version (1 byte), kind (1 byte), length (4 bytes, big-endian), body
    body    MessagePack of the kind's struct; of a block the header, and after the frame its bytes

The decode side opens a connection and says `Hello`; the prefill side answers `Welcome` or `Refused`. If it
has a secret it answers `Challenge` first, which the decode side answers with `Proof` (see `secret`). Then
any number of `Pull` (answered by blocks in order and `End`, or `Refused`), `Beat` and `Release` (answered
by `End`). Whatever cannot be understood ends the connection, nothing else.
"""

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

VERSION = 1
MAX_BODY_BYTES = 1 << 20
"""A pull of 60,000 blocks; nothing else is nearly as long."""
_HEAD = struct.Struct(">4sBBI")
_MAGIC = b"SKVT"
_REFUSALS = frozenset(
    ("namespace", "engine", "secret", "unknown", "content", "expired", "released", "aborted", "stopped")
)
_MAX_TEXT = 500
_SLICE_S = 0.2
"""How often a wait looks whether it is still wanted."""

F = TypeVar("F", bound=msgspec.Struct)


class TransferError(Exception):
    """A transfer that cannot go on. `reason` is a label: a few words, always the same."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class SharedMemory(msgspec.Struct, frozen=True):
    """Memory that the decode side offers: who can read `proof` in it is on the same machine."""

    name: str
    proof: bytes
    slots: int


class Hello(msgspec.Struct, frozen=True):
    """The first frame. `namespace` is a digest of everything that makes blocks differ."""

    namespace: bytes
    block_bytes: int
    engine_id: str | None
    """Of the prefill side, if only that one will do."""
    memory: SharedMemory | None
    nonce: bytes = b""
    """The decode side's random number."""


class Challenge(msgspec.Struct, frozen=True):
    """The prefill side has a secret, and proves it; the decode side is to do the same."""

    nonce: bytes
    """The prefill side's random number."""
    proof: bytes


class Proof(msgspec.Struct, frozen=True):
    """The decode side's answer; empty: it has no secret."""

    proof: bytes


class Welcome(msgspec.Struct, frozen=True):
    """The answer."""

    engine_id: str
    transport: str
    """"shm" or "tcp"."""
    lease_s: float


class Refused(msgspec.Struct, frozen=True):
    """Not possible; `reason` as in TransferError."""

    reason: str
    text: str


class Pull(msgspec.Struct, frozen=True):
    """The blocks from number `first` of the request `key`, by name, in order."""

    key: str
    first: int
    content_ids: list[bytes]
    wait_s: float
    """How long the prefill side may wait for the request and its blocks."""


class Block(msgspec.Struct, frozen=True):
    """One block: its bytes follow the frame, or lie in slot `slot` of the shared memory."""

    index: int
    content_id: bytes
    checksum: int
    """xxh3, 64 bits."""
    slot: int | None


class Taken(msgspec.Struct, frozen=True):
    """The decode side has copied `count` blocks out of the shared memory since it began to pull."""

    count: int


class Beat(msgspec.Struct, frozen=True):
    """Somebody still wants these requests' blocks."""

    keys: list[str]


class Release(msgspec.Struct, frozen=True):
    """Nobody wants this request's blocks any more."""

    key: str


class End(msgspec.Struct, frozen=True):
    """All is done."""

    cached_tokens: int | None = None
    """After a pull: tokens that the prefill side had in its cache."""


_KINDS: tuple[type[msgspec.Struct], ...] = (
    Hello,
    Welcome,
    Refused,
    Pull,
    Block,
    Taken,
    Beat,
    Release,
    End,
    Challenge,
    Proof,
)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_encode = msgspec.msgpack.Encoder().encode
_decoders = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]


def checksum(data: memoryview | bytearray | bytes) -> int:
    """Of one block's bytes."""
    return xxh3_64_intdigest(data)


def never() -> bool:
    """For a wait that nobody breaks off."""
    return False


@dataclass(slots=True)
class Channel:
    """One connection, used by one thread. Every operation ends at `deadline_s` (monotonic) at the latest."""

    socket: socket.socket
    deadline_s: float
    unwanted: Callable[[], bool] = never
    """Asked during waits; True ends them."""

    def send(self, frame: msgspec.Struct, data: memoryview | bytearray | None = None) -> None:
        """One frame, and what follows it. Raises TransferError."""
        body = _encode(frame)
        head = _HEAD.pack(_MAGIC, VERSION, _NUMBERS[type(frame)], len(body))
        try:
            self.socket.settimeout(self._left_s())
            self.socket.sendall(head + body)
            if data is not None:
                self.socket.sendall(data)
        except TimeoutError as cause:
            raise TransferError("timeout", "the peer does not read") from cause
        except OSError as cause:
            raise TransferError("connection", f"the connection broke ({cause})") from cause

    def receive(self, *kinds: type[F]) -> F:
        """The next frame, which must be one of `kinds`; `Refused` is raised. Raises TransferError."""
        head = bytearray(_HEAD.size)
        self.receive_into(memoryview(head))
        magic, version, number, length = _HEAD.unpack(head)
        if magic != _MAGIC or version != VERSION or number >= len(_KINDS) or length > MAX_BODY_BYTES:
            raise TransferError("protocol", f"this is no frame of version {VERSION}: {bytes(head).hex()}")
        body = bytearray(length)
        self.receive_into(memoryview(body))
        try:
            frame = _decoders[number].decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
            raise TransferError("protocol", f"a frame cannot be read: {cause}") from cause
        if isinstance(frame, Refused) and Refused not in kinds:
            # A reason becomes a metric's label: a peer must not be able to make new ones.
            reason = frame.reason if frame.reason in _REFUSALS else "refused"
            raise TransferError(reason, f"the peer refuses: {frame.text[:_MAX_TEXT]}")
        if not isinstance(frame, kinds):
            raise TransferError("protocol", f"unexpected frame {type(frame).__name__}")
        return frame

    def receive_into(self, buffer: memoryview) -> None:
        """Fill `buffer`. Raises TransferError."""
        while buffer:
            if self.unwanted():
                raise TransferError("unwanted", "nobody waits for it any more")
            try:
                self.socket.settimeout(min(_SLICE_S, self._left_s()))
                count = self.socket.recv_into(buffer)
            except TimeoutError:
                continue
            except OSError as cause:
                raise TransferError("connection", f"the connection broke ({cause})") from cause
            if count == 0:
                raise TransferError("connection", "the peer closed the connection")
            buffer = buffer[count:]

    def closed_by_peer(self) -> bool:
        """Whether the other side has gone; never waits."""
        try:
            self.socket.settimeout(0)
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _left_s(self) -> float:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TransferError("timeout", "the transfer took too long")
        return left_s
