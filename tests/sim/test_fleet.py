"""Fleet files: those shipped, and what is wrong with others."""

from pathlib import Path

import pytest

from sumibi.core.errors import ConfigError
from sumibi.core.latency import LatencyModel
from sumibi.sim.fleet import load, parse

FLEETS = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "routing" / "fleets").glob("*.yaml"))
GROUP = "{count: 2, latency: qwen3-32b/2xh100, kv_tokens: 300000}"


@pytest.mark.parametrize("path", FLEETS, ids=lambda path: path.stem)
def test_shipped_fleets_are_read(path):
    fleet = load(path)
    assert fleet.name == path.stem
    assert fleet.replicas >= 4


def test_the_fleet_of_the_published_ladder():
    fleet = load(next(path for path in FLEETS if path.stem == "qwen3-32b-tp2-h100"))
    assert (fleet.replicas, fleet.kv_tokens) == (8, 8 * 307_328)


def test_coefficients_may_stand_for_a_name():
    latency = "{a_s: 0.1, b_s: 0.2, q_s: 0.3, d0_s: 0.4, d1_s: 0.5, d2_s: 0.6}"
    fleet = parse(f"{{name: f, groups: [{{count: 1, latency: {latency}, kv_tokens: 1000}}]}}")
    assert fleet.groups[0].times().model == LatencyModel(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{name: f, groups: [], speed: 3}", "speed"),
        ("{name: f, groups: [{count: 2, latency: x, kv_tokens: 1000, chunk: 3}]}", r"chunk.*groups\[0\]"),
        ("{name: f, groups: [{count: two, latency: x, kv_tokens: 1000}]}", r"groups\[0\].count"),
        ("{name: f, groups: [{count: 2, latency: x, kv_tokens: 1000}]}", "latency 'x' is not one of"),
        ("{name: f, groups: []}", "at least one"),
        (f"{{name: f, groups: [{GROUP}, {GROUP}]}}", "name of its own"),
        ("{name: f, groups: [{count: 0, latency: qwen3-32b/2xh100, kv_tokens: 1}]}", r"groups\[0\].count"),
        (f"{{name: f, groups: [{GROUP}], faults: [{{at_s: 1, endpoint: a, kind: slow}}]}}", "replica-0"),
        (f"{{name: f, groups: [{GROUP}], faults: [{{at_s: 1, endpoint: replica-0, kind: odd}}]}}", "kind"),
        (
            f"{{name: f, groups: [{GROUP}], faults: [{{at_s: 1, endpoint: replica-0, kind: restart}}]}}",
            "until_s",
        ),
        ("{name: [", "not YAML"),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(ConfigError, match=said):
        parse(text, "f.yaml")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load(tmp_path / "nothing.yaml")
