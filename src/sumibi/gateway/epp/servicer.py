"""gRPC around the picker: external processing on one port, health on another."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import grpc

from sumibi.gateway.epp.visit import Picker, Visit
from sumibi.gateway.epp.wire import SERVICE, HealthAnswer, HealthQuestion, ProcessingRequest

_HEALTH: Final = "grpc.health.v1.Health"
_SERVING: Final = 1
_NOT_SERVING: Final = 2


class _Flush:
    """Sends what stands in a stream's `out`: one at a time, whoever asks for it."""

    def __init__(self, context: Any) -> None:
        self.out: deque[bytes] = deque()
        self._write = context.write
        self._late: asyncio.Task[None] | None = None

    def __call__(self) -> None:
        """From outside of the stream's own coroutine."""
        if self._late is None:
            self._late = asyncio.get_running_loop().create_task(self._send_late())

    async def send(self) -> None:
        """Send all, and what is added meanwhile."""
        if self._late is not None:
            await self._late
        while self.out:
            await self._write(self.out.popleft())

    async def _send_late(self) -> None:
        try:
            while self.out:
                await self._write(self.out.popleft())
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            self.out.clear()  # the stream is over, which its own coroutine sees
        finally:
            self._late = None


def ext_proc_handler(picker: Picker) -> grpc.GenericRpcHandler:
    """`Process`: one stream is one HTTP request."""

    async def process(_: object, context: Any) -> None:
        flush = _Flush(context)
        visit = Visit(picker, flush)
        out = flush.out = visit.stream.out
        read = context.read
        try:
            while True:
                message = await read()
                if message is grpc.aio.EOF:
                    return
                visit.receive(message)
                if out:
                    await flush.send()
                if visit.finished:
                    return
        finally:
            visit.closed()

    handler = grpc.stream_stream_rpc_method_handler(
        process, request_deserializer=ProcessingRequest.FromString, response_serializer=None
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Process": handler})


def health_handler(ready: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """`Check`. Of a picker that no other one takes over from, every service has the same health, whatever its
    name (Envoy asks for external processing, charts for `liveness`, `readiness` or `inference-extension`).
    """

    async def check(question: Any, context: Any) -> Any:
        return HealthAnswer(status=_SERVING if ready() else _NOT_SERVING)

    handler = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=HealthQuestion.FromString,
        response_serializer=HealthAnswer.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_HEALTH, {"Check": handler})
