"""Processes that are killed, processes that share: what is served is right, what was written is found."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sumibi.tiers import DiskTier, StoreTier, Tier
from sumibi.tiers.disk import SMALL_PART

# Imports once and forks a writer for each line that it reads, so that many can be killed in a short time.
WRITERS = """
import importlib.util, itertools, os, sys
spec = importlib.util.spec_from_file_location("kit", sys.argv[1])
kit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kit)
from sumibi.tiers import BlockTiers, TiersConfig

def write(first, log):
    tiers = BlockTiers(TiersConfig.parse(sys.argv[2]), block_bytes=kit.BLOCK, namespace="model")
    tiers.flush(10)
    for turn in itertools.count(first):
        ids = kit.chain(str(turn), 6)
        tiers.store(kit.blocks(ids))
        if not tiers.flush(10):
            return
        os.write(log, b"%d\\n" % turn)
        kit.load(tiers, kit.chain(str(turn - 3), 6))

for line in sys.stdin:
    first, path = line.split()
    pid = os.fork()
    if not pid:
        write(int(first), os.open(path, os.O_WRONLY | os.O_CREAT))
        os._exit(3)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


class Writer:
    """Processes that write turns of 6 blocks one after the other."""

    def __init__(self, config, log):
        self._log = log
        here = str(Path(__file__).with_name("conftest.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITERS, here, config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        self._rounds = 0

    def start(self, first):
        self._rounds += 1
        self._process.stdin.write(f"{first} {self._log}-{self._rounds}\n")
        self._process.stdin.flush()
        self._pid = int(self._process.stdout.readline())

    def kill(self):
        """The turns that it had written by then."""
        os.kill(self._pid, signal.SIGKILL)
        assert self._process.stdout.readline() == "gone\n"
        path = Path(f"{self._log}-{self._rounds}")
        return [int(turn) for turn in path.read_text().split()] if path.exists() else []

    def close(self):
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture
def writers(tmp_path):
    made = []

    def build(config):
        made.append(Writer(config, tmp_path / f"log{len(made)}"))
        return made[-1]

    yield build
    for writer in made:
        writer.close()


@pytest.mark.parametrize(("together", "kills"), [(1, 16), (4, 8)])
def test_killed_at_any_point(kit, make, writers, tmp_path, together, kills):
    """Limits are small, so the kill falls into scans, writes, renames, evictions. `together`: the most blocks
    that share a file.
    """
    chance = random.Random(3 + together)
    blocks = 60 if together == 1 else SMALL_PART * together
    disk = DiskTier(str(tmp_path / "disk"), blocks * kit.FILE)
    writer = writers(f'{{"host_bytes": 12000, "disk": {{"path": "{disk.path}", "bytes": {disk.bytes}}}}}')
    turn = found = 0
    for _ in range(kills):
        writer.start(turn)
        time.sleep(chance.uniform(0.0, 0.1))
        turns = writer.kill()
        tiers = make(disk=disk)
        assert tiers.flush(10)
        assert not list(tmp_path.rglob(".tmp-*"))
        sizes = [path.stat().st_size / kit.FILE for path in tmp_path.rglob("*.kv")]
        assert set(sizes) <= set(range(1, together + 1))
        assert together == 1 or not turns or max(sizes) > 1
        assert sum(sizes) <= blocks
        end = turns[-1] + 1 if turns else turn
        for at in range(max(0, end - 12), end + 1):
            kit.load(tiers, kit.chain(str(at), 6))  # asserts that what comes is right
        for at in turns[-4:]:
            # Written before the kill, and too young to be pushed out.
            assert kit.load(tiers, kit.chain(str(at), 6)) == [Tier.DISK] * 6
            found += 1
        assert tiers.stats().tiers[Tier.DISK].corrupt == 0
        tiers.close()
        turn = end
    assert found >= 10


def test_processes_share_a_directory_and_one_is_killed(kit, make, writers, tmp_path):
    store = StoreTier(str(tmp_path / "store"), 90 * kit.FILE)
    config = f'{{"host_bytes": 12000, "store": {{"url": "{store.url}", "bytes": {store.bytes}}}}}'
    one, two = writers(config), writers(config)
    one.start(0)
    two.start(100000)
    time.sleep(0.7)
    killed = one.kill()
    time.sleep(0.2)
    turns = two.kill()
    assert killed
    assert turns
    tiers = make(store=store)
    assert tiers.flush(10)
    found = 0
    for at in [*killed[-30:], *turns[-30:]]:
        ids = kit.chain(str(at), 6)
        there = tiers.find(ids)
        assert there == [Tier.STORE] * len(there)
        # Asserts that what comes is right. Both remove the oldest, so a chain may have lost some.
        found += kit.load(tiers, ids).count(Tier.STORE)
    assert found >= 60
    assert kit.load(tiers, kit.chain(str(turns[-1]), 6)) == [Tier.STORE] * 6
    assert tiers.stats().tiers[Tier.STORE].corrupt == 0
    assert len(list(tmp_path.rglob("*.kv"))) <= 90 + 2 * 6


def test_what_a_killed_writer_left_half_written_goes_when_it_is_old(kit, make, tmp_path):
    tiers = make(store=StoreTier(str(tmp_path), 100 * kit.FILE))
    tiers.store(kit.blocks(kit.chain("a", 1)))
    assert tiers.flush(5)
    folder = next(tmp_path.rglob("*.kv")).parent
    old, young = folder / ".tmp-host-1-aa", folder / ".tmp-host-2-bb"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    tiers._down.writers[Tier.STORE].nudge()
    kit.wait_for(lambda: not old.exists())
    assert tiers.flush(5)
    assert young.exists()
