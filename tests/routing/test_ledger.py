import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_lab import REPEATABLE

from sumibi.core.errors import SumibiError
from sumibi.routing.ledger import Ledger, Load, Owner, Reservation, inflight_since


def owner(name):
    return Owner("gateway", 0, name)


def reservation(name, tokens=100):
    return Reservation(
        owner(name), uncached_tokens=tokens, kv_tokens=2 * tokens, work_ns=tokens * 1000, streamed=True
    )


def state(load):
    return (
        load.inflight,
        len(load.prefills),
        load.prefill_tokens,
        load.prefill_work_ns,
        load.decodes,
        load.decode_kv_tokens,
    )


EMPTY = (0, 0, 0, 0, 0, 0)


def test_parts_on_two_endpoints_are_released_each_where_they_were_counted():
    ledger, prefill, decode = Ledger(), Load(), Load()
    ledger.reserve(reservation("r"), prefill, decode, 0.0)
    assert state(prefill) == (1, 1, 100, 100_000, 0, 0)
    assert state(decode) == (1, 0, 0, 0, 0, 0)
    assert ledger.end_prefill(owner("r"), 1.0)
    assert state(prefill) == EMPTY
    assert state(decode) == (1, 0, 0, 0, 1, 200)
    assert ledger.release(owner("r"), 2.0) is not None
    assert state(prefill) == state(decode) == EMPTY


def test_each_part_is_released_exactly_once():
    ledger, load = Ledger(), Load()
    ledger.reserve(reservation("r"), load, load, 0.0)
    assert [ledger.end_prefill(owner("r"), 1.0) for _ in range(2)] == [True, False]
    assert [ledger.release(owner("r"), 2.0) is None for _ in range(2)] == [False, True]
    assert not ledger.end_prefill(owner("r"), 3.0)
    assert state(load) == EMPTY


def test_an_owner_reserves_once():
    ledger, load = Ledger(), Load()
    ledger.reserve(reservation("r"), load, load, 0.0)
    with pytest.raises(SumibiError, match="reservation already"):
        ledger.reserve(reservation("r"), load, load, 0.0)


def test_a_recount_that_differs_is_told():
    ledger, load = Ledger(), Load()
    ledger.reserve(reservation("r"), load, load, 0.0)
    ledger.check_integrity([load])
    load.prefill_tokens -= 1
    with pytest.raises(SumibiError, match="counters say"):
        ledger.check_integrity([load])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "prefill", "release"]),
            st.integers(0, 4),
            st.integers(0, 2),
            st.integers(0, 2),
        )
    )
)
@settings(REPEATABLE)
def test_whatever_is_reserved_and_released_the_counters_equal_a_recount(steps):
    ledger, loads, held = Ledger(), [Load(), Load(), Load()], set()
    for t, (what, name, prefill_on, decode_on) in enumerate(steps):
        if what == "reserve" and name not in held:
            ledger.reserve(reservation(name, 10 + name), loads[prefill_on], loads[decode_on], float(t))
            held.add(name)
        elif what == "prefill":
            ledger.end_prefill(owner(name), float(t))
        elif what == "release":
            ledger.release(owner(name), float(t))
            held.discard(name)
        ledger.check_integrity(loads)
    for name in range(5):
        ledger.release(owner(name), 1e6)
    assert [state(load) for load in loads] == [EMPTY] * 3


def test_a_scrape_is_compared_with_the_most_that_was_in_flight_since_it_was_sent():
    ledger, load = Ledger(), Load()
    for i in range(3):
        ledger.reserve(reservation(i), load, load, float(i))
    ledger.release(owner(0), 3.0)
    assert [inflight_since(load, t) for t in (0.5, 2.5, 3.0, 9.0)] == [3, 3, 2, 2]


def test_the_memory_of_changes_is_bounded():
    ledger, load = Ledger(), Load()
    for i in range(1000):
        ledger.reserve(reservation(i), load, load, float(i))
        ledger.release(owner(i), float(i))
    assert len(load.history) <= 256
