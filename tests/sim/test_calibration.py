import pytest

from sumibi.core.latency import LatencyModel
from sumibi.routing.config import RouterConfig
from sumibi.sim.calibration import calibrated
from sumibi.sim.fleet import FleetSpec, Group

MODEL = LatencyModel(a_s=0.01, b_s=4e-5, q_s=1e-9, d0_s=0.02, d1_s=1e-4, d2_s=1e-7)


def fleet(*groups):
    return FleetSpec(name="f", overhead_s=0.02, groups=list(groups))


def test_where_llm_d_published_a_rate_it_is_taken():
    config = calibrated(fleet(Group(count=8, latency="qwen3-32b/2xh100", kv_tokens=300_000)))
    assert (config.r_peak_tokens_per_s, config.sticky_limit_s) == (15_928, 18.0)


def test_elsewhere_it_is_a_chunk_over_its_time_on_an_idle_endpoint():
    config = calibrated(fleet(Group(count=2, latency=MODEL, kv_tokens=300_000)))
    # 0.02 + 0.01 + 8192*4e-5 + 1e-9 * 8192^2 / 2 = 0.03 + 0.32768 + 0.033554
    assert config.r_peak_tokens_per_s == pytest.approx(8192 / 0.391234432, rel=1e-4)


def test_the_rule_comes_near_the_published_rate_where_both_exist():
    group = Group(count=1, latency="qwen3-32b/2xh100", kv_tokens=300_000)
    chunk_s = 0.10 + group.times().alone_s(8192)  # this fleet's clients see some 0.1 s more
    assert 8192 / chunk_s == pytest.approx(15_928, rel=0.15)


def test_the_most_frequent_kind_counts_and_other_settings_stay():
    slow = LatencyModel(a_s=1.0, b_s=4e-4, q_s=1e-9, d0_s=0.02, d1_s=1e-4, d2_s=1e-7)
    few, many = (
        Group(name=n, count=c, latency=m, kv_tokens=1000) for n, c, m in (("s", 1, slow), ("f", 3, MODEL))
    )
    config = calibrated(fleet(few, many), RouterConfig(max_attempts=7))
    assert config.max_attempts == 7
    assert config.r_peak_tokens_per_s == calibrated(fleet(many)).r_peak_tokens_per_s
