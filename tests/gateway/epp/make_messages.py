"""Messages of external processing as Envoy's own protocol files have them, one a line: name, hex.

Runs where `xds-protos` is installed and sumibi is not (`make epp-wire`). Every alternative of both messages
is there, with every field that sumibi reads or writes.
"""

from envoy.config.core.v3 import base_pb2 as core
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2 as modes
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2


def headers(*pairs):
    return core.HeaderMap(headers=[core.HeaderValue(key=key, raw_value=value) for key, value in pairs])


def struct(**fields):
    made = struct_pb2.Struct()
    made.update(fields)
    return made


def option(key, value):
    header = core.HeaderValue(key=key, raw_value=value)
    return core.HeaderValueOption(header=header, append_action=2, keep_empty_value=True)


def streamed(body, end):
    piece = ext_proc.StreamedBodyResponse(body=body, end_of_stream=end)
    return ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=piece))


SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
DESTINATION = "x-gateway-destination-endpoint"
FULL_DUPLEX = modes.ProcessingMode.FULL_DUPLEX_STREAMED

requests = {
    "request_headers": ext_proc.ProcessingRequest(
        request_headers=ext_proc.HttpHeaders(
            headers=headers((":method", b"POST"), (":path", b"/v1/chat/completions"), ("x", b"\xff")),
            end_of_stream=True,
        ),
        metadata_context=core.Metadata(
            filter_metadata={"envoy.lb.subset_hint": struct(**{SUBSET: ["10.0.0.1:8000", "10.0.0.2"]})}
        ),
        attributes={"envoy.filters.http.ext_proc": struct(a=1.5, b=None, c=True)},
        protocol_config=ext_proc.ProtocolConfiguration(
            request_body_mode=FULL_DUPLEX, response_body_mode=FULL_DUPLEX
        ),
    ),
    "request_body": ext_proc.ProcessingRequest(
        request_body=ext_proc.HttpBody(body=b"\x00{}\xff", end_of_stream=True), observability_mode=True
    ),
    "request_trailers": ext_proc.ProcessingRequest(
        request_trailers=ext_proc.HttpTrailers(trailers=headers(("checksum", b"1")))
    ),
    "response_headers": ext_proc.ProcessingRequest(
        response_headers=ext_proc.HttpHeaders(headers=headers((":status", b"200"))),
        metadata_context=core.Metadata(filter_metadata={"envoy.lb": struct(**{SERVED: "10.0.0.1:8000"})}),
    ),
    "response_body": ext_proc.ProcessingRequest(response_body=ext_proc.HttpBody(body=b"data: 1\n\n")),
    "response_trailers": ext_proc.ProcessingRequest(
        response_trailers=ext_proc.HttpTrailers(trailers=headers(("grpc-status", b"0")))
    ),
}
responses = {
    "request_headers": ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse(
            response=ext_proc.CommonResponse(
                header_mutation=ext_proc.HeaderMutation(
                    set_headers=[option(DESTINATION, b"10.0.0.1:8000,10.0.0.2:8000")],
                    remove_headers=["authorization", "x-prefiller-host-port"],
                ),
                clear_route_cache=True,
            )
        ),
        dynamic_metadata=struct(**{"envoy.lb": {DESTINATION: "10.0.0.1:8000,10.0.0.2:8000"}}),
    ),
    "request_body": ext_proc.ProcessingResponse(
        request_body=ext_proc.BodyResponse(response=streamed(b"{}", True))
    ),
    "request_trailers": ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse()),
    "response_headers": ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse()),
    "response_body": ext_proc.ProcessingResponse(
        response_body=ext_proc.BodyResponse(response=streamed(b"data: 1\n\n", False))
    ),
    "response_trailers": ext_proc.ProcessingResponse(
        response_trailers=ext_proc.TrailersResponse(
            header_mutation=ext_proc.HeaderMutation(set_headers=[option("x", b"")])
        )
    ),
    "immediate_response": ext_proc.ProcessingResponse(
        immediate_response=ext_proc.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=429),
            headers=ext_proc.HeaderMutation(
                set_headers=[option("x-llm-d-request-dropped-reason", b"rejected-saturated")]
            ),
            body=b'{"error": {}}',
            grpc_status=ext_proc.GrpcStatus(status=8),
            details="saturated",
        )
    ),
}
for kind, made in (("ProcessingRequest", requests), ("ProcessingResponse", responses)):
    for name, message in made.items():
        print(kind, name, message.SerializeToString(deterministic=True).hex())
