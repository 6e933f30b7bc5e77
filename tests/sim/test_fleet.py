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


SPEED = "latency: qwen3-32b/2xh100"


def fleet_text(group: str = "", fleet: str = "", fault: str = "") -> str:
    faults = f", faults: [{{endpoint: replica-0, {fault}}}]" if fault else ""
    return f"{{name: f, groups: [{{count: 2, kv_tokens: 300000, {group or SPEED}}}]{fleet}{faults}}}"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"fleet": ", scrape_interval_s: 0"}, "scrape_interval_s must be a number above 0, not 0"),
        ({"fleet": ", scrape_interval_s: -1"}, "scrape_interval_s must be a number above 0, not -1"),
        ({"fleet": ", scrape_interval_s: .nan"}, "scrape_interval_s must be a number above 0, not nan"),
        ({"fleet": ", timeout_s: -1"}, "timeout_s must be a number above 0, not -1"),
        ({"fleet": ", timeout_s: 0"}, "timeout_s must be a number above 0, not 0"),
        ({"fleet": ", overhead_s: -0.1"}, "overhead_s must be 0 or more, and finite, not -0.1"),
        ({"fleet": ", kv_event_delay_s: -0.1"}, "kv_event_delay_s must be 0 or more"),
        ({"fleet": ", kv_event_delay_s: .inf"}, "kv_event_delay_s must be 0 or more, and finite, not inf"),
        ({"fleet": ", detect_s: -2"}, "detect_s must be 0 or more"),
        ({"fleet": ", store: {tokens: 0, gb_per_s: 1}"}, r"store\.tokens must be at least 1, not 0"),
        ({"fleet": ", store: {tokens: 9, gb_per_s: 0}"}, r"store\.gb_per_s must be a number above 0"),
        (
            {"fleet": ", store: {tokens: 9, gb_per_s: 1, latency_s: -1}"},
            r"store\.latency_s must be 0 or more",
        ),
        ({"group": f"{SPEED}, host: {{tokens: -1}}"}, r"groups\[0\]\.host\.tokens must be at least 1"),
        ({"group": f"{SPEED}, host: {{tokens: 9, gb_per_s: -3}}"}, r"groups\[0\]\.host\.gb_per_s must be"),
        ({"group": f"{SPEED}, host: {{tokens: 9, latency_s: -3}}"}, r"groups\[0\]\.host\.latency_s must be"),
        ({"group": f"{SPEED}, link: {{gb_per_s: 0}}"}, r"groups\[0\]\.link\.gb_per_s must be"),
        ({"group": f"{SPEED}, link: {{setup_s: -1}}"}, r"groups\[0\]\.link\.setup_s must be"),
        ({"group": f"{SPEED}, link: {{keep_s: -1}}"}, r"groups\[0\]\.link\.keep_s must be"),
        ({"group": f"{SPEED}, adapter_slots: 0"}, r"groups\[0\]\.adapter_slots must be at least 1"),
        ({"group": f"{SPEED}, adapter_load_s: -1"}, r"groups\[0\]\.adapter_load_s must be 0 or more"),
        (
            {"group": "latency: {a_s: 0.1, b_s: 0.2, q_s: 0.3, d0_s: -0.4, d1_s: 0.5, d2_s: 0.6}"},
            r"groups\[0\]\.latency\.d0_s must be",
        ),
        (
            {"group": "latency: {a_s: 0, b_s: 0, q_s: 0, d0_s: 0.4, d1_s: 0.5, d2_s: 0.6}"},
            r"groups\[0\]\.latency: a_s, b_s, q_s must not all be 0",
        ),
        (
            {"group": "latency: {a_s: 0.1, b_s: 0.2, q_s: 0.3, d0_s: 0, d1_s: 0, d2_s: 0}"},
            r"groups\[0\]\.latency: d0_s, d1_s, d2_s must not all be 0",
        ),
        ({"fault": "kind: slow, at_s: -1"}, r"faults\[0\]\.at_s must be 0 or more, and finite, not -1"),
        ({"fault": "kind: slow, at_s: 1, factor: 0"}, r"faults\[0\]\.factor must be a number above 0, not 0"),
        ({"fault": "kind: scrape, at_s: 1, factor: -3"}, r"faults\[0\]\.factor must be a number above 0"),
        (
            {"fault": "kind: slow, at_s: 5, until_s: 5"},
            r"faults\[0\]\.until_s must be later than at_s \(5\), and finite, not 5",
        ),
        ({"fault": "kind: restart, at_s: 5, until_s: 1"}, r"faults\[0\]\.until_s must be later than at_s"),
        (
            {"group": f"{SPEED}, role: decode"},
            r"groups\[0\]\.role: nobody computes prompts for model 'model'",
        ),
        ({"group": f"{SPEED}, role: prefill"}, r"groups\[0\]\.role: nobody generates for model 'model'"),
    ],
)
def test_numbers_out_of_range_are_named(parts, said):
    with pytest.raises(ConfigError, match=rf"^f\.yaml: {said}"):
        parse(fleet_text(**parts), "f.yaml")


def test_numbers_at_the_edge_of_their_range_are_fine():
    spec = parse(
        fleet_text(
            group=f"{SPEED}, host: {{tokens: 1, latency_s: 0}}, link: {{setup_s: 0}}, adapter_load_s: 0",
            fleet=", overhead_s: 0, kv_event_delay_s: null, detect_s: 0, timeout_s: null",
            fault="kind: slow, at_s: 0, until_s: 0.5, factor: 0.5",
        )
    )
    assert (spec.overhead_s, spec.kv_event_delay_s, spec.faults[0].until_s) == (0, None, 0.5)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load(tmp_path / "nothing.yaml")
