"""`sumibi demo pd` from the command line, with the tiny model and a shorter script."""

import json
import subprocess
import sys

import pytest

SHORTER = """
import sys
from sumibi.demo import pd
pd.FIRST_S, pd.EVERY_S, pd.PROMPTS, pd.LEAST_S = 0.5, 0.5, 2, 2.5
from sumibi.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.timeout(240)  # four engines and two gateways are started
def test_it_plays_on_stacks_of_its_own_and_leaves_nothing_running(sumibi):
    words = ["demo", "pd", "--model", "tiny", "--json", "--out", "shown"]
    done = subprocess.run(
        [sys.executable, "-c", SHORTER, *words],
        env=sumibi.environment,
        cwd=sumibi.home,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    shown = json.loads(done.stdout)
    assert shown == json.loads((sumibi.home / "shown" / "demo-pd.json").read_text())
    assert (sumibi.home / "shown" / "demo-pd.png").read_bytes().startswith(b"\x89PNG")
    together, apart = shown["arrangements"]
    assert (together["name"], apart["name"]) == ("two engines that do both", "one prefills, one decodes")
    for each in (together, apart):
        assert len(each["gaps"]) > 20
        assert [prompt["first_s"] is not None for prompt in each["prompts"]] == [True, True]
    lower, served = shown["claims"]
    assert (
        lower["value"] == together["itl_p99_s"] / apart["itl_p99_s"]
    )  # how much is not the tiny model's to say
    assert served["held"]
    assert done.returncode == (0 if lower["held"] else 1)
    assert "no stack is running" in sumibi("down").stdout
