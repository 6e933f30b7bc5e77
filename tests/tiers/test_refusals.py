"""What is refused, at the start or by a call, and in what words."""

import errno
import os
import threading
import time

import pytest

from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.tiers import DiskTier, StoreTier, Tier, TiersConfig
from sumibi.tiers import directory as directory_module


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no tier is named"),
        ('{"host_bytes": "2 gigs"}', r"host_bytes: '2 gigs' is not a size.*20GiB"),
        ('{"host_bytes": -1}', r"host_bytes: -1 is too small"),
        ('{"disk": {"path": "/x"}}', r"`bytes`.*disk"),
        ('{"disk": {"path": " ", "bytes": 1}}', r"disk\.path: ' ' is empty"),
        ('{"ram": 1}', r"`ram`"),
        ('{"store": {"url": "/x", "bytes": 9, "timeout_s": 0}}', r"timeout_s: 0\.0 is out of range"),
        ("[", "expected an object"),
    ],
)
def test_a_wrong_configuration_is_told(text, message):
    with pytest.raises(ConfigError, match=message):
        TiersConfig.parse(text)


def test_configuration():
    config = TiersConfig.parse(
        '{"host_bytes": "2GiB", "disk": {"path": "/kv", "bytes": "1.5MiB"},'
        ' "store": {"url": "s3://b/p", "bytes": 7}}'
    )
    assert config == TiersConfig(2 << 30, DiskTier("/kv", 3 << 19), StoreTier("s3://b/p", 7))


@pytest.mark.parametrize("config", [TiersConfig(999), TiersConfig(disk=DiskTier("/x", 1127))])
def test_a_tier_holds_at_least_a_block(make, config):
    with pytest.raises(ConfigError, match="holds no block"):
        make(config.host_bytes, config.disk)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://x/y", "scheme 'ftp'"),
        ("file://host/p", "host 'host' and the directory '/p'.*file:///its/path"),
        ("file://", "directory ''"),
        ("s3:///prefix", "no bucket"),
        (" ", "empty"),
    ],
)
def test_a_store_that_is_not_said_in_full_is_told(make, url, message):
    with pytest.raises(ConfigError, match=f"store.url: .*{message}"):
        make(store=StoreTier(url, 10000))
    with pytest.raises(ConfigError, match=f"flag.store.url: .*{message}"):
        TiersConfig.parse({"store": {"url": url, "bytes": 10000}}, where="flag")


def test_a_store_that_may_not_be_written_is_refused_at_the_start(make, kit):
    with pytest.raises(EnvironmentProblem, match=r"store\.url '/sys/kv' cannot be written.*give a directory"):
        make(store=StoreTier("/sys/kv", 100 * kit.FILE))  # where even root may not


@pytest.mark.parametrize(
    ("number", "starts"), [(errno.EROFS, False), (errno.EACCES, False), (errno.EIO, True)]
)
def test_a_start_tells_a_store_that_is_not_ours_from_one_that_is_down(
    make, kit, tmp_path, monkeypatch, caplog, number, starts
):
    make(store=StoreTier(str(tmp_path), 100 * kit.FILE)).close()  # the directory is there already

    def fail(self, header, payload):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory_module.BlockDirectory, "write", fail)
    if not starts:
        with pytest.raises(EnvironmentProblem, match=os.strerror(number)):
            make(store=StoreTier(str(tmp_path), 100 * kit.FILE))
        return
    tiers = make(host=10 * kit.BLOCK, store=StoreTier(str(tmp_path), 100 * kit.FILE))
    assert "going on without it" in caplog.text
    assert tiers.store(kit.blocks(kit.chain("a", 2))) == 2


def test_a_store_that_hangs_at_the_start_is_waited_for_no_longer_than_said(make, kit, tmp_path, monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(directory_module.BlockDirectory, "prepare", lambda self: free.wait(5))
    start_s = time.monotonic()
    tiers = make(host=10 * kit.BLOCK, store=StoreTier(str(tmp_path), 100 * kit.FILE, timeout_s=0.2))
    assert 0.2 <= time.monotonic() - start_s < 2
    assert tiers._books.store.rest.resting
    free.set()


def test_a_store_below_a_share_that_is_not_mounted_is_not_made(make, kit, tmp_path):
    with pytest.raises(EnvironmentProblem, match="share is not there; mount the share"):
        make(store=StoreTier(str(tmp_path / "share" / "kv"), 100 * kit.FILE))
    assert list(tmp_path.iterdir()) == []


def test_more_host_memory_than_there_is_is_told(make):
    with pytest.raises(EnvironmentProblem, match=r"host_bytes \d+ is more than .*GB are available"):
        make(host=1 << 50, block_bytes=1 << 20)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.load([b"x"], []),
        lambda t: t.load([b"x"], [bytearray(5)]),
        lambda t: t.load([b"x"], [bytes(1000)]),
        lambda t: t.store([(b"", None, bytes(1000))]),
        lambda t: t.store([(b"x" * 33, None, bytes(1000))]),
        lambda t: t.store([(b"x", None, bytes(999))]),
    ],
)
def test_wrong_arguments_are_refused(make, call):
    with pytest.raises(ValueError):
        call(make(host=5000))


@pytest.mark.parametrize("wrong", ["str", 7, bytearray(b"x"), None])
def test_an_id_that_is_not_bytes_is_refused(make, tmp_path, wrong):
    tiers = make(host=5000, disk=DiskTier(str(tmp_path), 100_000))
    calls = [
        lambda: tiers.store([(wrong, None, bytes(1000))]),
        lambda: tiers.load([wrong], [bytearray(1000)]),
        lambda: tiers.find([wrong]),
        lambda: tiers.prefetch([wrong]),
    ]
    if wrong is not None:
        calls.append(lambda: tiers.store([(b"x", wrong, bytes(1000))]))
    for call in calls:
        with pytest.raises(TypeError, match=f"an id that is {type(wrong).__name__}, not bytes"):
            call()
    assert tiers.stats().tiers[Tier.HOST].blocks == 0
