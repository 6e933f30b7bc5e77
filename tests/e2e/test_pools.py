"""A prefill and a decode engine of one stack: a request as a pair, and as a whole run when one is gone."""

import os
import signal

import httpx
import psutil
import pytest

from sumibi import admin
from sumibi.local import runfile

STACK = """
model: tiny
engines: {{count: 0, prefill: 1, decode: 1, first_port: {0}, kv_blocks: 64}}
gateway: {{policy: round-robin, port: {1}, admin_port: {2}}}
"""
PROMPTS = [[(step * i) % 90 + 3 for i in range(150)] for step in (7, 11)]


@pytest.fixture
def ports(sumibi, free_ports):
    """The first of: prefill, decode, side channel, gateway, its admin door."""
    first = free_ports(5)
    file = sumibi.home / "stack.yaml"
    file.write_text(STACK.format(first, first + 3, first + 4))
    try:
        started = sumibi("up", "--stack", str(file))
        assert started.returncode == 0, started.stderr
        yield first
    finally:
        sumibi("down")


def ask(port: int, prompt: list[int], **more: str) -> list[int]:
    """The greedy answer's token ids."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions", json=body | {"return_token_ids": True} | more, timeout=30
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


TALK = [{"role": "user", "content": "one two three " * 30}]
SAID = {
    "/v1/messages": {"messages": TALK, "max_tokens": 8},
    "/v1/responses": {"input": TALK, "max_output_tokens": 8},
    "/inference/v1/generate": {
        "token_ids": PROMPTS[0],
        "sampling_params": {"max_tokens": 8, "temperature": 0},
    },
}


def test_a_pair_is_run_in_every_dialect(ports):
    """The decode engine's answer is what it would have computed by itself; it says what the other had."""
    decode, door = ports + 1, ports + 3
    with httpx.Client(timeout=30) as client:

        def said(port: int, path: str, body: dict[str, object]) -> tuple[object, int]:
            answer = client.post(f"http://127.0.0.1:{port}{path}", json=body)
            assert answer.status_code == 200, answer.text
            whole = answer.json()
            told = whole["usage"]
            cached = told.get("cache_read_input_tokens")
            if cached is None:
                details = told.get("input_tokens_details") or told["prompt_tokens_details"]
                cached = details["cached_tokens"]
            if path == "/inference/v1/generate":
                return whole["choices"][0]["token_ids"], cached
            if path == "/v1/messages":
                return whole["content"][0]["text"], cached
            return whole["output"][0]["content"][0]["text"], cached

        for number, (path, fields) in enumerate(SAID.items(), 1):
            body = {"model": "tiny", "temperature": 0, "cache_salt": path, **fields}
            alone, _ = said(decode, path, body | {"cache_salt": f"{path} alone"})
            assert said(door, path, body) == (alone, 0), path
            again, cached = said(door, path, body)
            assert again == alone, path
            assert cached > 0, "the prefill engine has it now"
            samples = admin.metrics(f"http://127.0.0.1:{door}/metrics")
            legs = {s.labels["outcome"]: s.value for s in samples if s.name == "sumibi_disagg_legs_total"}
            assert legs == {"ok": 2 * number}, path


def test_a_pair_answers_as_a_whole_run_does_and_a_whole_run_when_the_prefill_engine_is_gone(sumibi, ports):
    decode, door = ports + 1, ports + 3

    def count(name: str, port: int = door, **labels: str) -> float:
        samples = admin.metrics(f"http://127.0.0.1:{port}/metrics")
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    # Prompts with a salt share no cache with those without: each engine computes all by itself.
    whole = [ask(decode, prompt, cache_salt="alone") for prompt in PROMPTS]
    assert whole[0] != whole[1]
    assert ask(door, PROMPTS[0]) == whole[0]
    assert count("sumibi_disagg_decision_total", decision_type="prefill-decode") == 1
    assert count("sumibi_disagg_legs_total", connector="stream") == 1
    assert count("sumibi_disagg_legs_total", connector="stream", outcome="ok") == 1

    came_over = count("vllm:prompt_tokens_by_source_total", decode, source="external_kv_transfer")
    assert came_over == len(PROMPTS[0]) - 1  # the last token is computed: its logits start the answer

    record = runfile.read_run(sumibi.state)
    assert record is not None
    killed = psutil.Process(record.children[0].pid)
    os.kill(killed.pid, signal.SIGKILL)
    assert ask(door, PROMPTS[1]) == whole[1]
    assert count("sumibi_disagg_legs_total", outcome="ok") == 1
