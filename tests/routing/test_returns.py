"""When prefixes are wanted again: estimates against numbers worked out by hand.

What is made up at the start for each class: 20 uses, of which a part returned evenly over the bins of 1 s to
300 s idle. A bin is a sixth of a doubling of 1 + the idle time, so these are bins 6 to 49: 44 of them.
"""

import pytest

from sumibi.routing.returns import BUSY_S, REFRESH_USES, ReturnTimes


def test_before_any_traffic_prefixes_return_as_agents_do():
    returns = ReturnTimes(1000)
    assert [returns.chance(uses, 0.0) for uses in (1, 2, 3, 4, 50)] == pytest.approx(
        [0.5, 0.9, 0.9, 0.95, 0.95]
    )
    assert returns.chance(1, 400.0) == returns.chance(50, 400.0) == 0.0
    # Idle for 22 s is in the middle of the 44 bins: half of those that return did, 5 of 20, and 5 of the
    # other 15 still will (bin 27 is half over).
    assert returns.chance(1, 22.0) == pytest.approx((10 - 21.5 / 44 * 10) / (20 - 21.5 / 44 * 10))


def test_what_is_used_once_and_never_again_is_less_and_less_likely_to_return():
    returns = ReturnTimes(100_000)
    for i in range(REFRESH_USES):
        returns.used([10 * i + j for j in range(4)], float(i))
    # 10 made-up returns of 20 + 128 uses.
    assert returns.chance(1, 0.0) == pytest.approx(10 / 148)
    # At bin 27: 21.5 of 44 bins are over.
    gone = 10 * 21.5 / 44
    assert returns.chance(1, 22.0) == pytest.approx((10 - gone) / (148 - gone))
    assert returns.chance(4, 0.0) == pytest.approx(0.95)  # nobody was seen that is used often


def conversation(returns, turns, idle_s):
    """One that grows by a block a turn, is answered in 5 s and back after `idle_s`."""
    t = 0.0
    for turn in range(turns):
        returns.used(list(range(turn + 1)), t)
        returns.ended(list(range(turn + 1)), t + 5.0)
        t += 5.0 + idle_s


def test_a_conversation_that_is_always_back_is_expected_back_until_it_is_late():
    returns = ReturnTimes(100_000)
    conversation(returns, REFRESH_USES, 10.0)
    # Its turns 4 to 128 are uses of what is used often, 125 beside the 20; it was back 124 times, after 10 s
    # (bin 20), beside the 19 made up.
    each = 19 / 44
    assert returns.chance(4, 0.0) == pytest.approx(143 / 145)
    before = 14 * each + (each + 124) / 2  # bins 6 to 19, and half of bin 20
    assert returns.chance(100, 10.0) == pytest.approx((143 - before) / (145 - before))
    before = 29 * each + 124 + each / 2  # idle for 60 s: bin 35
    assert (
        returns.chance(4, 60.0)
        == pytest.approx((143 - before) / (145 - before))
        == pytest.approx(0.7579, rel=1e-3)
    )
    # Of its first turns one is a first use, two are few: each beside 20, and each was back.
    assert returns.chance(1, 0.0) == pytest.approx(11 / 21)
    assert returns.chance(3, 0.0) == pytest.approx(20 / 22)


def test_who_is_expected_back_waits_for_what_is_left_if_the_endpoint_is_busy():
    returns = ReturnTimes(100_000)
    conversation(returns, REFRESH_USES, 10.0)
    assert BUSY_S[:6] == (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    # The part of 145 that is back after each of these from bin 0 on (idle 0.06 s): bins 3, 6, 9, 14, 19 and
    # 24, the last of which is the first beyond 10 s.
    each = 19 / 44
    back = [0.0, each / 2, 3.5 * each, 8.5 * each, 13.5 * each, 18.5 * each + 124]
    back = [part / 145 for part in back]
    # How long they wait is the integral over the time that it is busy, by trapezoids.
    waits, wait, last_s, last = [], 0.0, 0.0, 0.0
    for busy_s, part in zip(BUSY_S, back, strict=False):
        wait += (busy_s - last_s) * (part + last) / 2
        last_s, last = busy_s, part
        waits.append(wait)
    assert returns.delays_s(4, 0.0)[:6] == pytest.approx(waits)
    assert waits[3:] == pytest.approx([0.04207, 0.1731, 3.975], rel=1e-3)
    # What is idle for so long that nothing ever returned after it waits for nothing.
    assert returns.delays_s(4, 100_000.0) == (0.0,) * len(BUSY_S)


def test_delays_are_bounded_by_the_busy_time_and_grow_with_it():
    returns = ReturnTimes(100_000)
    conversation(returns, REFRESH_USES, 3.0)
    for idle_s in (0.0, 1.0, 2.5, 10.0, 200.0):
        waits = returns.delays_s(8, idle_s)
        assert list(waits) == sorted(waits)
        assert all(0.0 <= wait_s <= busy_s for wait_s, busy_s in zip(waits, BUSY_S, strict=True))


def test_idle_begins_where_the_request_ends():
    returns = ReturnTimes(100_000)
    for turn in range(REFRESH_USES):
        returns.used([1, 2, 3], 100.0 * turn)
        returns.ended([1, 2, 3], 100.0 * turn + 99.0)
    # Back after 1 s each time (bin 6), not after 100 s (bin 39).
    each = 19 / 44
    before = 33 * each + 124 + each / 2
    assert returns.chance(4, 100.0) == pytest.approx((143 - before) / (145 - before))


def test_a_prefix_that_many_share_is_wanted_often_what_hangs_from_it_is_not():
    returns = ReturnTimes(100_000)
    for i in range(REFRESH_USES):
        returns.used([1, 2, 3, 100 + i], float(10 * i))
    # The shared one is touched each time, each time after 10 s; the other parts are used once.
    assert returns.chance(8, 0.0) > 0.9
    assert returns.chance(1, 0.0) < 0.15
