"""The stack file: defaults, and errors that name file, line, key and what is allowed."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from sumibi.core.errors import ConfigError
from sumibi.engine import fetch
from sumibi.routing import policies
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import Role as RouterRole
from sumibi.stack import DEFAULT_MODEL, POLICIES, Role, Stack, known_keys, load_stack
from sumibi.tiers import DiskTier, StoreTier, TiersConfig


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "stack.yaml"
    file.write_text(text)
    return file


def test_without_a_file_two_engines_and_a_gateway_serve_the_built_in_model():
    stack = load_stack()
    assert (stack.model, stack.engines.count, stack.gateway.policy) == (DEFAULT_MODEL, 2, "cost")
    assert stack.engine_ports == [8001, 8002]
    assert fetch.DEFAULT_MODEL == DEFAULT_MODEL


def test_an_empty_file_is_the_default_stack(tmp_path):
    assert load_stack(write(tmp_path, "# nothing\n")) == Stack()


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    file = write(tmp_path, "gateway:\n  port: 9000\n  policy: least-loaded\n")
    stack = load_stack(file, {("gateway", "port"): 9100, ("engines", "count"): 3})
    assert (stack.gateway.port, stack.gateway.policy, stack.engines.count) == (9100, "least-loaded", 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "engines:\n  kv_block: 100\n",
            "line 2: unknown key 'engines.kv_block'; did you mean 'engines.kv_blocks'?",
        ),
        ("modle: tiny\n", "line 1: unknown key 'modle'; did you mean 'model'?"),
        ("port: 9000\n", "line 1: unknown key 'port'; did you mean 'gateway.port'?"),
        (
            "gateway:\n  colour: red\n",
            "line 2: unknown key 'gateway.colour'; known here: host, port, admin_port",
        ),
        (
            "model: tiny\nengines:\n  count: two\n",
            "line 3: engines.count is 'two': input should be a valid integer",
        ),
        (
            "engines:\n  count: 0\n",
            "line 2: engines.count is 0: no replica would answer: set it, or engines.decode, to 1 or more",
        ),
        ("engines:\n  count: -1\n", "engines.count is -1: input should be greater than or equal to 0"),
        (
            "engines:\n  count: 0\n  prefill: 2\n",
            "line 3: engines.prefill is 2: its prompts go on at replicas that generate: set engines.decode,"
            " or engines.count, to 1",
        ),
        (
            "engines:\n  connector: sglang\n",
            "line 2: engines.connector is 'sglang': input should be 'stream' or 'nixlv2'",
        ),
        (
            "engines: {count: 0, prefill: 1, decode: 1}\ngateway: {admin_port: 8003}\n",
            "engines.first_port and gateway.admin_port both take port 8003",
        ),
        (
            "engines: {prefill: 1, decode: 1, first_port: 65532}\n",
            "engines.first_port leads to port 65536: 65535 is the last",
        ),
        ("gateway:\n  port: 70000\n", "gateway.port is 70000: input should be less than or equal to 65535"),
        (
            "gateway:\n  policy: nearest\n",
            "gateway.policy is 'nearest': input should be 'cost', 'round-robin', 'random',",
        ),
        ("engines: 2\n", "line 1: engines is 2: it must be a mapping (count, prefill, decode, connector,"),
        ("gateway:\n  port: 8002\n", "engines.first_port and gateway.port both take port 8002"),
        ("engines:\n  first_port: 65535\n", "engines.first_port leads to port 65536: 65535 is the last"),
        (
            "gateway:\n  objectives:\n    critical: high\n",
            "line 3: gateway.objectives.critical is 'high': input should be a valid integer",
        ),
        ("gateway:\n  hold_above_s: 0\n", "line 2: gateway.hold_above_s is 0: input should be greater than"),
        (
            "gateway:\n  bands:\n    high: {ttl_s: 5}\n",
            "line 3: gateway.bands has the key 'high': input should",
        ),
        (
            "gateway:\n  bands:\n    1: 5\n",
            "line 3: gateway.bands.1 is 5: it must be a mapping (max_requests,",
        ),
        (
            "gateway:\n  bands:\n    1:\n      ttl: 5\n",
            "line 4: unknown key 'gateway.bands.1.ttl'; did you mean 'gateway.bands.1.ttl_s'?",
        ),
        (
            "gateway:\n  other_bands: {max_bytes: -1}\n",
            "line 2: gateway.other_bands.max_bytes is -1: input should be greater than or equal to 0",
        ),
        (
            "engines: {tiers: {host: 1GiB}}\n",
            "unknown key 'engines.tiers.host'; did you mean 'engines.tiers.host_bytes'?",
        ),
        ("engines: {port: 9000}\n", "did you mean 'engines.first_port'?"),
        ("engines: {tiers: {disk: {url: /x}}}\n", "did you mean 'engines.tiers.store.url'?"),
        ("engines: {bands: {}}\n", "did you mean 'gateway.bands'?"),
        ("- a\n", "must be a mapping of keys"),
        ("model: [\n", "is not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_what_is_allowed(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load_stack(write(tmp_path, text))
    assert said in str(caught.value)
    assert "stack.yaml" in str(caught.value)


def test_every_mistake_in_a_file_is_named_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_stack(write(tmp_path, "modle: x\nengines:\n  count: two\n"))
    assert len(str(caught.value).splitlines()) == 2


def test_a_wrong_flag_is_blamed_on_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match=r"command line: engines\.count is 0"):
        load_stack(write(tmp_path, "model: tiny\n"), {("engines", "count"): 0})


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"cannot read the stack file nowhere\.yaml"):
        load_stack(Path("nowhere.yaml"))


@pytest.mark.parametrize(
    ("engines", "roles", "side"),
    [
        ({}, ["both", "both"], []),
        ({"count": 0, "prefill": 2, "decode": 1}, ["prefill", "prefill", "decode"], [8004, 8005]),
        ({"count": 1, "prefill": 1, "decode": 1}, ["both", "prefill", "decode"], [8004, 8005]),
        ({"count": 1, "prefill": 1}, ["both", "prefill"], [8003, 8004]),  # whole replicas generate
        ({"count": 0, "decode": 1}, ["decode"], []),
    ],
)
def test_replicas_that_hand_kv_over_have_a_second_port_behind_the_http_ports(engines, roles, side):
    stack = load_stack(None, {("engines",): engines})
    assert stack.engines.roles == roles
    assert stack.engine_ports == [8001 + n for n in range(len(roles))]
    assert stack.side_ports == side


def test_roles_are_the_router_s():
    assert list(get_args(Role)) == list(RouterRole)


def test_every_policy_of_the_router_may_be_named():
    assert POLICIES == policies.POLICIES


def test_every_key_says_what_it_means():
    keys = known_keys()
    assert {"gateway.other_bands.ttl_s", "gateway.bands.*.ttl_s"} < keys.keys()
    assert all(text for key, text in keys.items() if key not in ("engines", "gateway"))


def test_queues_are_limited_as_the_router_limits_them_if_nothing_is_said():
    gateway, config = Stack().gateway, RouterConfig()
    assert gateway.hold_above_s == config.hold_above_s
    assert gateway.other_bands.model_dump() == {
        name: value
        for name, value in msgspec.structs.asdict(config.other_bands).items()
        if name != "priority"
    }


def test_sizes_of_tiers_are_bytes_or_text_and_say_where_they_lie(tmp_path):
    tiers = load_stack(
        write(
            tmp_path, "engines:\n  tiers:\n    host_bytes: 1073741824\n    disk: {path: /kv, bytes: 1.5GiB}\n"
        )
    ).engines.tiers
    told = tiers.config(0)
    assert told == {"host_bytes": "1GiB", "disk": {"path": "/kv/engine-0", "bytes": "1536MiB"}}
    assert TiersConfig.parse(told) == TiersConfig(1 << 30, DiskTier("/kv/engine-0", 3 << 29))
    assert load_stack(write(tmp_path, "engines: {tiers: {host_bytes: 0}}")).engines.tiers.config(0) is None


def test_what_is_said_of_a_store_reaches_the_engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = load_stack(
        write(tmp_path, "engines: {tiers: {store: {url: kv, bytes: 7, timeout_s: 2}}}")
    ).engines.tiers.config(0)
    assert TiersConfig.parse(told) == TiersConfig(store=StoreTier(str(tmp_path / "kv"), 7, 2.0))
    told = load_stack(write(tmp_path, "engines: {tiers: {store: {url: 's3://b/p'}}}")).engines.tiers.config(0)
    assert TiersConfig.parse(told) == TiersConfig(store=StoreTier("s3://b/p", 100 << 30, 5.0))


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ("512MiB", 1 << 29),
        ("512 mib", 1 << 29),
        ("0.5GiB", 1 << 29),
        ("1000", 1000),
        ("12B", 12),
        ("1TiB", 1 << 40),
    ],
)
def test_stack_and_engine_read_the_same_sizes(tmp_path, said, size):
    told = load_stack(write(tmp_path, f"engines: {{tiers: {{host_bytes: {said}}}}}")).engines.tiers.config(0)
    assert TiersConfig.parse(told) == TiersConfig.parse({"host_bytes": said}) == TiersConfig(size)


@pytest.mark.parametrize("tiers", [{}, {"host_bytes": "1GiB", "store": {"url": "s3://b/p"}}])
def test_a_stack_that_is_written_down_reads_the_same(tiers):
    stack = load_stack(None, {("engines", "tiers"): tiers})
    assert Stack.model_validate_json(stack.model_dump_json()) == stack


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{host_bytes: -5}", "host_bytes: -5 is too small; at least 0 byte(s)"),
        ("{host_bytes: yes}", "host_bytes is True: not a size; write bytes, or like 512MiB or 20GiB"),
        (
            "{host_bytes: 2GB}",
            "host_bytes: '2GB' is not a size; write bytes, or like '512MiB' or '20GiB'",
        ),
        ("{disk: {path: /kv, bytes: lots}}", "disk.bytes: 'lots' is not a size"),
        ("{disk: {path: /kv, bytes: 0}}", "disk.bytes: 0 is too small; at least 1 byte(s)"),
        ("{store: {url: /kv, bytes: 0}}", "store.bytes: 0 is too small; at least 1 byte(s)"),
        ("{disk: {bytes: 5GiB}}", "disk.path is missing: without it there is no such tier"),
        ("{disk: {bytes: 10GiB}}", "disk.path is missing"),  # the default, but somebody said it
        ("{disk: {path: '', bytes: 5GiB}}", "disk.path is '': without it there is no such tier"),
        ("{disk: {path: ' '}}", "disk.path: ' ' is empty; give a directory"),
        ("{store: {bytes: 5GiB}}", "store.url is missing: without it there is no such tier"),
        ("{store: {timeout_s: 1}}", "store.url is missing"),
        ("{store: {url: /kv, timeout_s: 0}}", "store.timeout_s is 0: input should be greater than 0"),
        ("{store: {url: 'ftp://x'}}", "store.url: 'ftp://x' has the scheme 'ftp'; give a directory"),
        ("{store: {url: 's3://'}}", "store.url: 's3://' names no bucket; give s3://bucket/prefix"),
        ("{store: {url: 'file://host/p'}}", "store.url: 'file://host/p' names the host 'host'"),
        ("{store: {url: 's3://[x'}}", "store.url: 's3://[x' is no URL"),
        ("{store: {url: /etc/passwd}}", "store.url: '/etc/passwd' cannot be used: /etc/passwd is a file"),
        ("{disk: {path: /etc/passwd}}", "disk.path: '/etc/passwd' cannot be used: /etc/passwd is a file"),
        ("{disk: {path: /etc/passwd/kv}}", "'/etc/passwd/kv' cannot be used: /etc/passwd is a file"),
        ("{disk: {path: ~nobody-of-this-name/kv}}", "disk.path: "),
    ],
)
def test_a_tier_that_is_not_said_in_full_is_told(tmp_path, text, said):
    with pytest.raises(ConfigError, match=rf"stack\.yaml, line 3: .*engines\.tiers\..*{re.escape(said)}"):
        load_stack(write(tmp_path, f"engines:\n  tiers:\n    {text[1:-1]}\n"))
