"""What `make compiled` makes decides bit for bit as the Python it was made from (`make test-compiled`).

SUMIBI_COMPILED names the directory that holds the compiled package; the interpreted one is this checkout.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).resolve().parents[2] / "src"
EVEN = """
name: even
groups:
  - {count: 4, latency: llama-3.1-70b/4xh100, kv_tokens: 400_000}
"""
APART = """
name: apart
groups:
  - {name: p, count: 2, role: prefill, latency: llama-3.1-70b/4xh100, kv_tokens: 400_000}
  - {name: d, count: 3, role: decode, latency: llama-3.1-70b/4xh100, kv_tokens: 400_000}
  - {name: b, count: 1, latency: llama-3.1-70b/4xh100, kv_tokens: 200_000}
"""


@pytest.fixture(scope="module")
def compiled() -> Path:
    place = Path(os.environ["SUMIBI_COMPILED"])
    assert (place / "sumibi").is_dir(), f"{place}: `make compiled` puts the package there"
    return place


def run(place: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_happens_for_each_request_is_compiled(compiled):
    program = (
        "import sumibi.routing.router, sumibi.routing.cost, sumibi.gateway.http1, sumibi.gateway.completion,"
        "sumibi.gateway.upstream, sumibi.prompts.keys, sys;"
        "print([name for name in sys.modules if name.startswith('sumibi.')"
        " and str(sys.modules[name].__file__).endswith('.so')])"
    )
    names = run(compiled, "-c", program)
    for name in ("routing.router", "routing.cost", "gateway.http1", "gateway.completion", "gateway.upstream"):
        assert f"'sumibi.{name}'" in names
    assert run(INTERPRETED, "-c", program).strip() == "[]"


@pytest.mark.parametrize(
    ("fleet", "policies"),
    [
        (EVEN, "cost,round-robin,sglang-cache-aware,llmd-precise,dynamo-kv"),
        (APART, "cost,round-robin,random"),
    ],
    ids=["even", "apart"],
)
def test_policies_decide_bit_for_bit_the_same(compiled, tmp_path, fleet, policies):
    (tmp_path / "fleet.yaml").write_text(fleet)
    results = []
    for place in (compiled, INTERPRETED):
        told = tmp_path / f"{len(results)}.json"
        command = ("-m", "sumibi", "replay", "agents:sessions=10", "--users", "12", "--seed", "3")
        run(
            place,
            *command,
            "--fleet",
            str(tmp_path / "fleet.yaml"),
            "--policy",
            policies,
            "--json",
            str(told),
        )
        results.append([{**one, "wall_s": 0, "cpu_s": 0} for one in json.loads(told.read_text())])
    ours, theirs = results
    assert len(ours) == len(policies.split(","))
    assert ours == theirs
