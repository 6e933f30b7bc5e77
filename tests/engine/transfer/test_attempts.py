"""What a request pulled or computed itself is no cache hit, however many attempts it took."""

import pytest

from sumibi.engine.attempts import Attempts
from sumibi.engine.sequence import SamplingParams, Sequence

SEEDS = iter(range(401, 500))
TOKENS = 200
"""Of a prompt: six full blocks of 32, and some."""
ASK = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def both(make_served, make_config, make_pair):
    with (
        make_served(kv_transfer=make_config()) as p,
        make_served(kv_transfer=make_config(transports=["tcp"], kv_transfer_timeout=5.0)) as d,
    ):
        yield make_pair(p, d)


@pytest.fixture
def token_ids(make_prompt):
    return make_prompt(next(SEEDS), TOKENS)


@pytest.fixture
def broken(both, make_proxy):
    """Parameters of `stream` whose connection breaks after two and a half blocks."""
    ids = iter(range(100))

    def make(token_ids, name):
        transfer_id = f"{name}-{next(ids)}"
        params = both.prefill(token_ids, transfer_id=transfer_id)["kv_transfer_params"]
        block_bytes = both.d.door.engine._model.block_bytes

        def spoil(data, sent):
            if sent + len(data) > 2.5 * block_bytes:
                raise OSError("cut")
            return data

        proxy = make_proxy(params["remote_host"], params["remote_port"], spoil)
        return {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_host": "127.0.0.1",
            "remote_port": proxy.port,
        }

    return make


def details(answer):
    return answer["usage"]["prompt_tokens_details"]


def headers(request_id, attempt=1):
    return {"x-request-id": request_id} | ({"x-sumibi-attempt": str(attempt)} if attempt > 1 else {})


def test_blocks_of_a_pull_that_broke_are_no_hits(both, broken, token_ids):
    answer = both.decode(token_ids, broken(token_ids, "broke"), **ASK)
    assert details(answer) == {"cached_tokens": 0}
    both.p.door.engine.transfers._offers.end_all()
    both.idle()


@pytest.mark.parametrize("warm", [0, 96])
def test_a_further_attempt_tells_what_the_first_one_found(both, broken, token_ids, warm):
    if warm:
        both.d.complete(token_ids[: warm + 1], max_tokens=1)
    name = f"mine-{warm}"
    first = both.decode(token_ids, broken(token_ids, name), headers=headers(name), **ASK)
    assert details(first)["cached_tokens"] == warm
    for attempt in (2, 3):
        again = both.d.complete(token_ids, headers=headers(name, attempt), **ASK)
        assert details(again)["cached_tokens"] == warm
    body = {"prompt": token_ids, "stream_options": {"include_usage": True}, **ASK}
    with both.d.http.stream(
        "POST",
        "/v1/completions",
        json={"model": both.d.name, "stream": True, **body},
        headers=headers(name, 4),
    ) as answer:
        last = [line for line in answer.iter_lines() if '"usage":{' in line][-1]
    assert f'"cached_tokens":{warm}}}' in last
    # Whoever sends it for the first time is told what is there: all full blocks.
    for others in (headers(name), headers("theirs"), headers("theirs-2", 2)):
        hit = both.d.complete(token_ids, headers=others, **ASK)
        assert details(hit)["cached_tokens"] == 192
    both.p.door.engine.transfers._offers.end_all()
    both.idle()


def test_the_prefill_side_keeps_to_it_as_well(both, token_ids):
    keep = {"do_remote_decode": True, "do_remote_prefill": False}
    for attempt in (1, 2):
        fields = {"max_tokens": 1, "headers": headers("kept", attempt)}
        answer = both.p.complete(token_ids, kv_transfer_params=keep, **fields)
        assert details(answer)["cached_tokens"] == 0
    both.p.door.engine.transfers._offers.end_all()
    both.idle()


@pytest.mark.parametrize("word", ["", "two", "-2", "2.5", "9" * 30])
def test_an_attempt_that_is_no_number_is_the_first(both, token_ids, word):
    for expected in (0, 192):
        answer = both.d.complete(token_ids, headers={"x-request-id": word, "x-sumibi-attempt": word}, **ASK)
        assert details(answer)["cached_tokens"] == expected


def sequence(number, attempt=1, cached=0):
    found = Sequence(
        number=number,
        prompt_tokens=8,
        tokens=[1] * 8,
        params=SamplingParams(max_tokens=1),
        content_ids=[b"x"],
        root=b"",
        request_id=f"r{number}",
        attempt=attempt,
    )
    found.cached_tokens = cached
    return found


def test_what_is_remembered_is_bounded():
    attempts = Attempts()
    for number in range(5000):
        attempts.note(sequence(number, cached=4))
    assert len(attempts._found) == 4096
    old, new = sequence(0, attempt=2, cached=8), sequence(4999, attempt=2, cached=8)
    attempts.note(old)
    attempts.note(new)
    assert (old.cached_limit, new.cached_limit) == (None, 4)
