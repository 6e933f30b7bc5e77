"""What is read of an answer on its way through, however its bytes are cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sumibi.gateway.answers import EventStream, JsonAnswer
from sumibi.gateway.readings import Usage, reading_of
from sumibi.gateway.rewriting import Cached, with_cached
from sumibi.prompts.dialects import Dialect

CHAT = reading_of(Dialect.CHAT)


def event(body) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def usage(prompt=7, output=3, cached=4):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


TOKEN = event({"choices": [{"delta": {"content": 'said "usage": {\\n\\n}'}}], "usage": None})
WITH_USAGE = event({"choices": [], "usage": usage()})
DONE = event(b"[DONE]")

STREAMS = {
    "plain": (TOKEN * 3 + DONE, 4, None),
    "usage": (TOKEN * 3 + WITH_USAGE + DONE, 5, Usage(7, 4, 3, exact=True)),
    "usage in every event": (
        event({"usage": usage(output=1)}) + event({"usage": usage(output=2)}) + DONE,
        3,
        Usage(7, 4, 2, exact=True),
    ),
    "carriage returns": ((TOKEN + WITH_USAGE + DONE).replace(b"\n", b"\r\n"), 3, Usage(7, 4, 3, exact=True)),
    "comments": (b": ping\n\n" + TOKEN + WITH_USAGE + b": bye\n\n", 4, Usage(7, 4, 3, exact=True)),
    "named events": (b"event: x\n" + WITH_USAGE, 1, Usage(7, 4, 3, exact=True)),
    "no details": (event({"usage": {"prompt_tokens": 1}}), 1, Usage(1, None, None, exact=True)),
    "tiers": (
        event(
            {
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": 3,
                    "prompt_tokens_details": {
                        "cached_tokens": 4,
                        "cached_tokens_by_tier": {"device": 1, "host": 3},
                    },
                }
            }
        ),
        1,
        Usage(7, 4, 3, exact=True, cached_by_tier={"device": 1, "host": 3}),
    ),
    "odd tiers": (
        event(
            {
                "usage": {
                    "prompt_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 4, "cached_tokens_by_tier": ["host"]},
                }
            }
        ),
        1,
        Usage(7, 4, None, exact=True),
    ),
    "lies": (event({"usage": usage(prompt=-1)}) + DONE, 2, None),
    "no json": (event(b'"usage" {{{') + DONE, 2, None),
    "nothing": (b"", 0, None),
}


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({place % (len(data) + 1) for place in at} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize(("data", "events", "wanted"), STREAMS.values(), ids=STREAMS.keys())
@given(at=st.lists(st.integers(0, 10_000), max_size=30))
def test_a_stream_is_read_the_same_however_it_is_cut(data, events, wanted, at):
    stream, passed = EventStream(CHAT), b""
    for piece in cut(data, at):
        passed += stream.feed([piece])
        assert passed == b"" or passed.endswith((b"\n\n", b"\r\n\r\n"))
    assert passed + stream.rest() == data
    assert stream.events == events
    assert stream.usage() == wanted


def ended(*reasons):
    choices = [{"index": i, "text": "", "finish_reason": reason} for i, reason in enumerate(reasons)]
    return {"choices": choices}


@pytest.mark.parametrize(
    ("answer", "finish"),
    [
        (ended("length"), "length"),
        (ended("stop", "length"), "length"),
        (ended("length", None), "length"),
        (ended(None), ""),
        (ended("x" * 100), "x" * 32),
        (ended(7), ""),
        ({"choices": None}, ""),
        ({"choices": {"finish_reason": "stop"}}, ""),
        ({}, ""),
    ],
)
def test_why_an_answer_ended_is_the_engine_s_word_and_never_in_the_way_of_usage(answer, finish):
    body = JsonAnswer(CHAT)
    body.feed([json.dumps({**answer, "usage": usage()}).encode()])
    assert (body.finish(), body.usage()) == (finish, Usage(7, 4, 3, exact=True))
    last = {} if "choices" not in answer else answer
    for stream in (
        TOKEN + event(last) + WITH_USAGE + DONE,
        TOKEN * 9 + event({**last, "usage": usage()}) + DONE,
    ):
        reading = EventStream(CHAT)
        for piece in cut(stream, list(range(0, len(stream), 40))):
            reading.feed([piece])
        assert (reading.finish(), reading.usage()) == (finish, Usage(7, 4, 3, exact=True))


def test_pieces_that_come_together_are_one_block():
    stream = EventStream(CHAT)
    assert stream.feed([TOKEN[:5], TOKEN[5:], DONE[:3]]) == TOKEN
    assert stream.feed([DONE[3:]]) == DONE


def test_an_event_without_end_is_passed_on_before_it_fills_the_memory():
    stream, passed = EventStream(CHAT), 0
    for _ in range(1000):
        passed += len(stream.feed([b"x" * 1000]))
    assert passed > 700_000
    assert passed + len(stream.rest()) == 1_000_000


@given(at=st.lists(st.integers(0, 10_000), max_size=10))
def test_usage_of_a_json_answer_is_found_wherever_it_stands(at):
    whole = {"choices": [{"text": "x" * 300}], "usage": usage(), "prompt_token_ids": [1] * 200}
    body = json.dumps(whole).encode()
    answer = JsonAnswer(CHAT)
    for piece in cut(body, at):
        answer.feed([piece])
    assert answer.usage() == Usage(7, 4, 3, exact=True)


@pytest.mark.parametrize(
    ("tail", "failed"),
    [
        (event({"error": {"message": "out of memory", "code": 500}}) + DONE, True),
        (event({"choices": [{"delta": {"content": '"error": {}'}}]}) + DONE, False),
        (event({"choices": [], "error": None}) + DONE, False),
        (event(b'{"error": ') + DONE, False),
    ],
)
def test_an_error_that_the_engine_puts_into_its_stream_is_seen(tail, failed):
    stream = EventStream(CHAT)
    stream.feed([TOKEN, TOKEN])
    assert not stream.failed()
    stream.feed([tail])
    assert stream.failed() is failed


@pytest.mark.parametrize("step", [1, 50, 10_000])
def test_counts_of_an_opening_event_are_found_whatever_came_with_it(step):
    data = (
        b'event: message_start\ndata: {"message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}\n\n'
        b'event: message_delta\ndata: {"delta": {"stop_reason": "x"}, "usage": {"output_tokens": 3}}\n\n'
    )
    stream = EventStream(reading_of(Dialect.MESSAGES))
    for at in range(0, len(data), step):
        stream.feed([data[at : at + step]])
    usage = stream.usage()
    assert (usage.prompt_tokens, usage.output_tokens) == (7, 3)


def test_brackets_nested_deeper_than_a_decoder_goes_are_no_usage_and_go_on_as_they_are():
    deep = b'{"usage": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    answer, stream = JsonAnswer(CHAT), EventStream(CHAT)
    answer.feed([deep])
    assert (answer.usage(), answer.finish()) == (None, "")
    assert stream.feed([b"data: %b\n\n" % deep]) == b"data: %b\n\n" % deep
    assert (stream.usage(), stream.failed()) == (None, False)
    assert with_cached(deep, Cached(5)) == deep


def test_a_json_answer_too_long_to_be_kept_has_no_usage():
    answer = JsonAnswer(CHAT)
    for _ in range(100):
        answer.feed([b" " * 100_000])
    answer.feed([json.dumps({"usage": usage()}).encode()])
    assert answer.usage() is None
