"""How fast tiers are said to be: lines through loads, by hand."""

import pytest

from sumibi.engine.speeds import Speeds
from sumibi.tiers import Tier

DISK = Tier.DISK


def told(*loads, speeds=None):
    """After loads of (bytes, seconds) from disk."""
    speeds = speeds or Speeds()
    for size_bytes, seconds in loads:
        speeds.loaded(DISK, size_bytes, seconds)
    return speeds.told().get(DISK)


def on_a_line(latency_s, gb_per_s, *sizes):
    return [(size, latency_s + size / (gb_per_s * 1e9)) for size in sizes]


def test_nothing_is_told_of_the_first_two_loads_and_of_other_tiers():
    speeds = Speeds()
    assert told((10**6, 0.1), (10**6, 0.1), speeds=speeds) is None
    speeds.loaded(Tier.HOST, 10**6, 0.001)
    told((10**6, 0.1), speeds=speeds)
    assert set(speeds.told()) == {DISK}


def test_loads_of_different_lengths_tell_latency_from_bandwidth():
    speed = told(*on_a_line(0.03, 2.0, 10**6, 10**7, 10**8, 5 * 10**7))
    assert (speed.gb_per_s, speed.latency_s) == (pytest.approx(2.0), pytest.approx(0.03))
    assert speed.takes_s(10**9) == pytest.approx(0.53)


def test_loads_of_one_length_tell_their_mean():
    speed = told((10**8, 0.1), (10**8, 0.2), (10**8, 0.15))
    # The later ones weigh more: weights .9025, .95, 1 of 0.1, 0.2 and 0.15 s.
    mean_s = (0.9025 * 0.1 + 0.95 * 0.2 + 0.15) / 2.8525
    assert speed.latency_s == 0.0
    assert speed.gb_per_s == pytest.approx(0.1 / mean_s, rel=0.005)


def test_lines_that_cannot_be_are_not_told():
    # Longer loads that took less; and a line that begins below zero.
    for loads in (
        [(10**6, 0.3), (10**7, 0.2), (10**8, 0.1)],
        [(10**7, 0.001), (2 * 10**7, 0.1), (10**7, 0.001)],
    ):
        speed = told(*loads)
        assert speed.latency_s == 0.0
        assert speed.gb_per_s > 0


def test_what_is_told_stays_until_it_is_clearly_wrong():
    speeds = Speeds()
    first = told(*on_a_line(0.0, 1.0, *[10**8] * 5), speeds=speeds)
    assert told(*on_a_line(0.0, 0.9, *[10**8] * 40), speeds=speeds) == first
    slower = told(*on_a_line(0.0, 0.5, *[10**8] * 40), speeds=speeds)
    assert slower.gb_per_s < 0.8
    assert told((0, 1.0), (10**8, 0.0), speeds=speeds) == slower, "nothing that says nothing counts"
