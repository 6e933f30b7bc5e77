"""The decode side of a transfer: connect, pull, verify, write; one function a conversation, no state."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
    SharedMemory,
    Taken,
    TransferError,
    Welcome,
    checksum,
    never,
)
from sumibi.engine.transfer.memory import BlockMemory
from sumibi.engine.transfer.params import PullRequest
from sumibi.engine.transfer.secret import SideName, nonce, proof, proves
from sumibi.engine.transfer.shared import SLOTS, Slots, make, unlink

log = logging.getLogger(__name__)

_NOTIFY_S = 2.0
"""Longest time for a release or a heartbeat."""


@dataclass(frozen=True, slots=True)
class Side:
    """What this engine is, for its peers."""

    namespace: bytes
    memory: BlockMemory
    shared: bool
    """Whether to ask for shared memory."""
    secret: bytes | None = None
    """That peers must know, too."""


@dataclass(slots=True)
class Pulled:
    """How a pull ended."""

    good: int = 0
    """Leading blocks that came, were verified and are written."""
    cached_tokens: int | None = None
    transport: str = ""
    """Empty if no connection came about."""
    fell_back: bool = False
    """Shared memory was asked for and not to be had."""
    released: bool = False
    """The peer knows that its blocks are not needed any more."""
    error: TransferError | None = None


def pull(
    side: Side,
    request: PullRequest,
    names: list[bytes],
    first: int,
    blocks: list[int],
    *,
    timeout_s: float,
    unwanted: Callable[[], bool] = never,
) -> Pulled:
    """Fill `blocks` with the peer's blocks number `first` and on, whose content ids are `names`.

    Never raises: what went wrong is in the result. The peer is told that it can free its blocks, if it can
    be told over the same connection.
    """
    pulled = Pulled()
    try:
        with _connected(side, request, time.monotonic() + timeout_s, unwanted, pulled) as (channel, slots):
            # A request whose parameters the peer has answered is there or gone; one under way is waited for.
            wait_s = timeout_s if request.num_tokens is None else 0.0
            channel.send(Pull(request.key, first, names, wait_s))
            _take_blocks(channel, slots, side.memory, names, first, blocks, pulled)
            pulled.cached_tokens = channel.receive(End).cached_tokens
            channel.deadline_s = time.monotonic() + _NOTIFY_S
            channel.send(Release(request.key))
            channel.receive(End)
            pulled.released = True
    except TransferError as error:
        if pulled.good < len(blocks):  # else only the release was not understood
            pulled.error = error
    return pulled


def release(side: Side, request: PullRequest) -> None:
    """Tell the peer that nobody needs the request's blocks. Raises TransferError."""
    with _connected(side, request, time.monotonic() + _NOTIFY_S, never, None) as (channel, _):
        channel.send(Release(request.key))
        channel.receive(End)


def beat(side: Side, request: PullRequest, keys: list[str]) -> None:
    """Tell the peer at `request`'s address that the requests `keys` are waited for. Raises TransferError."""
    with _connected(side, request, time.monotonic() + _NOTIFY_S, never, None) as (channel, _):
        channel.send(Beat(keys))
        channel.receive(End)


@contextmanager
def _connected(
    side: Side,
    request: PullRequest,
    deadline_s: float,
    unwanted: Callable[[], bool],
    pulled: Pulled | None,
) -> Iterator[tuple[Channel, Slots | None]]:
    """A connection to the peer after the greeting; with shared memory if `pulled` wants it and it can be."""
    memory, slots = _offer_memory(side) if pulled is not None else (None, None)
    try:
        connection = _connect(request, deadline_s)
        with connection:
            channel = Channel(connection, deadline_s, unwanted)
            hello = Hello(side.namespace, side.memory.block_bytes, request.engine_id, memory, nonce())
            channel.send(hello)
            welcome = _welcome(channel, side.secret, hello)
            if memory is not None:
                unlink(memory)
            if pulled is not None:
                pulled.transport = welcome.transport
                pulled.fell_back = side.shared and welcome.transport != "shm"
            yield channel, slots if welcome.transport == "shm" else None
    finally:
        if memory is not None and slots is not None:
            unlink(memory)
            slots.close()


def _welcome(channel: Channel, secret: bytes | None, hello: Hello) -> Welcome:
    """The peer's, after both sides have proven what they know. Raises TransferError."""
    answer = channel.receive(Welcome, Challenge)
    if isinstance(answer, Welcome):
        if secret is not None:
            channel.send(Refused("secret", "the peer has a secret"))  # so that both sides count it
            raise TransferError("secret", "the peer has no secret, and we have one")
        return answer
    assert isinstance(answer, Challenge)
    if secret is None:
        channel.send(Proof(b""))  # it says and counts why there is no Welcome
    elif not proves(answer.proof, secret, SideName.PREFILL, hello, answer.nonce):
        channel.send(Proof(b""))  # the same; it proves nothing to who has proven nothing
        raise TransferError("secret", "the peer has another secret")
    else:
        channel.send(Proof(proof(secret, SideName.DECODE, hello, answer.nonce)))
    return channel.receive(Welcome)


def _offer_memory(side: Side) -> tuple[SharedMemory, Slots] | tuple[None, None]:
    if not side.shared:
        return None, None
    try:
        return make(SLOTS, side.memory.block_bytes)
    except OSError as cause:
        log.warning("no shared memory for a transfer (%s): it goes over TCP", cause)
        return None, None


def _connect(request: PullRequest, deadline_s: float) -> socket.socket:
    left_s = max(0.01, min(_NOTIFY_S * 2, deadline_s - time.monotonic()))
    try:
        connection = socket.create_connection((request.host, request.port), left_s)
    except (OSError, ValueError) as cause:  # ValueError: a name that cannot be one, such as "a..b"
        raise TransferError(
            "unreachable", f"{request.host}:{request.port} cannot be reached ({cause})"
        ) from cause
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _take_blocks(
    channel: Channel,
    slots: Slots | None,
    memory: BlockMemory,
    names: list[bytes],
    first: int,
    blocks: list[int],
    pulled: Pulled,
) -> None:
    buffer = memoryview(bytearray(0 if slots else memory.block_bytes))
    for index, (name, block) in enumerate(zip(names, blocks, strict=True)):
        frame = channel.receive(Block)
        if frame.index != first + index or frame.content_id != name:
            raise TransferError("content", f"block {first + index} was asked for, another one came")
        source = buffer
        if slots is None:
            channel.receive_into(buffer)
        else:
            if frame.slot != index % slots.count:
                raise TransferError("protocol", f"slot {frame.slot} is not the next one")
            source = slots.slot(frame.slot)
        try:
            if checksum(source) != frame.checksum:
                raise TransferError("corrupt", f"block {first + index} does not have its checksum")
            memory.write_blocks([block], [source])
        finally:
            if slots is not None:
                source.release()
        pulled.good += 1
        if slots is not None:
            channel.send(Taken(index + 1))
