"""The least that an external processor can do, and what ours is compared with: read messages with the same
library and classes, and send as many back, without looking at anything but where the request ends.
"""

import argparse

import grpc
import uvloop

from sumibi.gateway.epp.stream import CHUNK_BYTES
from sumibi.gateway.epp.wire import SERVICE, ProcessingRequest, ProcessingResponse


def handler(*, response_phase: bool) -> grpc.GenericRpcHandler:
    async def process(_, context):
        body, whole = [], False
        while True:
            message = await context.read()
            if message is grpc.aio.EOF:
                return
            kind = message.WhichOneof("request")
            if kind == "request_body" and not whole:
                body.append(message.request_body.body)
                whole = message.request_body.end_of_stream
                if whole:
                    answer = ProcessingResponse()
                    answer.request_headers.response.clear_route_cache = True
                    await context.write(answer)
                    data = b"".join(body)
                    for start in range(0, len(data), CHUNK_BYTES):
                        end = start + CHUNK_BYTES
                        await context.write(piece("request_body", data[start:end], last=end >= len(data)))
                    if not response_phase:
                        return
            elif kind == "response_headers":
                answer = ProcessingResponse()
                answer.response_headers.SetInParent()
                await context.write(answer)
            elif kind == "response_body":
                got = message.response_body
                await context.write(piece("response_body", got.body, last=got.end_of_stream))
                if got.end_of_stream:
                    return

    made = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=ProcessingRequest.FromString,
        response_serializer=ProcessingResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Process": made})


def piece(part, data, *, last):
    answer = ProcessingResponse()
    streamed = getattr(answer, part).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = data, last
    return answer


async def serve(port, *, response_phase):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([handler(response_phase=response_phase)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    known = argparse.ArgumentParser(description=__doc__)
    known.add_argument("--port", type=int, required=True)
    known.add_argument("--response-phase", choices=("auto", "off"), default="auto")
    chosen = known.parse_args()
    uvloop.run(serve(chosen.port, response_phase=chosen.response_phase == "auto"))
