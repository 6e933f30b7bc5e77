"""Figures of a run, by hand."""

import pytest

from sumibi.sim.histogram import Histogram
from sumibi.sim.results import (
    NAN,
    Calls,
    Status,
    busy_over_time,
    busy_spread,
    hit_rate_over_time,
    mean,
    output_rate_by_stage,
    percentile,
    uncached_by_replica,
)


def row(calls: Calls, **values) -> None:
    for name in Calls.__slots__:
        getattr(calls, name).append(values.get(name, 0))


def test_percentiles_are_linear_between_ranks():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, q) for q in (0.0, 0.5, 0.9, 1.0)] == pytest.approx([1.0, 2.5, 3.7, 4.0])
    assert percentile([], 0.5) != percentile([], 0.5), "nothing has no percentile"
    assert mean([1.0, 2.0, 6.0]) == 3.0


def test_a_histogram_knows_quantiles_within_a_percent():
    histogram, other = Histogram(), Histogram()
    histogram.add(0.01, 90)
    other.add(1.0, 9)
    other.add(5.0, 1)
    histogram.merge(other)
    assert histogram.total == 100
    for q, expected in ((0.5, 0.01), (0.9, 0.01), (0.95, 1.0), (0.99, 1.0), (1.0, 5.0)):
        assert histogram.quantile(q) == pytest.approx(expected, rel=0.01)
    assert [part for _, part in histogram.points()] == [0.9, 0.99, 1.0]
    assert Histogram().quantile(0.5) == 0.0


def test_spread_of_busy_time_by_windows():
    # Two windows of ten minutes: 500 s and 100 s, 60 s each; the third has too little work to say anything.
    first = {0: 250.0, 9: 250.0, 10: 60.0, 25: 30.0}
    second = {3: 100.0, 19: 60.0}
    spreads = [500 / 300, 1.0]
    assert busy_spread([first, second]) == pytest.approx(percentile(spreads, 0.95))
    assert busy_over_time([first, second])[1] == [(0.0, 100 / 600), (600.0, 60 / 600)]


def test_work_hits_and_rates():
    calls = Calls()
    row(
        calls,
        arrival_s=0,
        end_s=10,
        endpoint=0,
        prefill=0,
        prompt_tokens=100,
        cached_tokens=40,
        output_tokens=50,
    )
    row(
        calls,
        arrival_s=5,
        end_s=20,
        endpoint=1,
        prefill=1,
        prompt_tokens=100,
        cached_tokens=90,
        output_tokens=150,
    )
    # Computed on one replica, generated on another: the work is the first one's.
    row(calls, arrival_s=700, end_s=705, endpoint=0, prefill=1, prompt_tokens=300, cached_tokens=30, stage=1)
    row(
        calls,
        arrival_s=6,
        end_s=25,
        endpoint=1,
        prefill=1,
        prompt_tokens=999,
        status=Status.TIMEOUT,
        first_s=NAN,
    )
    assert calls.done() == [0, 1, 2]
    assert uncached_by_replica(calls, 2) == [60, 280]
    assert hit_rate_over_time(calls) == [(0.0, 130 / 200), (600.0, 0.1)]
    # The request that was given up ends its stage, its tokens do not count.
    assert output_rate_by_stage(calls) == {0: 200 / 25, 1: 0.0}
