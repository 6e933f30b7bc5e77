"""`sumibi demo pd`: the client that times tokens, what is claimed of them, what is written."""

import asyncio
import contextlib
import json
import statistics
from itertools import pairwise

import pytest

from sumibi.demo.pd import LONG, STREAM, judge
from sumibi.demo.pd_report import print_table, write_json, write_picture
from sumibi.demo.pd_results import Arrangement, Gap, LongPrompt
from sumibi.demo.streams import Arrival, Kind, Target, keep, play, prompt

SHORT = Kind("short", prompt_tokens=5, output_tokens=4)
SPLIT = Kind("split", prompt_tokens=6, output_tokens=4)
BAD = Kind("bad", prompt_tokens=7, output_tokens=4)
CUT = Kind("cut", prompt_tokens=8, output_tokens=4)
REFUSED = Kind("refused", prompt_tokens=9, output_tokens=4)
EVERY_S = 0.03


def event(tokens):
    data = b"data: " + json.dumps({"choices": [{"text": "x", "token_ids": tokens}]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def answer(reader, writer):
    try:
        await respond(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def respond(reader, writer):
    """A gateway that sends a token every EVERY_S; what it does beside that goes by the prompt's length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length")).split()[1])
    asked = json.loads(await reader.readexactly(length))
    assert asked["return_token_ids"] is True
    assert asked["ignore_eos"] is True
    kind = len(asked["prompt"])
    if kind == REFUSED.prompt_tokens:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy")
        return
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for number in range(asked["max_tokens"] - (1 if kind == CUT.prompt_tokens else 0)):
        await asyncio.sleep(EVERY_S)
        if kind == BAD.prompt_tokens and number == 2:
            data = b'data: {"error": {"message": "no more"}}\n\n'
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            break
        if kind == SPLIT.prompt_tokens and number % 2:
            continue  # two tokens in the next event
        writer.write(event([1, 2] if kind == SPLIT.prompt_tokens else [1]))
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def against_a_gateway(use):
    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await use(Target(f"http://127.0.0.1:{port}", "m"))

    return asyncio.run(run())


def test_every_token_has_its_time():
    (one,) = against_a_gateway(lambda to: play(to, [Arrival(0.0, SHORT, "a")], late_s=5.0))
    assert one.whole
    assert len(one.token_s) == 4
    assert one.ttft_s >= EVERY_S
    assert all(gap_s >= EVERY_S / 2 for gap_s in one.gaps_s)
    assert sum(one.gaps_s) >= 2.5 * EVERY_S


def test_tokens_of_one_event_come_at_once():
    (one,) = against_a_gateway(lambda to: play(to, [Arrival(0.0, SPLIT, "a")], late_s=5.0))
    assert one.whole
    assert one.gaps_s[0] == one.gaps_s[2] == 0.0
    assert one.gaps_s[1] >= EVERY_S


@pytest.mark.parametrize(("kind", "error", "tokens"), [
    (BAD, "the stream ended with an error", 2),
    (CUT, "", 3),
    (REFUSED, "the gateway answered HTTP/1.1 503 Service Unavailable: ", 0),
])  # fmt: skip
def test_what_is_not_whole_is_told(kind, error, tokens):
    (one,) = against_a_gateway(lambda to: play(to, [Arrival(0.0, kind, "a")], late_s=5.0))
    assert not one.whole
    assert error in one.error
    assert bool(one.error) == bool(error)
    assert len(one.token_s) == tokens


def test_nobody_there_is_an_error_of_the_request():
    (one,) = asyncio.run(play(Target("http://127.0.0.1:1", "m"), [Arrival(0.0, SHORT, "a")], late_s=5.0))
    assert one.error
    assert one.ttft_s == float("inf")


def test_requests_leave_at_their_times_and_what_is_late_is_cut_off():
    slow = Kind("slow", prompt_tokens=5, output_tokens=1_000)
    arrivals = [Arrival(0.2, SHORT, "b"), Arrival(0.0, slow, "a")]
    heard = against_a_gateway(lambda to: play(to, arrivals, late_s=0.5))
    assert [one.kind for one in heard] == [slow, SHORT], "in the order in which they leave"
    assert heard[1].asked_s - heard[0].asked_s == pytest.approx(0.2, abs=0.1)
    assert heard[1].whole
    assert 0 < len(heard[0].token_s) < 30
    assert not heard[0].error, "nobody failed: it was cut off here"


def test_streams_follow_each_other_and_prompts_their_first_tokens():
    heard = against_a_gateway(
        lambda to: keep(to, streams=[SHORT], prompts=[CUT], seed="s", lasts_s=10 * EVERY_S)
    )
    streams = [one for one in heard if one.kind is SHORT]
    prompts = [one for one in heard if one.kind is CUT]
    for before, after in pairwise(streams):
        assert after.asked_s >= before.token_s[-1]
    for before, after in pairwise(prompts):
        assert after.asked_s >= before.token_s[0]
    assert len(prompts) > len(streams) >= 2


def test_who_cuts_it_off_cuts_off_all():
    async def cut(to):
        heard = []
        keeping = asyncio.ensure_future(
            keep(to, streams=[SHORT] * 2, prompts=[SHORT], seed="s", lasts_s=60.0, heard=heard)
        )
        await asyncio.sleep(2.5 * EVERY_S)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        tokens = [len(one.token_s) for one in heard]
        left = [task for task in asyncio.all_tasks() if "ask" in repr(task.get_coro())]
        await asyncio.sleep(2 * EVERY_S)
        return left, tokens, [len(one.token_s) for one in heard]

    left, before, after = against_a_gateway(cut)
    assert left == []
    assert sum(before) > 0
    assert before == after


def test_prompts_are_as_long_as_said_and_differ_by_seed():
    assert len(prompt(2_000, "a")) == 2_000
    assert prompt(64, "a") == prompt(64, "a")
    assert prompt(64, "a")[:8] != prompt(64, "b")[:8]


def arrangement(name, *gaps_s, prompts=((1.0, 2.5), (3.0, 5.5))):
    return Arrangement(
        name=name,
        itl_p50_s=statistics.median(gaps_s),
        itl_p99_s=max(gaps_s),
        itl_most_s=max(gaps_s),
        gaps=[Gap(0.1 * at, gap_s) for at, gap_s in enumerate(gaps_s)],
        prompts=[LongPrompt(*each) for each in prompts],
    )


def test_claims():
    together, apart = arrangement("a", 0.02, 0.03, 0.5), arrangement("b", 0.02, 0.03, 0.1)
    lower, served = judge([together, apart])
    assert (lower.value, lower.held) == (pytest.approx(5.0), True)
    assert served.held
    lower, served = judge([apart, arrangement("c", 0.02, 0.09, prompts=[(1.0, None)])])
    assert not lower.held
    assert (served.value, served.held) == (1, False)


def test_median_of_the_long_prompts_that_were_served():
    assert arrangement("a", 0.1, prompts=[(1.0, 3.0), (2.0, None), (5.0, 9.0)]).ttft_s == pytest.approx(3.0)
    assert arrangement("a", 0.1, prompts=[(2.0, None)]).ttft_s is None


def test_what_is_written(tmp_path, capsys):
    both = [arrangement("a", 0.02, 0.03, 0.5), arrangement("b", 0.02, 0.03, prompts=[(1.0, None)])]
    claims = judge(both)
    write_json(tmp_path / "demo-pd.json", both, claims)
    write_picture(tmp_path / "demo-pd.png", both, claims)
    print_table(both, claims)
    data = json.loads((tmp_path / "demo-pd.json").read_text())
    assert [each["name"] for each in data["arrangements"]] == ["a", "b"]
    assert data["arrangements"][0]["gaps"][2] == {"at_s": pytest.approx(0.2), "gap_s": 0.5}
    assert data["claims"][0]["held"] is True
    assert (tmp_path / "demo-pd.png").read_bytes().startswith(b"\x89PNG")
    assert "NOT HELD" in capsys.readouterr().out


def test_the_script_is_that_of_the_issue():
    assert (STREAM.output_tokens, LONG.prompt_tokens) == (200, 2_000)
