"""Trace readers on made rows of each format, worked out by hand; on the recorded ones their known sums."""

import gzip
import json
import lzma
from pathlib import Path

import msgspec
import pytest

from sumibi.bench.traces import TraceError, read, read_all
from sumibi.bench.workloads import generate
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import (
    Admitted,
    Arrived,
    EndpointUp,
    Event,
    Finished,
    FinishReason,
    FirstToken,
)
from sumibi.routing.recording import Started
from sumibi.sim.arithmetic import bound, in_order, prepare
from sumibi.sim.fleet import FleetSpec, Group
from sumibi.sim.simulate import simulate
from sumibi.sim.workload import Workload


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def request(t: float, tokens: int, ids: list[int], **more) -> dict:
    return {"t": t, "type": "n", "in": tokens, "out": 5, "hash_ids": ids, "api_time": 2.0} | more


WEKA = {
    "id": "trace_1",
    "block_size": 64,
    "tool_tokens": 64,
    "system_tokens": 70,
    "requests": [
        request(0.0, 130, [1, 2]),
        request(10.0, 200, [1, 2, 3], think_time=7.5),
        {
            "t": 11.25,
            "type": "subagent",
            "agent_id": "agent_001",
            "requests": [request(0.5, 64, [9]), request(400.5, 130, [9, 10], think_time=None)],
        },
        request(500.0, 260, [1, 2, 3, 4], type="s", api_time=None),
    ],
}


@pytest.fixture
def weka(tmp_path: Path) -> Path:
    return write(tmp_path / "weka.jsonl", [WEKA])


def test_weka(weka: Path):
    (session,) = read(weka).sessions
    assert session.name == "trace_1"
    assert session.start_s is None
    assert [turn.agent for turn in session.turns] == ["", "", "agent_001", "agent_001", ""]
    assert [turn.prompt_tokens for turn in session.turns] == [130, 200, 64, 130, 260]
    # the main thread goes on without its sub-agent, which waits for the turn that called it
    assert [turn.after for turn in session.turns] == [None, 0, 1, 2, 1]
    # as recorded; 11.75 - 10 - 2 is before the end; 400.5 - 0.5 - 2 and 500 - 10 - 2, cut to 300
    assert [turn.delay_s for turn in session.turns] == [0.0, 7.5, 0.0, 300.0, 300.0]
    # by the clock: entries at 0, 10, 11.25, and 488.75 cut to 300 later; inside 0.5 and 300 more
    assert [turn.offset_ms for turn in session.turns] == [0, 10_000, 11_250, 311_250, 311_250]
    assert [list(turn.blocks) for turn in session.turns] == [[0, 1], [0, 1, 2], [3], [3, 4], [0, 1, 2, 5]]
    assert len(set(session.keys)) == 6


def test_weka_ids_are_the_sessions_own(tmp_path: Path):
    one, other = read(write(tmp_path / "two", [WEKA, WEKA | {"id": "trace_2"}])).sessions
    assert not set(one.keys) & set(other.keys)


def test_weka_prefixes_can_be_shared(tmp_path: Path):
    from sumibi.bench.traces.lines import read_lines
    from sumibi.bench.traces.weka import read as read_weka

    path = write(
        tmp_path / "three",
        [WEKA, WEKA | {"id": "trace_2"}, WEKA | {"id": "trace_3", "system_tokens": 80}],
    )
    one, same, other = read_weka(path, read_lines(path), shared_prefix=True).sessions
    # 134 tokens of tools and system prompt: two blocks, the first of them tools alone
    assert len(set(one.keys) & set(same.keys)) == 2
    assert len(set(one.keys) & set(other.keys)) == 1
    # a sub-agent has another prompt
    assert one.turns[2].blocks != one.turns[0].blocks[:1]


def test_weka_one_session_a_file(tmp_path: Path):
    path = tmp_path / "trace_0001.json"
    path.write_text(json.dumps(WEKA, indent=2))
    assert read_all([path, path]).requests == 10


MOONCAKE = [
    {"timestamp": 5_000, "input_length": 1_300, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 6_500, "input_length": 1_024, "output_length": 9, "hash_ids": [0, 1]},
]


def test_mooncake(tmp_path: Path):
    workload = read(write(tmp_path / "m.jsonl", MOONCAKE))
    assert workload.block_tokens == 512
    first, second = workload.sessions
    assert [first.start_s, second.start_s] == [0.0, 1.5]
    assert (list(first.turns[0].blocks), first.turns[0].tail) == ([0, 1], 2)
    assert (list(second.turns[0].blocks), second.turns[0].tail) == ([0, 1], None)
    assert first.keys[:2] == second.keys
    assert second.turns[0].output_tokens == 9


def test_bailian(tmp_path: Path):
    rows = [(7, -1, 1.0, 40, [1, 2, 3]), (8, -1, 2.0, 16, [9]), (9, 7, 5.0, 64, [1, 2, 4, 5])]
    records = [
        {"chat_id": chat, "parent_chat_id": parent, "timestamp": t, "input_length": tokens,
         "output_length": 3, "type": "text", "turn": 1, "hash_ids": ids}
        for chat, parent, t, tokens, ids in rows
    ]  # fmt: skip
    workload = read(write(tmp_path / "b.jsonl", records))
    assert workload.block_tokens == 16
    chat, other = workload.sessions
    assert [len(chat.turns), len(other.turns)] == [2, 1]
    assert (other.start_s, chat.turns[1].after, chat.turns[1].delay_s) == (1.0, 0, 4.0)
    assert chat.turns[1].offset_ms == 4_000
    assert chat.prompt_keys(chat.turns[1])[:2] == chat.prompt_keys(chat.turns[0])
    assert chat.turns[0].tail is not None
    assert len(chat.turns[1].blocks) == 4


def test_azure(tmp_path: Path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    one, other = read(path).sessions
    assert other.start_s == pytest.approx(4.314579)
    assert [one.turns[0].prompt_tokens, one.turns[0].output_tokens] == [374, 44]
    assert not set(one.keys) & set(other.keys)


def chat(texts: list[str], **more) -> dict:
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)
    ]
    return {"model": "m", "messages": messages} | more


def test_access_log(tmp_path: Path):
    question, answer = "how does charcoal burn? " * 40, "slowly, and without smoke. " * 30
    lines = [
        {
            "time": "2026-01-05T10:00:00Z",
            "duration_s": 2.5,
            "request": chat([question], max_tokens=50),
            "usage": {"prompt_tokens": 246, "completion_tokens": 40},
        },
        {
            "time": "2026-01-05T10:00:01Z",
            "request": json.dumps(chat(["something else " * 60])),
            "response": {"usage": {"prompt_tokens": 230, "completion_tokens": 20}},
        },
        {
            "time": "2026-01-05T10:00:10+00:00",
            "request": chat([question, answer, "and then?"]),
            "usage": {"prompt_tokens": 460},
        },
    ]
    workload = read(write(tmp_path / "access.jsonl", lines))
    assert workload.block_tokens == 32
    conversation, other = workload.sessions
    first, second = conversation.turns
    assert [len(first.blocks), len(second.blocks), len(other.turns[0].blocks)] == [7, 14, 7]
    assert second.blocks[:6] == first.blocks[:6]
    assert (second.after, second.delay_s, second.offset_ms) == (0, 7.5, 10_000)
    assert (first.output_tokens, first.max_tokens) == (40, 50)
    # what the log does not say is the mean of the rest
    assert second.output_tokens == 30
    assert other.start_s == 1.0


def test_access_log_with_sessions_and_prompts(tmp_path: Path):
    lines = [
        {"ts": 1_767_600_003_000, "session_id": "s", "prompt": "a b c d", "usage": {"prompt_tokens": 4}},
        {"ts": 1_767_600_000_000, "session_id": "s", "prompt": "e f g h", "usage": {"prompt_tokens": 4}},
    ]
    (session,) = read(write(tmp_path / "log", lines)).sessions
    assert session.name == "s"
    assert [turn.offset_ms for turn in session.turns] == [0, 3_000]


def told(workload: Workload, path: Path) -> list[str]:
    """Session ids that a router is told when this is played, sorted."""
    group = Group(count=2, latency="llama-3.1-8b/1xh100", kv_tokens=100_000)
    with path.open("wb") as log:
        simulate(workload, FleetSpec(name="two", groups=[group]), log=log)
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    return sorted(record.get("session", "") for record in records if record["type"] == "Arrived")


def test_access_log_tells_the_session_ids_that_requests_carried(tmp_path: Path):
    prompt = {"prompt": "a b c d", "usage": {"prompt_tokens": 4, "completion_tokens": 1}}
    ids: list[dict] = [{"session_id": "s"}, {}, {"session_id": "s"}, {"session_id": "u"}]
    named = write(tmp_path / "named", [{"ts": 10 * i} | prompt | one for i, one in enumerate(ids)])
    unnamed = write(tmp_path / "unnamed", [{"ts": 0} | prompt, {"ts": 5} | prompt])
    log = tmp_path / "events.jsonl"
    assert told(read(named), log) == ["", "s", "s", "u"]
    assert told(read(unnamed), log) == ["", ""]
    # files played as one: each says what its own requests carried
    for paths in ([unnamed, named], [named, unnamed]):
        assert told(read_all(paths), log) == ["", "", "", "s", "s", "u"]


def up(t: float, engine_block_tokens: int = 32) -> EndpointUp:
    return EndpointUp(
        t=t, endpoint="http://e:1#0", models=["m"], engine_block_tokens=engine_block_tokens, kv_tokens=10_000
    )


def recorded(
    t: float, name: str, keys: list[int], tokens: int, end: float, output: int | None
) -> list[Event]:
    return [
        Arrived(t=t, request=name, model="m", keys=keys, prompt_tokens=tokens, tenant="acme", priority=5),
        Admitted(t=t, request=name),
        FirstToken(t=end - 0.5, request=name, attempt=1),
        Finished(
            t=end, request=name, attempt=1, reason=FinishReason.STOP, answered=True, output_tokens=output
        ),
    ]


def write_log(path: Path, records: list) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return path


def test_recording(tmp_path: Path):
    log: list = [
        Started(RouterConfig()),
        up(100.0),
        *recorded(103.0, "r1", [11, 12], 70, 105.0, 20),
        *recorded(110.0, "r2", [11, 12, 13], 100, 112.0, None),
        # another life of the gateway, another clock
        Started(RouterConfig()),
        up(7.0),
        *recorded(9.0, "r1", [21], 40, 10.0, 30),
    ]
    workload = read(write_log(tmp_path / "events.jsonl", log))
    # as large as the engine's
    assert workload.block_tokens == 32
    first, later = workload.sessions
    assert [(turn.after, turn.delay_s) for turn in first.turns] == [(None, 0.0), (0, 5.0)]
    assert [turn.output_tokens for turn in first.turns] == [20, 25]
    assert first.prompt_keys(first.turns[1]) == [11, 12, 13]
    assert (first.tenant, first.priority, first.model) == ("acme", 5, "m")
    # 112 s is where the first life ended; its first arrival was at 103
    assert later.start_s == pytest.approx(112.0 + 2.0 - 103.0)


def test_what_a_router_was_told_can_be_played_again(tmp_path: Path):
    group = Group(count=2, latency="llama-3.1-8b/1xh100", kv_tokens=100_000)
    workload = generate("w7:users=3,sessions=6")
    with (tmp_path / "events.jsonl").open("wb") as log:
        run = simulate(workload, FleetSpec(name="two", groups=[group]), users=3, log=log)
    again = read(tmp_path / "events.jsonl")
    first_s = min(run.calls.arrival_s)
    arrivals = [
        (session.start_s or 0) + turn.offset_ms / 1000 for session in again.sessions for turn in session.turns
    ]
    assert sorted(arrivals) == pytest.approx(sorted(t - first_s for t in run.calls.arrival_s), abs=0.001)
    # prompts grow by what was said: turns are put together again as they were
    assert sorted(len(s.turns) for s in again.sessions) == sorted(len(s.turns) for s in workload.sessions)
    assert again.block_tokens == 64
    assert bound(in_order(prepare(again))) == bound(in_order(prepare(workload), 3))


def test_recording_tells_the_session_ids_that_requests_carried(tmp_path: Path):
    carried = [
        msgspec.structs.replace(event, session="s") if isinstance(event, Arrived) else event
        for event in recorded(103.0, "r1", [11], 40, 105.0, 5) + recorded(110.0, "r2", [21], 40, 112.0, 5)
    ]
    start: list = [Started(RouterConfig()), up(100.0)]
    unnamed = recorded(120.0, "r3", [31], 40, 121.0, 5)
    path, log = tmp_path / "events.jsonl", tmp_path / "again.jsonl"
    assert told(read(write_log(path, start + carried + unnamed)), log) == ["", "s", "s"]
    assert told(read(write_log(path, start + unnamed)), log) == [""]


def test_a_recording_without_its_beginning(tmp_path: Path):
    path = write_log(tmp_path / "events.jsonl", recorded(1.0, "r", [], 5, 2.0, 1))
    with pytest.raises(TraceError, match=r"events\.jsonl, line 1: the beginning of this run"):
        read(path)


@pytest.mark.parametrize("open_file", [gzip.open, lzma.open])
def test_compressed(tmp_path: Path, open_file):
    path = tmp_path / "trace"
    with open_file(path, "wt") as file:
        file.write("".join(json.dumps(record) + "\n\n" for record in MOONCAKE))
    assert read(path).requests == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{}\n", "line 1: is of no known format; --format names one of weka, mooncake"),
        ("hello\n", "line 1: is of no known format"),
        (json.dumps(MOONCAKE[0]) + "\n{", "line 2: is not JSON"),
        (json.dumps(MOONCAKE[0] | {"input_length": "x"}), r"line 1: Expected `int`.*input_length"),
        (json.dumps(MOONCAKE[0] | {"input_length": 512}), r"line 1: `input_length` 512 needs 1 `hash_ids`"),
        (json.dumps(MOONCAKE[0] | {"hash_ids": [1 << 70, 1, 2]}), r"line 1: .*hash_ids"),
        (json.dumps(WEKA | {"requests": [request(0, 64, [])]}), r"line 1: a request of 64 tokens .* 1 are"),
        (json.dumps(WEKA | {"requests": [{"t": 0, "type": "q"}]}), r"line 1: Invalid value 'q'.*requests"),
        (json.dumps(MOONCAKE[0] | {"output_length": -1}), r"line 1: Expected `int` >= 0.*output_length"),
        (json.dumps({"messages": [], "time": 1}), r"line 1: messages.*length"),
        (json.dumps({"messages": [3], "time": 1}), r"line 1: messages\[0\]: a JSON object is needed"),
        (
            json.dumps({"prompt": "a", "time": 1, "usage": {"prompt_tokens": 1 << 60}}),
            r"line 1: `usage.prompt_tokens` must be a whole number from 0 to 100000000",
        ),
        (json.dumps({"prompt": "a", "time": "noon"}), r"line 1: `time` must be a number or ISO 8601"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", r"line 2: needs TIMESTAMP"),
    ],
)
def test_errors_say_where(tmp_path: Path, content: str, message: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"trace\.jsonl.*" + message):
        read(path)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(TraceError, match="there is no such file"):
        read(tmp_path / "absent")
    with pytest.raises(TraceError, match="is a directory"):
        read(tmp_path)
    cut = tmp_path / "cut.xz"
    cut.write_bytes(lzma.compress(json.dumps(MOONCAKE[0]).encode() * 1000)[:-30])
    with pytest.raises(TraceError, match="cannot be read"):
        read(cut)
    with pytest.raises(TraceError, match="unknown format 'csv'; allowed: weka"):
        read(write(tmp_path / "m", MOONCAKE), "csv")


def test_files_of_different_blocks_do_not_mix(tmp_path: Path, weka: Path):
    with pytest.raises(TraceError, match="blocks of 512 tokens"):
        read_all([weka, write(tmp_path / "m", MOONCAKE)])


@pytest.mark.traces
def test_the_recorded_traces(traces: Path):
    sessions = read(traces / "weka" / "sessions.jsonl.xz")
    assert (sessions.requests, len(sessions.sessions)) == (8_465, 120)
    assert sum(bool(turn.agent) for session in sessions.sessions for turn in session.turns) == 326
    mooncake = read(traces / "mooncake" / "synthetic_trace.jsonl.xz")
    assert mooncake.requests == 3_993
    assert round(mooncake.sessions[-1].start_s or 0) == 1_022
