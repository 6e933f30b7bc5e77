"""The worker's side over real tiers: device blocks down and up again, and what it says of failures."""

import threading
import time

import numpy as np
import pytest

from sumibi.core.errors import ConfigError
from sumibi.tiers import DiskTier, StoreTier, Tier
from sumibi.tiers.connector.messages import Change, Hello, Load, Orders, Save
from sumibi.tiers.connector.names import files_digest, namespace_of
from sumibi.tiers.connector.worker import HostBlocks, TierWorker

BLOCKS, LAYERS = 40, (60, 30, 10)
HELLO = Hello("an engine", 100)


class Device:
    """Layers of random bytes; what a block should be is kept beside them."""

    def __init__(self):
        random = np.random.default_rng(1)
        self.layers = [random.integers(0, 256, (BLOCKS, width), dtype=np.uint8) for width in LAYERS]
        self.blocks = HostBlocks(self.layers)
        self.was = np.hstack(self.layers)

    def block(self, index):
        return np.hstack([layer[index] for layer in self.layers])


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def start(make, device):
    workers = []

    def begin(**tiers):
        workers.append(
            TierWorker(make(block_bytes=100, **tiers), device.blocks, HELLO, keeps_host="host" in tiers)
        )
        return workers[-1]

    yield begin
    for worker in workers:
        worker.close()


def saves(names, blocks, generation=b""):
    parents = [None, *names[:-1]]
    made = [Save(n, p, b) for n, p, b in zip(names, parents, blocks, strict=True)]
    return Orders(generation, saves=made)


def step(worker, orders):
    """One step of an engine; (done, failed, report)."""
    worker.begin(orders)
    worker.save(orders)
    return *worker.finished(idle=False), worker.report(idle=False)


def down(worker, names, blocks, generation=b""):
    """Store, and step until all is written; every change that was reported meanwhile."""
    orders, changes = saves(names, blocks, generation), []
    until_s = time.monotonic() + 5
    while True:
        report = step(worker, orders)[2]
        changes += report.changes
        if not report.writing:
            return changes
        assert time.monotonic() < until_s
        orders = Orders(generation, idle=True)


def load(worker, names, blocks, generation=b""):
    """(requests that are done, blocks that failed, ids that are missing)."""
    missing = []
    orders = Orders(generation, loads=[Load("r", names, blocks)])
    until_s = time.monotonic() + 5
    while True:
        done, failed, report = step(worker, orders)
        missing += report.missing
        if done:
            return done, failed, missing
        assert time.monotonic() < until_s
        orders = Orders(generation, idle=True)


def test_blocks_go_down_and_come_up_elsewhere_unchanged(start, device, kit):
    worker = start(host=10_000)
    names = kit.chain("a", 20)
    assert step(worker, Orders())[2].hello == HELLO
    changes = down(worker, names, range(20))
    assert {(c.stored, c.content_id, c.tier) for c in changes} == {(True, n, Tier.HOST) for n in names}
    assert load(worker, names, list(range(20, 40))) == ({"r"}, set(), [])
    assert all((device.block(20 + i) == device.was[i]).all() for i in range(20))
    assert step(worker, Orders())[2].hello is None, "said once"


def test_a_load_ends_at_the_first_block_that_is_missing(start, device, kit):
    worker = start(host=10_000)
    names = kit.chain("a", 20)
    down(worker, [*names[:18], names[19]], [*range(18), 19])
    done, failed, missing = load(worker, names, list(range(20, 40)))
    assert (done, failed, missing) == ({"r"}, {38, 39}, [names[18]])
    assert (device.block(37) == device.was[17]).all()
    assert (device.block(38) == device.was[38]).all(), "not touched"


def test_a_broken_file_is_missing(start, device, kit, tmp_path):
    worker = start(disk=DiskTier(str(tmp_path), 10_000))  # small: a block a file
    names = kit.chain("a", 4)
    down(worker, names, range(4))
    kit.wait_for(lambda: len(list(tmp_path.glob("*/*/*.kv"))) == 4)
    path = next(tmp_path.glob(f"*/*/{names[2].hex()}.kv"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load(worker, names, [20, 21, 22, 23]) == ({"r"}, {22, 23}, [names[2]])


def test_memory_that_only_stages_is_no_tier(start, kit, tmp_path):
    worker = start(disk=DiskTier(str(tmp_path), 1 << 20))
    names = kit.chain("a", 4)
    changes = down(worker, names, range(4))

    def written():
        changes.extend(step(worker, Orders())[2].changes)
        return len(changes) >= 4

    kit.wait_for(written)
    assert {change.tier for change in changes} == {Tier.DISK}


def test_a_block_that_was_there_already_is_confirmed(start, kit):
    worker = start(host=10_000)
    names = kit.chain("a", 1)
    down(worker, names, [0])
    assert down(worker, names, [1]) == [Change(True, names[0], Tier.HOST)]


def test_a_new_generation_clears_its_own_tiers_and_leaves_the_store_to_others(start, make, kit, tmp_path):
    store = StoreTier(str(tmp_path / "store"), 1 << 20)
    worker = start(host=10_000, disk=DiskTier(str(tmp_path / "disk"), 10_000), store=store)
    names = kit.chain("a", 4)
    down(worker, names, range(4))
    kit.wait_for(lambda: len(list(tmp_path.glob("*/*/*/*.kv"))) == 8)
    step(worker, Orders())
    report = step(worker, Orders(b"new"))[2]
    assert report.generation == b"new"
    gone = {(c.content_id, c.tier) for c in report.changes if not c.stored}
    assert gone == {(name, tier) for name in names for tier in (Tier.HOST, Tier.DISK)}
    assert list((tmp_path / "disk").glob("*/*/*.kv")) == []
    assert make(store=store, block_bytes=100).find(names) == [Tier.STORE] * 4


def test_a_device_that_fails_costs_the_store_and_not_the_step(start, device, kit, monkeypatch, caplog):
    monkeypatch.setattr("sumibi.tiers.connector.worker._STAGING_BYTES", 1)  # two batches
    worker = start(host=10_000)
    names = kit.chain("a", 2)
    down(worker, names, [0, 1])

    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(device.blocks, "write", fail)
    assert load(worker, names, [20, 21]) == ({"r"}, {20, 21}, [names[0]])
    monkeypatch.setattr(device.blocks, "read", fail)
    for _ in range(3):  # what it holds while it copies comes back
        assert down(worker, kit.chain("b", 1), [2]) == []
    assert "could not be stored" in caplog.text
    assert "the rest is computed" in caplog.text


def test_an_idle_step_waits_a_moment_for_a_load(start, device, kit, monkeypatch):
    worker = start(host=10_000)
    names = kit.chain("a", 1)
    down(worker, names, [0])
    held = threading.Event()
    write = device.blocks.write
    monkeypatch.setattr(device.blocks, "write", lambda *a: (held.wait(5), write(*a)))
    worker.begin(Orders(loads=[Load("r", names, [20])]))
    start_s = time.monotonic()
    assert worker.finished(idle=True) == (set(), set())
    assert time.monotonic() - start_s >= 0.004
    held.set()
    kit.wait_for(lambda: worker.finished(idle=True) == ({"r"}, set()))


def test_digests_tell_files_and_namespaces_apart(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 200_000)
    first = files_digest(tmp_path, ["*.safetensors"])
    assert files_digest(file, []) == first
    file.write_bytes(b"a" * 199_999 + b"b")
    assert files_digest(tmp_path, ["*.safetensors"]) != first
    with pytest.raises(ConfigError, match="has none of"):
        files_digest(tmp_path, ["*.gguf"])
    assert namespace_of({"a": 1, "b": (2, 3)}) == namespace_of({"b": (2, 3), "a": 1})
    assert namespace_of({"a": 1}) != namespace_of({"a": 2})
