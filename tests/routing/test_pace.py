import pytest

from sumibi.routing.pace import HALF_LIFE_S, Pace


def test_nothing_yet():
    assert Pace().per_s(5.0) == 0.0


def test_a_rate_that_holds_is_found():
    pace = Pace()
    for number in range(2_000):
        pace.one(number / 2)  # two a second
    assert pace.per_s(999.5) == pytest.approx(2.0, rel=0.01)


def test_it_is_met_by_half_after_the_half_life_and_fades_as_fast():
    pace = Pace()
    for number in range(round(HALF_LIFE_S * 4)):
        pace.one(number / 4)
    assert pace.per_s(HALF_LIFE_S) == pytest.approx(2.0, rel=0.02)
    assert pace.per_s(2 * HALF_LIFE_S) == pytest.approx(1.0, rel=0.02)


def test_long_silence_is_no_error():
    pace = Pace()
    pace.one(1.0)
    assert pace.per_s(1e9) == 0.0
