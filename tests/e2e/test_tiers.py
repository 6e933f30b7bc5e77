"""Two engines with host memory below their devices, behind a gateway: what is where, who gets the prompt."""

import json
import re
import subprocess
from contextlib import ExitStack

import httpx
import pytest

PROMPTS = [[(step * i) % 90 + 3 for i in range(150)] for step in (7, 11)]
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}


@pytest.fixture
def fleet(sumibi, free_ports, tmp_path):
    """Engines' URLs, the gateway's and its admin door's."""
    with ExitStack() as stack:

        def start(*words):
            process = subprocess.Popen(
                sumibi.argv(*words), env=sumibi.environment, stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        words = [
            "--model",
            "tiny",
            "--port",
            "0",
            "--threads",
            "1",
            "--dtype",
            "float32",
            "--enable-dev-mode",
        ]
        words += ["--kv-events-config", json.dumps(EVENTS), "--kv-tiers", '{"host_bytes": "16MiB"}']
        engines = [start("engine", *words) for _ in range(2)]
        urls = [re.search(r"http://\S+", engine.stdout.readline())[0] for engine in engines]
        port = free_ports(2)
        start(
            *("serve", *(word for url in urls for word in ("--engine", url)), "--port", str(port)),
            *("--admin-port", str(port + 1), "--admin-key", "k" * 32),
            *("--usage-log", str(tmp_path / "usage.jsonl")),
        )
        yield urls, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}", tmp_path / "usage.jsonl"


def test_a_prompt_goes_to_the_engine_that_has_it_in_host_memory_after_the_device_lost_it(fleet, eventually):
    urls, door, admin, usage_log = fleet

    def view():
        try:
            answer = httpx.get(f"{admin}/fleet", headers={"authorization": "Bearer " + "k" * 32})
        except httpx.TransportError:
            return []
        return answer.json()["endpoints"] if answer.status_code == 200 else []

    def host_tiers():
        return [tier for each in view() for tier in each["tiers"] if tier["name"] == "cpu"]

    def ask(url, prompt):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["usage"]

    eventually(lambda: len(host_tiers()) == 2)
    for url, prompt in zip(urls, PROMPTS, strict=True):
        assert ask(url, prompt)["prompt_tokens_details"] == {"cached_tokens": 0}
    eventually(lambda: all((tier["grade"], tier["blocks"]) == ("exact", 4) for tier in host_tiers()))
    for url in urls:
        assert httpx.post(f"{url}/reset_prefix_cache").json() == {"success": True}
    eventually(lambda: [each["blocks"] for each in view()] == [0, 0])
    for prompt in PROMPTS:
        assert ask(door, prompt)["prompt_tokens_details"]["cached_tokens_by_tier"] == {"host": 128}
    eventually(lambda: usage_log.exists() and usage_log.read_text().count("\n") == 2)
    records = [json.loads(line) for line in usage_log.read_text().splitlines()]
    assert [record["endpoint"] for record in records] == [f"{url}#0" for url in urls]
    assert [record["cached_by_tier"] for record in records] == [{"host": 128}] * 2
