"""What `deploy/` tells vLLM, asked of vLLM: its parser takes the arguments, its types the JSON in them."""

import json
import subprocess

from manifests import OVERLAYS, environment, every_container, is_vllm, overlay
from vllm_harness import VllmEnvironment

SCRIPT = """
import json, sys
from vllm import envs
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
known = set(envs.environment_variables)
found = []
for words, variables in json.load(sys.stdin):
    parsed = parser.parse_args(words)
    events, transfer = parsed.kv_events_config, parsed.kv_transfer_config
    assert isinstance(events, KVEventsConfig), events
    assert transfer is None or isinstance(transfer, KVTransferConfig), transfer
    unknown = {name for name in variables if name.startswith("VLLM_")} - known
    assert not unknown, unknown
    found.append([parsed.model_tag, events.endpoint, transfer and transfer.kv_role])
print(json.dumps(found))
"""


def test_vllm_takes_what_its_containers_are_told():
    vllm = VllmEnvironment()
    told = [
        (words, list(environment(container, overlay(name))))
        for name in OVERLAYS
        for _, container, words in every_container(overlay(name))
        if is_vllm(container)
    ]
    done = subprocess.run(
        [vllm.python, "-c", SCRIPT],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **vllm.variables("0")},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(told) >= 4
    assert {model for model, _, _ in found} == {"Qwen/Qwen3-8B"}
    assert {endpoint for _, endpoint, _ in found} == {"tcp://*:5557"}
    assert {role for _, _, role in found} == {None, "kv_producer", "kv_consumer"}
