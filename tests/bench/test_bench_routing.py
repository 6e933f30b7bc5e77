"""`sumibi bench routing` and `claims`: a tiny grid from end to end, what is kept, what scenes are."""

import json
import os
import subprocess
import sys
from math import nan
from pathlib import Path
from signal import SIGINT
from time import monotonic, sleep
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from sumibi.bench import grid, pool, routing
from sumibi.bench.claims import chunk_stall_s
from sumibi.bench.judging import Judge
from sumibi.bench.least import Least, least_busy_spread
from sumibi.bench.playing import part_of, play
from sumibi.bench.scenes import Caches, Point, Scene
from sumibi.bench.traffic import live_tokens, played_by, prepared, workload
from sumibi.cli import main
from sumibi.core.errors import ConfigError
from sumibi.routing.policies import POLICIES
from sumibi.sim.arithmetic import in_order
from sumibi.sim.fleet import FleetSpec, Group
from sumibi.sim.latency import named
from sumibi.sim.results import Calls, Status

AGENTS = "agents:sessions=6,users=4,context_tokens=50000"
SMALL = FleetSpec(
    name="small",
    groups=[Group(count=2, latency="llama-3.1-8b/1xh100", kv_tokens=400_000)],
    scrape_interval_s=0.05,
)


def quiet(who: str, what: str, done: float | None) -> None:
    pass


def tiny(agents: str) -> list[Scene]:
    return [
        Scene(
            row="cache grid",
            name="tiny",
            traffic=AGENTS,
            users=4,
            fleet=Caches(replicas=2, blocks=2_000),
        ),
        Scene(row="serving grid", name="tiny", traffic=AGENTS, users=4, fleet=SMALL),
    ]


def test_a_tiny_grid_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(grid.ROWS, "cache", tiny)
    told: list[str] = []

    def bench() -> list[Judge]:
        told.clear()
        return routing.bench_routing(
            quick=False,
            only=["cache"],
            policies=["round-robin", "session-sticky"],
            traces=None,
            jobs=1,
            json=tmp_path / "f.json",
            page=tmp_path / "page" / "RESULTS.md",
            report=lambda who, what, done: told.append(what),
            cache=tmp_path / "cache",
        )

    judged = bench()
    assert told[0].startswith("0 of 6 runs")
    assert told[-1].startswith("6 runs")
    written = json.loads((tmp_path / "f.json").read_text())
    names = {each["name"] for each in written}
    assert {each.name for row in judged for each in row.figures} < names
    assert {"cache grid: targets reached, of 4", "serving grid: targets reached, of 6"} <= names
    fields = {"name", "value", "unit", "target", "op", "held", "baseline", "n", "spread", "cmd", "commit"}
    assert all(set(each) == fields for each in written)
    page = (tmp_path / "page" / "RESULTS.md").read_text()
    assert "|  | cost | round-robin | session-sticky | pooled LRU |" in page
    assert "![caches](caches.png)" in page
    assert (tmp_path / "page" / "serving.png").stat().st_size > 10_000
    # the second time nothing is played and all is the same
    again = bench()
    assert told == ["6 runs (6 kept from before) in 0 s"]
    assert [row.figures for row in again] == [row.figures for row in judged]


def test_only_session_sticky_gets_session_ids():
    named_sessions = workload(AGENTS, None, 0, None)
    assert played_by("session-sticky", named_sessions).names_sessions
    assert not any(played_by(policy, named_sessions).names_sessions for policy in POLICIES
                   if policy != "session-sticky")  # fmt: skip


def test_halves_are_all_sessions_once():
    whole = workload(AGENTS, None, 0, None)
    halves = [workload(AGENTS, part, 0, None).sessions for part in (0, 1)]
    assert [len(half) for half in halves] == [3, 3]
    assert {s.name for half in halves for s in half} == {s.name for s in whole.sessions}


def test_a_part_is_what_its_rows_say():
    calls = Calls()
    for arrival_s, first_s, end_s, cached, status in (
        (10.0, 11.0, 20.0, 0, Status.DONE),
        (12.0, 15.0, 30.0, 600, Status.DONE),
        (14.0, nan, 314.0, 0, Status.TIMEOUT),
    ):
        calls.arrival_s.append(arrival_s)
        calls.first_s.append(first_s)
        calls.end_s.append(end_s)
        calls.prompt_tokens.append(1_000)
        calls.cached_tokens.append(cached)
        calls.output_tokens.append(50)
        calls.status.append(status)
    part = part_of(calls, [0, 1])
    assert (part.requests, part.served, part.hit_rate) == (2, 2, 0.3)
    assert (part.ttft_mean_s, part.ttft_p90_s) == (2.0, 2.8)
    assert part.output_tokens_per_s == 5.0  # 100 tokens from 10 to 30 s
    part = part_of(calls, [0, 1, 2])
    assert (part.requests, part.served, part.ttft_mean_s) == (3, 2, 2.0)
    assert part.output_tokens_per_s == 100 / 304  # the client that gave up kept the engines until 314 s


def test_how_even_busy_time_could_have_been():
    """Two replicas, 400 s of work together in the first ten minutes: 200 s each would be even."""
    calls = Calls()
    for arrival_s, end_s in ((0.0, 260.0), (260.0, 370.0), (550.0, 650.0)):
        calls.arrival_s.append(arrival_s)
        calls.end_s.append(end_s)
    run = SimpleNamespace(
        calls=calls, busy_s=[{0: 60.0, 1: 60.0, 2: 60.0, 3: 60.0, 4: 60.0}, {5: 60.0, 9: 40.0}]
    )
    least = Least([0, 1, 2], service_s=[250.0, 110.0, 90.0])
    # the first took 250 s on one replica; of the third at least 40 s were before 600 s
    assert least_busy_spread(run, least, lambda i: i) == pytest.approx(250 / 200)
    assert least_busy_spread(run, least, lambda i: "session") == pytest.approx((250 + 110 + 40) / 200)


def test_one_user_on_each_replica_is_even():
    scene = Scene(row="W8", name="two", traffic="w8:users=2,sessions=6", fleet=SMALL)
    made = play(Point(scene, "least-loaded", 0), None)
    assert made.e2e_mean_s == pytest.approx(made.even_e2e_mean_s, rel=0.02)
    assert made.whole.ttft_mean_s == pytest.approx(made.least_ttft_mean_s, rel=0.15)


@pytest.mark.traces
@pytest.mark.parametrize(("users", "tokens_m"), [(32, 5.83), (64, 10.05)])
def test_what_live_sessions_ask_is_the_reference_s(traces: Path, users: int, tokens_m: float):
    """Sum of the latest prompts of all live sessions at its largest, by others' code."""
    stream = in_order(prepared("weka", None, 0, traces), users)
    assert live_tokens(stream.requests) / 1e6 == pytest.approx(tokens_m, abs=0.005)


def test_an_outcome_is_kept_until_what_it_depends_on_changes(tmp_path: Path):
    scene = tiny("")[0]
    made = play(Point(scene, "round-robin", 0), None)
    kept = pool.Kept(tmp_path, "code")
    kept.put(Point(scene, "round-robin", 0), made)
    renamed = msgspec.structs.replace(scene, name="another table's", seeds=3)
    assert kept.get(Point(renamed, "round-robin", 0)) == made or made.ttft_p50_s != made.ttft_p50_s
    assert kept.get(Point(renamed, "round-robin", 0)) is not None
    assert kept.get(Point(scene, "round-robin", 1)) is None
    assert kept.get(Point(msgspec.structs.replace(scene, users=5), "round-robin", 0)) is None
    assert pool.Kept(tmp_path, "other code").get(Point(scene, "round-robin", 0)) is None


def test_only_the_latest_versions_are_kept(tmp_path: Path):
    for number in range(pool.KEPT_VERSIONS + 2):
        pool.Kept(tmp_path, f"code {number}")
        os.utime(tmp_path / f"code {number}", (number, number))
    pool.Kept(tmp_path, "code 0")
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == pool.KEPT_VERSIONS
    assert {"code 0", "code 9"} <= left  # just used, and the latest
    assert "code 2" not in left


def test_a_broken_file_is_played_again(tmp_path: Path):
    point = Point(tiny("")[0], "random", 0)
    kept = pool.Kept(tmp_path, "code")
    kept.put(point, play(point, None))
    assert kept.get(point) is not None
    (path,) = (tmp_path / "code").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert kept.get(point) is None


def test_a_point_that_fails_does_not_end_the_others(tmp_path: Path):
    good = tiny("")[0]
    bad = msgspec.structs.replace(good, traffic="weka")
    done, failed = pool.run(
        [Point(bad, "random", 0), Point(good, "random", 0)],
        traces=None,
        jobs=1,
        kept=pool.Kept(tmp_path, "code"),
        report=quiet,
    )
    assert [point.scene.traffic for point, _ in done] == [AGENTS]
    assert [each.cause for each in failed] == ["ConfigError: there is no traffic 'weka' here"]


LONG = """
from pathlib import Path
from sumibi.bench.pool import Kept, run
from sumibi.bench.scenes import Caches, Point, Scene
scene = Scene(row="r", name="n", traffic="agents:sessions=400", fleet=Caches(replicas=2, blocks=100))
run([Point(scene, "random", 0)], traces=None, jobs=1, kept=Kept(Path({directory!r}), "code"),
    report=lambda who, what, done: None)
"""


def test_workers_end_with_whoever_started_them(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", LONG.format(directory=str(tmp_path))])
    try:
        workers: list[psutil.Process] = []
        late_s = monotonic() + 20
        while not any("spawn_main" in " ".join(each.cmdline()) for each in workers):
            assert monotonic() < late_s
            assert parent.poll() is None
            sleep(0.1)
            workers = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    for each in alive:
        each.kill()
    assert not alive


ENDLESS = """
from sumibi.bench import grid
from sumibi.bench.scenes import Caches, Scene
from sumibi.cli import main
def long(agents):
    return [Scene(row="r", name="n", traffic="agents:sessions=400", fleet=Caches(replicas=2, blocks=100))]
if __name__ == "__main__":
    grid.ROWS["cache"] = long
    words = ["--only", "cache", "--jobs", "1", "--json", "f.json", "--results", "page.md"]
    raise SystemExit(main(["bench", "routing", *words]))
"""


def test_an_interrupt_ends_the_simulations_at_once(tmp_path: Path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    parent = subprocess.Popen(
        [sys.executable, "endless.py"],
        cwd=tmp_path,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers: list[psutil.Process] = []
    late_s = monotonic() + 20
    try:
        while not any("spawn_main" in " ".join(each.cmdline()) for each in workers):
            assert monotonic() < late_s
            assert parent.poll() is None
            sleep(0.1)
            workers = psutil.Process(parent.pid).children()
        os.killpg(parent.pid, SIGINT)  # a terminal tells the whole group
        _, said = parent.communicate(timeout=10)
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == 130
    assert said.splitlines()[-1].startswith("sumibi: stopped; runs that were done are kept")
    assert "Traceback" not in said
    assert not psutil.wait_procs(workers, timeout=10)[1]


@pytest.mark.parametrize("verb", ["routing", "claims"])
def test_what_cannot_be_written_is_named_before_anything_is_played(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", verb, "--json", "/proc/x.json"]) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nope")
    page = [] if verb == "claims" else ["--results", "page.md", "--only", "cache"]
    assert main(["bench", verb, "--json", "x.json", *page]) == 4
    shown = capsys.readouterr().err
    assert "--json /proc/x.json: cannot be written" in shown
    assert "cannot keep what was played in /proc/nope/sumibi/bench: No such file" in shown
    assert "runs" not in shown


def test_every_scene_of_the_grid_can_be_made():
    names = list(grid.ROWS)
    whole, quick = grid.scenes(names, quick=False), grid.scenes(names, quick=True)
    keys = [(scene.row, scene.name) for scene in whole]
    assert len(set(keys)) == len(keys)
    assert {(scene.row, scene.name) for scene in quick} < set(keys)
    assert {scene.seeds for scene in quick} == {1}
    assert sum(scene.seeds == 3 for scene in whole) == 11
    for scene in whole:
        if isinstance(scene.fleet, FleetSpec):
            assert scene.fleet.scrape_interval_s in (0.05, 15.0)


def test_an_unknown_row_is_named():
    with pytest.raises(ConfigError, match="there is no 'w99'; there are cache, serving"):
        routing.bench_routing(
            quick=True, only=["w99"], policies=[], traces=None, jobs=1, json=Path("x"), page=Path("x"),
            report=quiet,
        )  # fmt: skip


def test_an_unknown_policy_is_named(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "routing", "--policies", "luck"]) == 2
    assert "there is no policy 'luck'" in capsys.readouterr().err


def test_a_chunk_stalls_decodes_as_measured():
    """Qwen3-32B on 2 x H100: 0.89 s for 8,192 tokens after 32,768, 0.23 s for 2,048."""
    times = named("qwen3-32b/2xh100")
    assert chunk_stall_s(times, 8_192, 32_768) == pytest.approx(0.89, rel=0.1)
    assert chunk_stall_s(times, 2_048, 32_768) == pytest.approx(0.23, rel=0.1)
