"""An agents' trace, made here, replayed by programs that people measure with: their report and ours agree."""

import json
import os
import subprocess
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from stack_harness import eventually

from sumibi.bench import traces
from sumibi.bench.workloads import AgentShape, agents
from sumibi.sim.workload import Session, Workload

REPLAY_S = 300
ENDED = {"stop", "length", "end_turn", "max_tokens", "completed", "max_output_tokens"}
"""How answers end, in the words of each API."""
SHAPE = AgentShape(
    tool_tokens=256,
    groups=1,
    group_tokens=128,
    task_tokens=(40, 80),
    turns=(3, 4),
    input_tokens=(60, 100),
    output_tokens=(8, 12),
    gap_s=(0.1, 0.2),
    longest_gap_s=0.5,
    resets=0.1,
    fan_outs=0.0,
    context_tokens=2_000,
)
WORDS = ("ash", "birch", "coal", "draught", "ember", "flue", "grate", "hearth", "iron", "kiln", "log", "oak")


def made(seed: int) -> Workload:
    """Two agents that share tools and instructions, and begin nothing that another seed's begin."""
    return agents(sessions=2, seed=seed, shape=SHAPE)


def text_of(key: int) -> str:
    """The words of a block, some 40 tokens."""
    random = Random(key)
    return " ".join(random.choice(WORDS) for _ in range(20))


def as_chats(workload: Workload, path: Path) -> None:
    """Mooncake's form with messages in it: a block of the prompt is a message, each turn has all of them."""
    with path.open("w") as out:
        for session in workload.sessions:
            for number, turn in enumerate(session.turns):
                first, *others = map(text_of, session.prompt_keys(turn))
                messages = [{"role": "system", "content": first}]
                for place, text in enumerate(others):
                    messages.append({"role": ("user", "assistant")[place % 2], "content": text})
                if messages[-1]["role"] != "user":
                    messages.append({"role": "user", "content": "Go on."})
                line = {"session_id": session.name, "messages": messages, "output_length": turn.output_tokens}
                out.write(json.dumps(line | ({"delay": turn.delay_s * 1000} if number else {})) + "\n")


def as_weka(session: Session, block_tokens: int, model: str) -> dict[str, Any]:
    """A session in the form of kv-cache-tester's traces: lengths and ids of blocks."""
    ids: dict[int, int] = {}
    clock_s, requests = 0.0, []
    for turn in session.turns:
        clock_s += turn.delay_s
        requests.append(
            {
                "t": clock_s,
                "type": "s",
                "model": model,
                "in": turn.prompt_tokens,
                "out": turn.output_tokens,
                "hash_ids": [ids.setdefault(key, len(ids)) for key in session.prompt_keys(turn)],
                "think_time": turn.delay_s,
                "api_time": 0.5,
            }
        )
        clock_s += 0.5
    return {
        "id": session.name,
        "models": [model],
        "block_size": block_tokens,
        "system_tokens": SHAPE.tool_tokens,
        "requests": requests,
    }


def run(command: list[object], directory: Path) -> None:
    """A replay, in a home of its own."""
    ended = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "HOME": str(directory), "COLUMNS": "120"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=REPLAY_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


def counted(stack, since_s: float, expected: int) -> dict[str, int]:
    """What the gateway wrote down of the `expected` requests that came after `since_s`."""

    def records() -> list[dict[str, Any]]:
        return [record for record in stack.records() if record["t"] - record["duration_s"] >= since_s]

    eventually(lambda: len(records()) >= expected)
    found = records()
    assert len(found) == expected
    assert all(record["exact"] and record["attempts"] == 1 for record in found)
    assert {record["reason"] for record in found} <= ENDED
    names = ("prompt_tokens", "cached_tokens", "output_tokens")
    return {name: sum(record[name] for record in found) for name in names}


@pytest.mark.parametrize(("kind", "seed"), [("chat", 1), ("messages", 2), ("responses", 3)])
def test_aiperf_replays_agents_and_reports_what_the_gateway_counted(kind, seed, clients, stack, tmp_path):
    workload = made(seed)
    as_chats(workload, tmp_path / "trace.jsonl")
    since_s = time.time()
    run(
        [
            *(clients / "aiperf", "profile", "--model", stack.model, "--tokenizer", stack.directory),
            *("--url", stack.url, "--endpoint-type", kind, "--streaming", "--use-server-token-count"),
            *("--input-file", tmp_path / "trace.jsonl", "--custom-dataset-type", "mooncake-trace"),
            *("--concurrency", "2", "--request-count", workload.requests, "--random-seed", "1"),
            *("--output-artifact-dir", tmp_path / "out", "--ui", "none"),
            *("--no-gpu-telemetry", "--no-server-metrics"),
        ],
        tmp_path,
    )
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    totals = counted(stack, since_s, workload.requests)
    assert report["error_summary"] == []
    assert report["request_error_rate"]["avg"] == 0
    assert report["request_count"]["avg"] == workload.requests
    if kind != "responses":  # of these it reads usage only where an answer ended before its limit
        assert report["total_usage_completion_tokens"]["avg"] == totals["output_tokens"]
        assert report["total_usage_prompt_cache_read_tokens"]["avg"] == totals["cached_tokens"]
        assert report["total_usage_prompt_tokens"]["avg"] == totals["prompt_tokens"]
    assert totals["cached_tokens"] > 0.4 * totals["prompt_tokens"]


@pytest.mark.parametrize(("kind", "seed"), [("chat", 11), ("anthropic_messages", 12)])
def test_inference_perf_replays_agents_and_reports_what_the_gateway_counted(
    kind, seed, clients, stack, tmp_path
):
    workload = made(seed)
    files = []
    for session in workload.sessions:
        files.append(tmp_path / f"{session.name}.json")
        files[-1].write_text(json.dumps(as_weka(session, workload.block_tokens, stack.model)))
    # Our own reader of such traces finds what was made.
    read = traces.read_all(files)
    asked = [(turn.prompt_tokens, turn.output_tokens) for s in read.sessions for turn in s.turns]
    assert asked == [(turn.prompt_tokens, turn.output_tokens) for s in workload.sessions for turn in s.turns]
    config = {
        "api": {"type": kind, "streaming": True},
        "server": {"type": "vllm", "model_name": stack.model, "base_url": stack.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(stack.directory)},
        "data": {
            "type": "weka_trace_replay",
            "weka_trace_replay": {
                "trace_files": [str(file) for file in files],
                "use_static_model": True,
                "static_model_name": stack.model,
                "datagen_workers": 1,
            },
        },
        "load": {
            "type": "trace_session_replay",
            "num_workers": 1,
            "stages": [{"concurrent_sessions": 2, "num_sessions": len(files)}],
        },
        "storage": {"local_storage": {"path": str(tmp_path / "out")}},
    }
    (tmp_path / "replay.yaml").write_text(yaml.safe_dump(config))
    since_s = time.time()
    run([clients / "inference-perf", "--config_file", tmp_path / "replay.yaml"], tmp_path)
    report = json.loads((tmp_path / "out" / "summary_lifecycle_metrics.json").read_text())
    totals = counted(stack, since_s, workload.requests)
    assert report["failures"]["count"] == 0
    done = report["successes"]
    assert done["count"] == workload.requests
    assert done["output_tokens"]["total"] == totals["output_tokens"]
    if kind == "chat":
        assert done["prompt_tokens"]["cached"] == totals["cached_tokens"]
        assert done["prompt_tokens"]["total"] == totals["prompt_tokens"]
        recorded = [turn.output_tokens for session in workload.sessions for turn in session.turns]
        assert totals["output_tokens"] == sum(recorded)  # it has `ignore_eos`
    else:  # it takes `input_tokens` for all of them
        assert done["prompt_tokens"]["total"] == totals["prompt_tokens"] - totals["cached_tokens"]
    assert totals["cached_tokens"] > 0.4 * totals["prompt_tokens"]
