"""The protocol of one request, in every order in which its messages may come."""

import pytest

from sumibi.gateway.epp.stream import CHUNK_BYTES, FULL_DUPLEX, NO_BODY, Asked, End, Stream
from sumibi.gateway.epp.wire import ProcessingRequest, ProcessingResponse

PATH = "/v1/chat/completions"


class Lab:
    """A stream and its owner, who writes down what it hears and answers at once if it is told to."""

    def __init__(self, *, at_once=True, max_body_bytes=10_000_000):
        self.stream = Stream(max_body_bytes)
        self.heard = []
        self.request: Asked | None = None
        self.at_once = at_once

    def receive(self, **message):
        """Hand a message over; what is sent then, decoded."""
        self.stream.receive(ProcessingRequest(**message), self)
        return self.sent()

    def sent(self):
        out = [ProcessingResponse.FromString(data) for data in self.stream.out]
        self.stream.out.clear()
        return out

    def send(self):
        self.stream.send_to("10.0.0.1:80,10.0.0.2:80", [("a", b"1")], ["b"], self.request.body)

    # -- Owner

    def asked(self, request):
        self.heard.append("asked")
        self.request = request
        if self.at_once:
            self.send()

    def too_large(self):
        self.stream.refuse(413, [], b"too large")

    def answering(self, status, headers, served):
        self.heard.append((status, headers.get(b"content-type"), served))

    def piece(self, data):
        self.heard.append(data)

    def complete(self):
        self.heard.append("complete")


def headers(*pairs, method=b"POST", end=False, **more):
    pairs = ((":method", method), (":path", PATH.encode() + b"?a=b"), *pairs)
    listed = [{"key": key, "raw_value": value} for key, value in pairs]
    return {"request_headers": {"headers": {"headers": listed}, "end_of_stream": end}, **more}


def body(data, *, end=False):
    return {"request_body": {"body": data, "end_of_stream": end}}


def response(status=b"200", *, end=False, served=None, kind=b"text/event-stream"):
    listed = [{"key": ":status", "raw_value": status}, {"key": "content-type", "raw_value": kind}]
    message = {"response_headers": {"headers": {"headers": listed}, "end_of_stream": end}}
    if served is not None:
        fields = {"x-gateway-destination-endpoint-served": {"string_value": served}}
        message["metadata_context"] = {"filter_metadata": {"envoy.lb": {"fields": fields}}}
    return message


def piece(data, *, end=False):
    return {"response_body": {"body": data, "end_of_stream": end}}


def parts(answers):
    return [answer.WhichOneof("response") for answer in answers]


def request_body_of(answers):
    pieces = [a.request_body.response.body_mutation.streamed_response for a in answers]
    return b"".join(p.body for p in pieces), [p.end_of_stream for p in pieces]


def test_nothing_is_sent_before_the_request_is_whole():
    lab = Lab()
    assert lab.receive(**headers()) == []
    assert lab.receive(**body(b'{"a"')) == []
    head, rest = lab.receive(**body(b": 1}", end=True))
    assert lab.request == Asked("POST", PATH, lab.request.named, b'{"a": 1}', None)
    assert lab.request.named[b":method"] == b"POST"
    response = head.request_headers.response
    assert response.clear_route_cache
    mutation = response.header_mutation
    assert [(o.header.key, o.header.raw_value, o.append_action) for o in mutation.set_headers] == [
        ("x-gateway-destination-endpoint", b"10.0.0.1:80,10.0.0.2:80", 2),
        ("a", b"1", 2),
    ]
    assert list(mutation.remove_headers) == ["b"]
    told = head.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert told["x-gateway-destination-endpoint"].string_value == "10.0.0.1:80,10.0.0.2:80"
    assert request_body_of([rest]) == (b'{"a": 1}', [True])


def test_a_request_without_a_body_is_answered_at_its_headers():
    lab = Lab()
    assert parts(lab.receive(**headers(method=b"GET", end=True))) == ["request_headers"]
    assert (lab.request.method, lab.request.body) == ("GET", b"")


def test_an_empty_body_still_needs_its_last_piece():
    lab = Lab()
    lab.receive(**headers())
    _, rest = lab.receive(**body(b"", end=True))
    assert request_body_of([rest]) == (b"", [True])


@pytest.mark.parametrize(
    "size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 5_000_000]
)
def test_large_bodies_go_back_in_pieces_that_envoy_takes(size):
    lab, data = Lab(), bytes(i * 7 % 251 for i in range(size))
    lab.receive(**headers())
    for start in range(0, size, 65_536):
        out = lab.receive(**body(data[start : start + 65_536], end=start + 65_536 >= size))
    got, ends = request_body_of(out[1:])
    assert got == data
    assert ends == [False] * (-(-size // CHUNK_BYTES) - 1) + [True]
    sizes = [len(a.request_body.response.body_mutation.streamed_response.body) for a in out[1:]]
    assert max(sizes) <= CHUNK_BYTES


def test_the_last_piece_of_a_body_may_come_twice():
    lab = Lab()
    lab.receive(**headers())
    lab.receive(**body(b"{}", end=True))
    assert lab.receive(**body(b"{}", end=True)) == []
    assert lab.heard == ["asked"]
    assert lab.request.body == b"{}"


@pytest.mark.parametrize("at_once", [True, False])
def test_trailers_end_a_request_whose_last_piece_does_not(at_once):
    lab = Lab(at_once=at_once)
    lab.receive(**headers())
    lab.receive(**body(b"{}"))
    out = lab.receive(request_trailers={})
    if not at_once:
        assert out == []
        lab.send()
        out = lab.sent()
    assert parts(out) == ["request_headers", "request_body", "request_trailers"]
    assert request_body_of(out[1:2]) == (b"{}", [False])


def test_trailers_after_the_last_piece_are_answered():
    lab = Lab()
    lab.receive(**headers())
    lab.receive(**body(b"{}", end=True))
    assert parts(lab.receive(request_trailers={})) == ["request_trailers"]


def test_a_held_request_goes_on_when_its_owner_says_so():
    lab = Lab(at_once=False)
    lab.receive(**headers())
    assert lab.receive(**body(b"{}", end=True)) == []
    lab.send()
    assert parts(lab.sent()) == ["request_headers", "request_body"]


def answered(**config):
    """A stream whose request went on."""
    lab = Lab()
    lab.receive(**headers(), **config)
    lab.receive(**body(b"{}", end=True))
    lab.heard.clear()
    return lab


def test_an_answer_is_echoed_as_it_comes():
    lab = answered()
    (head,) = lab.receive(**response(served="10.0.0.2:80"))
    assert head == ProcessingResponse(response_headers={})
    (first,) = lab.receive(**piece(b"data: 1\n\n"))
    assert first.response_body.response.body_mutation.streamed_response.body == b"data: 1\n\n"
    assert lab.stream.end is None
    (last,) = lab.receive(**piece(b"", end=True))
    assert last.response_body.response.body_mutation.streamed_response.end_of_stream
    assert lab.heard == [(200, b"text/event-stream", "10.0.0.2:80"), b"data: 1\n\n", "complete"]
    assert lab.stream.closed() is End.COMPLETED


def test_a_large_piece_of_an_answer_is_cut():
    lab = answered()
    lab.receive(**response(kind=b"application/json"))
    out = lab.receive(**piece(b"x" * (CHUNK_BYTES + 5), end=True))
    pieces = [a.response_body.response.body_mutation.streamed_response for a in out]
    assert [(len(p.body), p.end_of_stream) for p in pieces] == [(CHUNK_BYTES, False), (5, True)]


def test_an_answer_without_a_body_ends_with_its_headers():
    lab = answered()
    assert parts(lab.receive(**response(b"204", end=True))) == ["response_headers"]
    assert lab.stream.closed() is End.COMPLETED


def test_trailers_end_an_answer():
    lab = answered()
    lab.receive(**response())
    lab.receive(**piece(b"x"))
    assert parts(lab.receive(response_trailers={})) == ["response_trailers"]
    assert lab.stream.closed() is End.COMPLETED
    assert lab.heard[-1] == "complete"


def test_where_envoy_streams_answers_by_itself_pieces_are_let_pass():
    lab = answered(protocol_config={"request_body_mode": FULL_DUPLEX, "response_body_mode": 1})
    lab.receive(**response())
    assert lab.receive(**piece(b"x")) == [ProcessingResponse(response_body={})]
    assert lab.heard[-1] == b"x"


def test_where_envoy_shows_no_answers_that_is_known():
    lab = answered(protocol_config={"request_body_mode": FULL_DUPLEX, "response_body_mode": NO_BODY})
    assert (lab.stream.sent, lab.stream.response_body_mode) == (True, NO_BODY)


def test_a_body_that_would_not_come_as_pieces_is_an_error_of_the_configuration():
    lab = Lab()
    (out,) = lab.receive(**headers(), protocol_config={"request_body_mode": 2})
    assert out.immediate_response.status.code == 500
    assert b"FULL_DUPLEX_STREAMED" in out.immediate_response.body
    assert lab.heard == []


@pytest.mark.parametrize("passed", ["request", "headers", "piece"])
def test_nothing_follows_an_immediate_response(passed):
    lab = Lab(at_once=passed != "request")
    lab.receive(**headers())
    lab.receive(**body(b"{}", end=True))
    if passed != "request":
        lab.receive(**response())
    if passed == "piece":
        lab.receive(**piece(b"x"))
    lab.stream.refuse(429, [("x-llm-d-request-dropped-reason", b"evicted")], b"{}")
    lab.stream.refuse(500, [], b"")
    (out,) = lab.sent()
    assert (out.immediate_response.status.code, out.immediate_response.body) == (429, b"{}")
    (option,) = out.immediate_response.headers.set_headers
    assert (option.header.key, option.header.raw_value) == ("x-llm-d-request-dropped-reason", b"evicted")
    assert lab.receive(**piece(b"y", end=True)) == []
    assert lab.stream.closed() is End.REJECTED


def test_no_eviction_after_the_end_of_an_answer():
    lab = answered()
    lab.receive(**response(end=True))
    lab.stream.refuse(429, [], b"")
    assert lab.sent() == []
    assert lab.stream.closed() is End.COMPLETED


def test_a_body_over_the_limit_is_refused_and_let_go_of():
    lab = Lab(max_body_bytes=10)
    lab.receive(**headers())
    assert lab.receive(**body(b"12345678")) == []
    (out,) = lab.receive(**body(b"901"))
    assert out.immediate_response.status.code == 413
    assert lab.receive(**body(b"x", end=True)) == []
    assert lab.heard == []


@pytest.mark.parametrize("messages", [0, 1, 2, 3, 4])
def test_a_stream_that_closes_before_the_end_of_an_answer_was_aborted(messages):
    lab = Lab()
    for message in (headers(), body(b"{}", end=True), response(), piece(b"x"))[:messages]:
        lab.receive(**message)
    assert lab.stream.closed() is End.ABORTED
    assert "complete" not in lab.heard


def hinted(value):
    fields = {"x-gateway-destination-endpoint-subset": value}
    return {"filter_metadata": {"envoy.lb.subset_hint": {"fields": fields}}}


ADDRESSES = [{"string_value": "10.0.0.1:80"}, {"string_value": " 10.0.0.2 "}]


@pytest.mark.parametrize(
    ("metadata", "subset"),
    [
        ({}, None),
        ({"filter_metadata": {"envoy.lb.subset_hint": {}}}, None),
        ({"filter_metadata": {"another": {}}}, None),
        (hinted({"list_value": {"values": ADDRESSES}}), ["10.0.0.1:80", "10.0.0.2"]),
        (hinted({"string_value": "10.0.0.1:80, 10.0.0.2"}), ["10.0.0.1:80", "10.0.0.2"]),
        (hinted({"string_value": ""}), []),
        (hinted({"list_value": {}}), []),
        (hinted({"null_value": 0}), []),
    ],
)
def test_subset_hints_are_lists_or_words_with_commas(metadata, subset):
    lab = Lab()
    lab.receive(**headers(end=True), metadata_context=metadata)
    assert lab.request.subset == subset


def test_header_values_are_read_from_either_field():
    lab = Lab()
    listed = [{"key": "a", "value": "text"}, {"key": "b", "raw_value": b"\xff"}]
    lab.receive(request_headers={"headers": {"headers": listed}, "end_of_stream": True})
    assert lab.request.named == {b"a": b"text", b"b": b"\xff"}
