"""A gateway with API keys of its own before the same engines: whose request it was, whichever SDK sent it."""

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress

import httpx
import pytest
from stack_harness import eventually, free_ports

KEY = "sk-of-team-a"


@pytest.fixture
def keyed(stack, tmp_path):
    """Its URL, and where its usage records are."""
    keys, usage = tmp_path / "keys.yaml", tmp_path / "usage.jsonl"
    keys.write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()}: team-a\n")
    url = f"http://127.0.0.1:{(port := free_ports(1))}"
    command = [sys.executable, "-m", "sumibi", "serve", "--port", str(port), "--admin-port", "0"]
    command += [word for engine in stack.engines for word in ("--engine", engine)]
    command += ["--tokenizer", str(stack.directory), "--api-keys", str(keys), "--usage-log", str(usage)]
    own = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    with subprocess.Popen(command, env=own, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
        try:

            def ready() -> bool:
                with suppress(httpx.HTTPError):
                    return httpx.get(f"{url}/health").status_code == 200
                return False

            eventually(ready)
            yield url, usage
        finally:
            process.terminate()


def test_a_key_is_its_tenants_whichever_sdk_sends_it(keyed, run_script):
    url, usage = keyed
    seen = run_script("keys", url, CLIENTS_KEY=KEY)
    assert list(seen.values()) == ["openai-known", "anthropic-known", "anthropic-stranger"]

    def tenants() -> dict[str, str]:
        lines = usage.read_text().splitlines() if usage.exists() else []
        return {record["request"]: record["tenant"] for record in map(json.loads, lines)}

    eventually(lambda: len(tenants()) == 3)
    assert tenants() == {
        "openai-known": "team-a",
        "anthropic-known": "team-a",
        "anthropic-stranger": "anonymous",
    }
