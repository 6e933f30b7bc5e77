"""Blocks in a real S3 server (nanio, over HTTP with signed requests), through obstore."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.tiers import StoreTier, Tier


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with an empty bucket `kv-blocks`; its data directory."""
    data = tmp_path_factory.mktemp("s3")
    (data / "kv-blocks").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = {"ACCESS_KEY": "tester", "SECRET_KEY": "a secret of some length"}
    command = [str(Path(sys.executable).with_name("nanio")), "serve", "--data-dir", str(data)]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--no-access-log"],
        env=os.environ | {f"NANIO_{name}": value for name, value in keys.items()},
    )
    given = {
        f"AWS_{'ACCESS_KEY_ID' if n == 'ACCESS_KEY' else 'SECRET_ACCESS_KEY'}": v for n, v in keys.items()
    }
    given |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}
    given |= {"AWS_ALLOW_HTTP": "true"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        end_s = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < end_s
                time.sleep(0.05)
        yield data
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def test_blocks_go_to_a_bucket_and_another_engine_finds_them(kit, make, server):
    store = StoreTier("s3://kv-blocks/one", 100 * kit.FILE)
    first = make(host=100 * kit.BLOCK, store=store)
    ids = kit.chain("a", 30)
    assert first.store(kit.blocks(ids)) == 30
    assert first.flush(20)
    assert first.stats().tiers[Tier.STORE].stored == 30
    other = make(host=100 * kit.BLOCK, store=store)
    assert other.find([*ids, *kit.chain("b", 5)]) == [Tier.STORE] * 30
    assert kit.load(other, ids) == [Tier.STORE] * 30
    assert kit.load(other, ids) == [Tier.HOST] * 30
    stranger = make(host=100 * kit.BLOCK, store=store, namespace="other weights")
    assert stranger.find(ids) == []
    assert kit.load(stranger, ids) == [None] * 30
    other.clear()
    assert other.find(ids) == []
    assert not list((server / "kv-blocks" / "one").rglob("*.kv"))


def test_a_broken_object_is_not_served(kit, make, server):
    store = StoreTier("s3://kv-blocks/two", 100 * kit.FILE)
    tiers = make(store=store)
    ids = kit.chain("a", 3)
    tiers.store(kit.blocks(ids))
    assert tiers.flush(20)
    path = next((server / "kv-blocks" / "two").rglob(f"{ids[1].hex()}.kv"))
    raw = bytearray(path.read_bytes())
    raw[500] ^= 1
    path.write_bytes(raw)
    assert kit.load(tiers, ids) == [Tier.STORE, None, Tier.STORE]
    assert tiers.stats().tiers[Tier.STORE].corrupt == 1
    assert tiers.find(ids) == [Tier.STORE]


def test_a_bucket_is_bounded(kit, make, server):
    tiers = make(host=200 * kit.BLOCK, store=StoreTier("s3://kv-blocks/three", 20 * kit.FILE))
    for turn in range(12):
        tiers.store(kit.blocks(kit.chain(str(turn), 4)))
        assert tiers.flush(20)
        assert len(list((server / "kv-blocks" / "three").rglob("*.kv"))) <= 20
    assert tiers.stats().tiers[Tier.STORE].evicted >= 28 - 4


def test_a_bucket_that_is_not_there_or_not_ours_is_refused_at_the_start(kit, make, server, monkeypatch):
    def refusal(url: str, error: type[Exception] = EnvironmentProblem) -> str:
        with pytest.raises(error) as refused:
            make(store=StoreTier(url, 100 * kit.FILE, timeout_s=1.0))
        said = str(refused.value)
        assert said.startswith(f"kv tiers: store.url {url!r}")
        assert len(said) < 300
        assert "http://" not in said
        return said

    assert "there is no such bucket" in refusal("s3://other/x")
    for name in ("kv", "a/b", "not_one!", "-kv-"):
        assert "a bucket's name has 3 to 63" in refusal(f"s3://{name}", ConfigError)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "AWS_SECRET_ACCESS_KEY is not the one of AWS_ACCESS_KEY_ID" in refusal("s3://kv-blocks/x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    said = refusal("s3://kv-blocks/x")
    assert "does not know this AWS_ACCESS_KEY_ID" in said
    assert "nobody" not in said
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "only one of AWS_ACCESS_KEY_ID and" in refusal("s3://kv-blocks/x", ConfigError)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # Where a machine's role would be asked for: a server without one, then one that never answers.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", os.environ["AWS_ENDPOINT_URL"])
    fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    said = refusal("s3://kv-blocks/x")
    assert "no credentials were found" in said
    assert fix in said
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        said = refusal("s3://kv-blocks/x")
    assert "nobody answered in time" in said
    assert fix in said


def test_a_server_that_is_gone_costs_one_wait(kit, make, server, monkeypatch, caplog):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    tiers = make(host=10 * kit.BLOCK, store=StoreTier("s3://kv-blocks/four", 100 * kit.FILE, timeout_s=1.0))
    ids = kit.chain("a", 3)
    assert tiers.find(ids) == []
    start_s = time.monotonic()
    assert kit.load(tiers, ids) == [None] * 3
    assert tiers.find(ids) == []
    assert time.monotonic() - start_s < 0.5
    assert tiers.store(kit.blocks(ids)) == 3
    assert kit.load(tiers, ids) == [Tier.HOST] * 3
    assert tiers.stats().tiers[Tier.STORE].errors >= 1
    assert "fails (put: no answer from http://127.0.0.1:9 (HTTP error" in caplog.text
