"""Configuration fails at start and by name."""

import hashlib

import pytest

from sumibi.core.errors import ConfigError
from sumibi.core.latency import LinkModel
from sumibi.gateway.admin import admin_key, is_loopback
from sumibi.gateway.options import EngineOption, GatewayOptions, engine_options
from sumibi.gateway.tenants import ANONYMOUS, Tenants
from sumibi.routing.events import Role


def test_engines_come_repeated_or_in_a_list():
    assert engine_options(["http://a:8001,http://b:8002", "http://c/"]) == (
        EngineOption("http://a:8001"),
        EngineOption("http://b:8002"),
        EngineOption("http://c:80"),
    )


def test_a_role_and_what_goes_with_it_stand_after_the_url():
    words = "role=prefill,connector=nixlv2,revision=v2,link_gb_s=12.5,kv_port=5601"
    prefill, decode = engine_options(
        [f"http://a:8001,{words}", "http://b:8001,role=decode,connector=nixlv2,revision=v2"]
    )
    link = LinkModel(bytes_per_s=12.5e9, setup_s=0.001)
    assert prefill == EngineOption(
        "http://a:8001",
        role=Role.PREFILL,
        connector="nixlv2",
        revision="v2",
        link=link,
        kv_port=5601,
    )
    assert (decode.role, decode.connector, decode.revision) == (Role.DECODE, "nixlv2", "v2")


@pytest.mark.parametrize(
    ("engines", "named"),
    [
        (["role=prefill,http://a:8001"], "after a URL"),
        (["http://a:8001,role=both,role=both"], "role is given twice"),
        (["http://a:8001,role=prefil"], "want both, prefill, decode"),
        (["http://a:8001,connector=nixl"], "want nixlv2, sglang, stream"),
        (["http://a:8001,kv_port=0"], "kv_port"),
        (["http://a:8001,link_gb_s=fast"], "link_gb_s"),
        (["http://a:8001,colour=red"], "colour"),
        (
            ["http://a:1,role=prefill,connector=nixlv2", "http://b:1,role=decode,connector=sglang"],
            "the same connector",
        ),
    ],
)
def test_a_malformed_role_is_named(engines, named):
    with pytest.raises(ConfigError) as error:
        engine_options(engines)
    assert named in str(error.value)


def test_event_addresses_belong_to_their_engine():
    (engine,) = engine_options(["http://a:8001"], ["http://a:8001=tcp://a:5557,replay=tcp://a:5657"])
    assert engine == EngineOption("http://a:8001", "tcp://a:5557", "tcp://a:5657")


@pytest.mark.parametrize(
    ("engines", "events", "named"),
    [
        ([], [], "--engine"),
        ([" , "], [], "--engine"),
        (["a:8001"], [], "a:8001"),
        (["https://a:8001"], [], "https://a:8001"),
        (["http://a:port"], [], "http://a:port"),
        (["http://a:99999"], [], "http://a:99999"),
        (["http://a:8001/v1"], [], "without a path"),
        (["http://u:p@a:8001"], [], "user name"),
        (["http://a:8001", "http://a:8001/"], [], "named twice"),
        (["http://a:8001"], ["http://a:8001"], "--kv-events"),
        (["http://a:8001"], ["http://a:8001=udp://a:1"], "--kv-events"),
        (["http://a:8001"], ["http://b:8001=tcp://b:1"], "http://b:8001"),
        (["http://a:8001"], ["http://a:8001=tcp://a:1,reply=tcp://a:2"], "replay="),
        (["http://a:8001"], ["http://a:8001=tcp://a:1"] * 2, "named twice"),
    ],
)
def test_a_malformed_engine_is_named(engines, events, named):
    with pytest.raises(ConfigError) as error:
        engine_options(engines, events)
    assert named in str(error.value)


LOCAL = ("127.0.0.1", "localhost", "::1")
OPEN = ("0.0.0.0", "10.0.0.1", "box", "::")


@pytest.mark.parametrize("host", LOCAL + OPEN)
def test_a_door_open_to_other_machines_wants_a_key_of_its_own(tmp_path, host):
    local = host in LOCAL
    assert is_loopback(host) is local
    options = GatewayOptions(engines=(), admin_host=host)
    if local:
        assert admin_key(options, tmp_path)
    else:
        with pytest.raises(ConfigError, match="--admin-key"):
            admin_key(options, tmp_path)


def test_a_made_key_is_kept_for_its_owner_only(tmp_path):
    options = GatewayOptions(engines=())
    key = admin_key(options, tmp_path / "state")
    path = tmp_path / "state" / "admin.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["admin.key"]
    assert admin_key(options, tmp_path / "state") == key


def test_a_given_key_comes_from_flag_or_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("key-from-a-file-0123\n")
    assert admin_key(GatewayOptions(engines=(), admin_key_file=path), tmp_path) == "key-from-a-file-0123"
    with pytest.raises(ConfigError, match="--admin-key"):
        admin_key(GatewayOptions(engines=(), admin_key="short"), tmp_path)
    with pytest.raises(ConfigError, match="--admin-key-file"):
        admin_key(GatewayOptions(engines=(), admin_key_file=tmp_path / "none"), tmp_path)


def test_api_keys_are_looked_up_by_their_digest(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"{hashlib.sha256(b'sk-1').hexdigest().upper()}: team-a\n")
    tenants = Tenants.load(path)
    authorization, key = b"authorization", b"x-api-key"
    assert tenants.of({authorization: b"Bearer sk-1"}) == "team-a"
    for other in (b"", b"Bearer sk-2", b"Basic sk-1", b"sk-1"):
        assert tenants.of({authorization: other, key: b"sk-1"}) == ANONYMOUS
    assert tenants.of({}) == tenants.of({key: b"sk-2"}) == ANONYMOUS
    assert set(tenants._remembered) == {b"Bearer sk-1"}  # keys that clients make up take no memory
    assert tenants.of({key: b"sk-1"}) == "team-a"


@pytest.mark.parametrize(
    "content", ["[1]", "abc: team", f"{'0' * 63}g: team", f"{'a' * 64}: 7", "a: [", "\x00"]
)
def test_a_malformed_file_of_api_keys_is_named(tmp_path, content):
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--api-keys"):
        Tenants.load(path)


def test_without_a_file_everybody_is_anonymous():
    tenants = Tenants.load(None)
    assert (tenants.of({b"authorization": b"Bearer sk-1"}), tenants.configured) == (ANONYMOUS, False)
