"""Published directions at reduced size. Those that do not come out there are on the benchmark's page."""

import pytest

from sumibi.bench.directions import OSS_PREFILL, Row, controls, figures_of, w3, w12


def test_host_memory_below_the_device_helps_w3():
    """Published: 43.67 -> 0.89 s and 115.6 -> 25.4 s of mean TTFT; 114,663 -> 300,749 tokens/s."""
    rows = list(w3(quick=True))
    assert [row.agrees for row in rows] == [True] * 3


def test_a_long_shared_prompt_is_fetched_sooner_than_computed():
    """W12, published: 6.83 -> 1.09 s for pairs."""
    fetched = [row for row in w12(quick=True) if row.what.endswith("recompute -> fetch")]
    assert [row.agrees for row in fetched] == [True, True]


def test_where_pools_and_tiers_must_not_look_good_they_do_not():
    rows = list(controls(None, quick=True))
    assert len(rows) >= 5
    assert [row.what for row in rows if not row.agrees] == []


@pytest.mark.parametrize(
    ("tokens", "published_s"), [(8_192, 0.250), (16_384, 0.510), (32_768, 1.173), (49_152, 1.988)]
)
def test_the_fit_to_published_recompute_times(tokens: int, published_s: float):
    a, b, q = OSS_PREFILL
    assert 0.015 + a + b * tokens + q * tokens**2 / 2 == pytest.approx(published_s, rel=0.07)


@pytest.mark.parametrize(
    ("better", "lower", "after", "agrees"),
    [
        (True, True, 0.9, True),
        (True, True, 1.0, False),
        (False, True, 1.1, True),
        (False, True, 0.9, False),
        (True, False, 1.1, True),
        (False, False, 1.1, False),
    ],
)
def test_a_direction_is_what_was_published(better: bool, lower: bool, after: float, agrees: bool):
    row = Row("W0", "something", better, lower, 1.0, after, "s", "a page")
    assert row.agrees is agrees
    (made,) = figures_of([row])
    assert (made.value, made.held) == (after, agrees)
    assert made.op == ("<=" if better is lower else ">=")
