"""Endpoints by file: what is read, what is refused, what happens when it changes."""

import json

import pytest
import yaml

from sumibi.core.errors import ConfigError
from sumibi.gateway.epp.endpoints import MAX_BYTES, EventPorts, FileDiscovery, Listed, read, write
from sumibi.routing.events import Role

NO_PORTS = EventPorts()
TWO = [
    {
        "name": "a",
        "namespace": "x",
        "address": "10.0.0.1",
        "port": "8000",
        "labels": {"llm-d.ai/role": "prefill"},
    },
    {"name": "b", "address": "10.0.0.2", "port": "8001"},
]


@pytest.mark.parametrize("encode", [yaml.safe_dump, json.dumps])
def test_llm_d_s_file_is_read(encode):
    first, second = read(encode({"endpoints": TWO}).encode(), EventPorts(5557, 5558))
    assert (first.url, first.role) == ("http://10.0.0.1:8000", Role.PREFILL)
    assert (first.kv_events, first.kv_replay) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    assert (second.url, second.role) == ("http://10.0.0.2:8001", None)


def test_ports_may_be_numbers_and_addresses_ipv6():
    (one,) = read(b"endpoints: [{name: a, address: '::1', port: 8000}]", EventPorts(events=1))
    assert (one.url, one.kv_events, one.kv_replay) == ("http://[::1]:8000", "tcp://[::1]:1", None)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("endpoints: 3", "endpoints"),
        ("{}", "endpoints"),
        ("endpoints: [{name: a, port: '1'}]", "address"),
        ("endpoints: [{name: a, address: localhost, port: '1'}]", "address is 'localhost'"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: x}]", "port is 'x'"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: '70000'}]", "1 to 65535"),
        ("endpoints: [" + "{name: a, address: 10.0.0.1, port: '1'}, " * 2 + "]", "twice"),
        ("endpoints: [", "endpoints"),
        (" " * (MAX_BYTES + 1), "longer"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(text, word):
    with pytest.raises(ConfigError, match=word):
        read(text.encode(), NO_PORTS)


async def test_a_file_is_read_again_when_it_changes_and_a_bad_one_changes_nothing(tmp_path, caplog):
    found = []

    async def take(engines):
        found.append([engine.url for engine in engines])

    path = tmp_path / "endpoints.yaml"
    discovery = FileDiscovery(path, NO_PORTS, take)
    await discovery.look()
    await discovery.look()
    assert (found, discovery.failures) == ([], 1)
    write(path, [Listed(name="a", address="10.0.0.1", port="80")])
    await discovery.look()
    await discovery.look()
    path.write_text("endpoints: nonsense")
    await discovery.look()
    await discovery.look()
    assert (found, discovery.failures) == ([["http://10.0.0.1:80"]], 2)
    assert sum("stay as they were" in record.message for record in caplog.records) == 2
    write(path, [])
    await discovery.look()
    assert found[1:] == [[]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["endpoints.yaml"]


def test_what_is_written_is_llm_d_s(tmp_path):
    path = tmp_path / "endpoints.yaml"
    write(path, [Listed(name="a", address="10.0.0.1", port="80", labels={"llm-d.ai/role": "decode"})])
    labels = {"llm-d.ai/role": "decode"}
    listed = {"name": "a", "address": "10.0.0.1", "port": "80", "labels": labels}
    assert yaml.safe_load(path.read_text()) == {"endpoints": [listed]}
