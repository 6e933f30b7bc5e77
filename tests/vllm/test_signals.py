"""What the gateway reads off a live engine is what the engine says of itself."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm_harness import BLOCK, MODEL, eventually, words

MAX_SEQUENCES = 8
"""Of the shared engines, by their flag."""


def test_load_is_read_while_requests_run(engines, start_gateway):
    first, second = engines
    for engine in engines:
        engine.reset_cache()
    gateway = start_gateway(first, second, scrape_interval_s=0.2)
    assert gateway.view(first).block_tokens == BLOCK
    assert gateway.view(first).kv_tokens == 200 * BLOCK

    def long_answer(number: int) -> None:
        prompt = words(["signals", number, *range(8)])
        first.ask(
            "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
        )

    with ThreadPoolExecutor(MAX_SEQUENCES + 3) as pool:
        answers = [pool.submit(long_answer, number) for number in range(MAX_SEQUENCES + 3)]

        def full() -> bool:
            view = gateway.view(first)
            return (view.running, view.waiting) == (MAX_SEQUENCES, 3) and (view.kv_usage or 0) > 0.1

        eventually(full, "8 run and 3 wait", timeout_s=120.0)
        view = gateway.view(first)
        # They went past the gateway: foreign load, which fades between two scrapes.
        assert view.inflight == 0
        assert view.foreign_running == pytest.approx(MAX_SEQUENCES, rel=0.25)
        assert view.foreign_waiting == pytest.approx(3, rel=0.25)
        assert (gateway.view(second).running, gateway.view(second).waiting) == (0, 0)
        # 11 sequences grow from some 40 tokens to 440: usage grows too, and is never a per cent.
        before = view.kv_usage or 0
        eventually(lambda: (gateway.view(first).kv_usage or 0) > before, "usage grows", timeout_s=120.0)
        said = first.metric("vllm:kv_cache_usage_perc")
        assert abs((gateway.view(first).kv_usage or 0) - said) < 0.2 <= 1.0
        for answer in answers:
            answer.result()
    eventually(lambda: gateway.view(first).running == 0, "the gateway sees the engine idle")
    assert gateway.view(first).waiting == 0


def test_status_and_doctor_call_the_engines_known_exactly(engines, start_gateway):
    gateway = start_gateway(*engines, admin_port=0)
    door = gateway.look(lambda gateway: gateway.admin_server)
    assert door is not None

    def sumibi(*words: str) -> "subprocess.CompletedProcess[str]":
        argv = [sys.executable, "-m", "sumibi", *words, "--admin-port", str(door.port)]
        environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=environment)

    status = json.loads(sumibi("status", "--json").stdout)
    told = {view["endpoint"]: view for view in status["fleet"]["endpoints"]}
    for engine in engines:
        assert told[engine.endpoint]["grade"] == "exact"
        assert told[engine.endpoint]["up"]
    report = sumibi("doctor").stdout
    lines = [line for line in report.splitlines() if engines[0].url in line or "exact" in line]
    assert lines, report
    assert not any("approximate" in line for line in lines)
