"""`sumibi replay`: figures that can be worked out by hand, files that it writes, mistakes that it names."""

import json
import os
import re
from pathlib import Path

import pytest

from sumibi.bench.bounds import capacity_tokens
from sumibi.bench.replay import policies, policies_for, replay, with_users, workload_of
from sumibi.bench.replay_report import check_output, print_table
from sumibi.cli import main
from sumibi.core.errors import ConfigError
from sumibi.routing.policies import POLICIES
from sumibi.sim.fleet import FleetSpec, Group, parse
from sumibi.sim.workload import Workload

FLEET = """\
name: small
groups:
  - {count: 2, latency: llama-3.1-8b/1xh100, kv_tokens: 6_400}
"""
FIELDS = """
    workload policy seed requests rejected failed token_hit_rate bound_token_hit_rate
    pooled_lru_token_hit_rate work_share ttft_mean_s ttft_p50_s ttft_p90_s ttft_p99_s itl_p50_s itl_p99_s
    e2e_p50_s output_tokens_per_s virtual_s wall_s
"""


@pytest.fixture
def fleet() -> FleetSpec:
    return parse(FLEET)


def write_trace(path: Path, prompts: list[tuple[float, int, list[int]]]) -> Path:
    """Mooncake's form, in blocks of 64: seconds, prompt tokens, block ids."""
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": 1000 * t,
                    "input_length": tokens,
                    "output_length": 10,
                    "hash_ids": ids,
                    "block_size": 64,
                }
            )
            + "\n"
            for t, tokens, ids in prompts
        )
    )
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(
        tmp_path / "t.jsonl",
        [
            (0, 640, list(range(10))),
            (100, 700, list(range(11))),  # its first ten blocks are known: 640 tokens
            (200, 640, list(range(100, 110))),
            (300, 6_464, list(range(101))),  # longer than a replica's cache
        ],
    )


def test_what_can_be_worked_out(trace: Path, fleet: FleetSpec):
    by_policy = {
        one.run.summary.policy: one
        for one in replay(workload_of([str(trace)]), fleet, ["cost", "round-robin"])
    }
    for one in by_policy.values():
        record = one.record()
        assert (record["requests"], record["rejected"], record["failed"]) == (4, 1, 0)
        for bound in ("bound_token_hit_rate", "pooled_lru_token_hit_rate", "pooled_belady_token_hit_rate"):
            assert record[bound] == pytest.approx(640 / 1_980)
        assert one.run.summary.users is None
    kept, turned = by_policy["cost"].record(), by_policy["round-robin"].record()
    assert kept["token_hit_rate"] == pytest.approx(640 / 1_980)
    assert (kept["share_of_bound"], kept["share_of_pooled_lru"]) == (pytest.approx(1), pytest.approx(1))
    # the second request goes to the other replica
    assert turned["token_hit_rate"] == turned["share_of_bound"] == 0
    assert turned["work_share"] == pytest.approx(1_280 / 990)


def test_the_pooled_cache_is_as_large_as_the_fleet(fleet: FleetSpec, tmp_path: Path):
    assert capacity_tokens(fleet) == 12_800
    tiered = FLEET.replace("6_400}", "6_400, host: {tokens: 1_000}}")
    assert capacity_tokens(parse(tiered)) == 14_800
    # three prompts of 90 blocks in turn, and 200 fit: of the one that comes next LRU has 20 blocks left
    prompts = [(10.0 * i, 5_760, list(range(90 * (i % 3), 90 * (i % 3) + 90))) for i in range(9)]
    workload = workload_of([str(write_trace(tmp_path / "t", prompts))])
    (one,) = replay(workload, fleet, ["round-robin"])
    assert one.run.summary.rejected == 0
    assert one.bounds.pooled_lru == pytest.approx(6 * 20 * 64 / (9 * 5_760))
    assert one.bounds.infinite == pytest.approx(6 * 89 * 64 / (9 * 5_760))
    assert one.bounds.pooled_lru < one.bounds.pooled_belady < one.bounds.infinite


def test_users_replace_recorded_times(trace: Path, fleet: FleetSpec):
    workload = workload_of([str(trace)])
    assert with_users(workload, None) is None
    assert with_users(workload, 3) == 3
    assert all(session.start_s is None for session in workload.sessions)
    assert with_users(workload, None) == 32
    assert with_users(workload_of(["w7:users=10"]), None) == 10
    with pytest.raises(ConfigError, match="--users must be at least 1, not 0"):
        with_users(workload, 0)


def test_equal_seeds_give_equal_runs():
    fleet = parse(FLEET.replace("6_400", "64_000"))

    def times(seed: int) -> list[float]:
        workload = workload_of(["w8:users=4,sessions=12"], seed=1)
        (one,) = replay(workload, fleet, ["cost"], seed=seed)
        return list(one.run.calls.end_s)

    assert times(5) == times(5) != times(6)


def test_policies_by_name():
    assert policies("all") == list(POLICIES)
    assert policies("cost, random,cost") == ["cost", "random"]
    with pytest.raises(ConfigError, match="--policy: there is no policy 'best'; there are cost, "):
        policies("cost,best")
    with pytest.raises(ConfigError, match="--policy: no policy is named"):
        policies(",")


def with_roles() -> str:
    prefill, decode = (
        FLEET.split("groups:\n")[1].replace("{count", f"{{role: {role}, name: {role}, count")
        for role in ("prefill", "decode")
    )
    return f"name: pools\ngroups:\n{prefill}{decode}"


def test_all_policies_on_a_fleet_with_roles(fleet: FleetSpec):
    pools = parse(with_roles())
    pairing, left_out = policies_for("all", pools)
    assert pairing == ["cost", "round-robin", "random"]
    assert sorted(pairing + left_out) == sorted(POLICIES)
    assert policies_for("all", fleet) == (list(POLICIES), [])
    # one that is named is not left out in silence
    named, _ = policies_for("all,dynamo-kv", pools)
    assert "dynamo-kv" in named
    assert policies_for("dynamo-kv", pools) == (["dynamo-kv"], [])


def test_all_says_what_it_left_out(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "fleet.yaml").write_text(with_roles())
    words = ["replay", str(trace), "--fleet", str(tmp_path / "fleet.yaml"), "--policy"]
    assert main([*words, "all"]) == 0
    shown = capsys.readouterr().out
    assert "Left out, as they make no pairs of prefill and decode: least-loaded, session-sticky," in shown
    assert main([*words, "least-loaded"]) == 2
    assert "policy least-loaded makes no pairs" in capsys.readouterr().err


def test_where_nothing_could_be_found_there_is_no_share(
    tmp_path: Path, fleet: FleetSpec, capsys: pytest.CaptureFixture[str]
):
    alone = write_trace(tmp_path / "alone", [(0, 640, list(range(10)))])
    replayed = replay(workload_of([str(alone)]), fleet, ["cost"])
    assert replayed[0].record()["share_of_bound"] is None
    print_table(replayed)
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["cost"][1:3] == ["0.0000", "-"]
    assert rows["infinite"][2:] == ["0.0000", "-"]


def test_a_cache_smaller_than_a_block_of_the_traffic_is_named(trace: Path):
    small = parse(FLEET.replace("6_400", "63"))
    with pytest.raises(
        ConfigError, match=r"kv_tokens of group 'replica' must hold .* 't', 64 tokens, not 63"
    ):
        replay(workload_of([str(trace)]), small, ["cost"])


def test_several_files_are_one_workload(trace: Path, tmp_path: Path):
    other = write_trace(tmp_path / "other", [(0, 64, [7])])
    workload: Workload = workload_of([str(trace), str(other)])
    assert workload.requests == 5


def test_the_verb(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "fleet.yaml").write_text(FLEET)
    words = ["replay", str(trace), "--fleet", str(tmp_path / "fleet.yaml"), "--seed", "2"]
    files = [tmp_path / "runs.json", tmp_path / "runs.png"]
    assert main([*words, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    shown = capsys.readouterr()
    assert "t (4 requests, at recorded times) on small, seed 2" in shown.out
    rows = {line.split()[0]: line.split() for line in shown.out.splitlines() if line.strip()}
    assert rows["cost"][1:3] == ["0.3232", "100.0%"]
    assert rows["round-robin"][1:3] == ["0.0000", "0.0%"]
    assert rows["cost"][-2:] == ["1", "0"]
    assert rows["infinite"][2:] == ["0.3232", "100.0%"]
    assert "cost: 4 requests" in shown.err
    runs = json.loads(files[0].read_text())
    assert [run["policy"] for run in runs] == ["cost", "round-robin"]
    assert all(set(FIELDS.split()) <= run.keys() for run in runs)
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["absent.jsonl"], 2, "absent.jsonl: there is no such file"),
        (["w9:users=x"], 2, "w9: `users` must be a positive whole number"),
        (["w9", "absent.jsonl"], 2, "w9 is a generator: it can only be replayed by itself"),
        (["w9", "--policy", "nearest"], 2, "--policy: there is no policy 'nearest'"),
        (["w9", "--plot", "picture.gif"], 2, "--plot picture.gif: the name must end with one of .png"),
        (["w9", "--json", "nowhere/runs.json"], 2, "there is no directory nowhere"),
        (["w9", "--json", "."], 2, "--json .: cannot be written: Is a directory"),
        (["w9", "--json", "/proc/runs.json"], 2, "--json /proc/runs.json: cannot be written"),
        (["w9", "--plot", "/proc/runs.png"], 2, "--plot /proc/runs.png: cannot be written"),
        (["w9", "--json", "fleet.yaml/runs.json"], 2, "there is no directory fleet.yaml"),
        (["recorded"], 2, "recorded is the directory of a recording; its log is recorded/events.jsonl"),
        (["w9", "--users", "0"], 2, "--users must be at least 1, not 0"),
        (["w9", "--fleet", "absent.yaml"], 2, "cannot read the fleet file absent.yaml"),
    ],
)
def test_mistakes(
    words: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text(FLEET)
    Path("recorded").mkdir()
    Path("recorded/events.jsonl").write_text("")
    assert main(["replay", "--fleet", "fleet.yaml", *words]) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert "bounds:" not in shown.err, "nothing was played"


def test_asking_whether_a_file_can_be_written_changes_none(tmp_path: Path):
    there, missing = tmp_path / "there.json", tmp_path / "missing.json"
    there.write_text("before")
    check_output(there, "--json")
    check_output(missing, "--json")
    assert (there.read_text(), missing.exists()) == ("before", False)
    check_output(Path(os.devnull), "--json")
    check_output(tmp_path / "new" / "deep" / "f.json", "--json", make_directory=True)
    with pytest.raises(ConfigError, match=r"--json .*there\.json/f\.json: cannot be written"):
        check_output(there / "f.json", "--json", make_directory=True)


def test_an_interrupt_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "fleet.yaml").write_text(FLEET)
    monkeypatch.setattr("sumibi.bench.replay.replay", interrupted)
    assert main(["replay", "w9", "--fleet", str(tmp_path / "fleet.yaml")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "sumibi: stopped; nothing was written"


def test_policies_that_make_no_pairs_are_named_before_anything_is_played(trace: Path):
    pools = FLEET.replace("{count", "{role: decode, name: d, count") + FLEET.split("groups:\n")[1].replace(
        "{count", "{role: prefill, name: p, count"
    )
    told: list[str] = []
    with pytest.raises(ConfigError, match="dynamo-kv makes no pairs"):
        replay(
            workload_of([str(trace)]),
            parse(pools),
            ["round-robin", "dynamo-kv"],
            report=lambda who, what, done: told.append(who),
        )
    assert told == []
    (run,) = replay(workload_of([str(trace)]), parse(pools), ["round-robin"])
    assert (run.record()["requests"], run.record()["rejected"]) == (4, 1)


def test_the_page_s_fleets_and_fields_are_those_there_are():
    page = (Path(__file__).resolve().parents[2] / "docs/replay.md").read_text()
    first, *others = [parse(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert first.replicas == 4
    assert any(fleet.faults for fleet in others)
    named = re.findall(r"`([a-z_]+)`", page)
    fields = set(FleetSpec.__struct_fields__) | set(Group.__struct_fields__)
    assert fields <= set(named)


def test_the_page_lists_every_field_of_a_run(trace: Path, fleet: FleetSpec):
    page = (Path(__file__).resolve().parents[2] / "docs/replay.md").read_text()
    table = page.partition("| field of `--json` |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    (run,) = replay(workload_of([str(trace)]), fleet, ["cost"])
    assert sorted(named) == sorted(run.record())


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    Path("fleet.yaml").write_text(FLEET)
    assert main(["replay", "w9", "--fleet", "fleet.yaml", "--plot", "p.png"]) == 4
    assert "pip install 'sumibi[plot]'" in capsys.readouterr().err
