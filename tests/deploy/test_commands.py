"""What containers are told: our own flags as the command line takes them, vLLM's as it has them."""

import json
from urllib.parse import urlsplit

import pytest
import typer.main
from manifests import (
    arguments,
    environment,
    every_container,
    flag,
    is_ours,
    is_vllm,
    kind,
    pods,
)

from sumibi import __version__
from sumibi.cli import app
from sumibi.engine.options import parse_kv_events
from sumibi.gateway.options import EngineOption, engine_options

COMMANDS = typer.main.get_command(app).commands

VLLM_FLAGS = {
    "port",
    "max-num-seqs",
    "enable-prompt-tokens-details",
    "shutdown-timeout",
    "kv-events-config",
    "kv-transfer-config",
}
"""Of vLLM 0.32's `vllm serve`, as its own parser knows them (`make test-vllm` asks it)."""
VLLM_KV_EVENTS = {"enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"}
VLLM_KV_TRANSFER = {"kv_connector", "kv_role", "kv_load_failure_policy"}
VLLM_ENVIRONMENT = {"VLLM_NO_USAGE_STATS", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"}
"""Fields and variables of the same version (`vllm/config`, `vllm/envs.py`)."""
OTHERS_ENVIRONMENT = {"HF_HOME", "HF_TOKEN", "HOME", "USER"}
IN_ARGUMENTS = {"ENGINES", "MODEL", "NAMESPACE"}
"""Ours, read by nobody but `$(...)` in arguments."""


def ours(things):
    found = [(pod, box, words) for pod, box, words in every_container(things) if is_ours(box)]
    assert found
    return found


def test_the_command_line_takes_every_flag_and_value(things):
    for _, _, words in ours(things):
        with COMMANDS[words[0]].make_context(
            words[0], words[1:]
        ) as context:  # reads and checks, runs nothing
            assert context.args == []


def test_variables_are_known_to_who_gets_them(things):
    for _, container, words in every_container(things):
        names = set(environment(container, things))
        inside = {name for name in names & IN_ARGUMENTS if f"$({name})" in str(container["args"])}
        if is_ours(container):
            known = {name for parameter in COMMANDS[words[0]].params for name in variables(parameter)}
        else:
            known = VLLM_ENVIRONMENT | OTHERS_ENVIRONMENT
        assert names - inside <= known, container["name"]


def variables(parameter) -> list[str]:
    return [parameter.envvar] if isinstance(parameter.envvar, str) else list(parameter.envvar or ())


def test_vllm_has_these_flags_and_fields(things):
    for _, container, words in every_container(things):
        if not is_vllm(container):
            continue
        assert container["command"] == ["vllm", "serve"]
        assert not words[0].startswith("-")  # the model
        assert {word.removeprefix("--").partition("=")[0] for word in words[1:]} <= VLLM_FLAGS
        assert json.loads(flag(words, "kv-events-config")).keys() <= VLLM_KV_EVENTS
        transfer = json.loads(flag(words, "kv-transfer-config") or "{}")
        assert transfer.keys() <= VLLM_KV_TRANSFER


def kv_events(container, words) -> dict:
    text = flag(words, "kv-events-config")
    if is_ours(container):
        parse_kv_events(text)  # raises for what the embedded engine would refuse
    return json.loads(text)


def engines(things):
    return [row for row in every_container(things) if is_vllm(row[1]) or row[2][0] == "engine"]


def test_engines_publish_kv_events_and_can_replay_them(things):
    found = [kv_events(box, words) for _, box, words in engines(things) if flag(words, "kv-events-config")]
    assert found
    for config in found:
        assert config["enable_kv_cache_events"] is True
        assert config["publisher"] == "zmq"
        for field in ("endpoint", "replay_endpoint"):
            assert config[field].startswith("tcp://*:")  # with another address it would not bind


def gateways(things) -> list[list[str]]:
    return [words for _, box, words in ours(things) if words[0] == "serve"]


def gateway_engines(things) -> list[EngineOption]:
    return [option for words in gateways(things) for option in engine_options([flag(words, "engine")])]


def test_the_gateway_knows_every_engine_and_no_other(things):
    if not gateways(things):
        return  # an endpoint picker finds its engines by itself: see test_picking.py
    known = {(urlsplit(option.url).hostname, urlsplit(option.url).port) for option in gateway_engines(things)}
    there = set()
    for thing, pod in zip(kind(things, "StatefulSet"), sets(things), strict=True):
        service = thing["spec"]["serviceName"]
        there |= {(f"{name}.{service}", pod.ports["http"]) for name in pod.names}
    assert known == there


def sets(things):
    return [pod for pod in pods(things) if pod.kind == "StatefulSet"]


def test_engines_have_the_roles_that_the_gateway_gives_them(things):
    roles = {name: pod.labels.get("llm-d.ai/role") for pod in sets(things) for name in pod.names}
    for option in gateway_engines(things):
        assert option.role == roles[urlsplit(option.url).hostname.partition(".")[0]]
    for pod, _, words in engines(things):
        role = pod.labels.get("llm-d.ai/role")
        transfer = json.loads(flag(words, "kv-transfer-config") or "{}")
        assert (
            transfer.get("kv_role") == {None: None, "prefill": "kv_producer", "decode": "kv_consumer"}[role]
        )


def test_doors_know_how_many_sequences_vllm_runs(things):
    sizes = {flag(words, "max-num-seqs") for _, box, words in every_container(things) if is_vllm(box)}
    for _, _, words in ours(things):
        if words[0] not in ("serve", "epp"):
            continue
        assert {flag(words, "max-num-seqs")} == (sizes or {None})


def test_our_images_have_the_version_of_this_package(things):
    for _, container, _ in ours(things):
        assert container["image"].endswith(f":{__version__}")


@pytest.mark.parametrize(
    "words", [["--engin=http://a:1"], ["--engine=http://a:1", "--port=x"], ["--port=8000"]]
)
def test_a_wrong_flag_would_be_seen(words):
    with pytest.raises(Exception, match=r"No such option|valid integer|Missing parameter"):
        COMMANDS["serve"].make_context("serve", words)


def test_arguments_are_expanded():
    box = {"name": "c", "args": ["a$(B)c"], "env": [{"name": "B", "value": "b"}]}
    assert arguments(box, []) == ["abc"]
    with pytest.raises(AssertionError, match="nobody sets X"):
        arguments({"name": "c", "args": ["$(X)"]}, [])
