from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_lab import REPEATABLE

from sumibi.core.keys import extend_keys
from sumibi.routing.underway import Underway

TEXTS = ["aaaaaaaa", "aaaabbbb", "aaaabbcc", "aab", "aa", "z", "", "aaaaaaaazz", "zz"]
CHAINS = [extend_keys(1, [ord(letter) for letter in text], 1) for text in TEXTS]


class Attempt:
    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.current = True


def shared(ours, theirs):
    """The oracle: leading keys in common, one by one."""
    count = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        count += 1
    return count


@pytest.mark.interpreted
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "add", "remove", "restart"]),
            st.integers(0, 2),
            st.integers(0, len(CHAINS) - 1),
        ),
        max_size=40,
    ),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.integers(0, 10),
)
@settings(REPEATABLE, max_examples=300)
def test_the_prompt_that_shares_most_is_found_for_each_endpoint(steps, have, length):
    underway, there = Underway(), []
    for what, endpoint, chain in steps:
        if what == "add":
            request = SimpleNamespace(event=SimpleNamespace(keys=CHAINS[chain]))
            there.append((request, Attempt(endpoint)))
            underway.add(*there[-1])
        elif what == "remove" and there:
            underway.remove(*there.pop(chain % len(there)))
        elif what == "restart":
            for _, attempt in there:
                attempt.current = attempt.current and attempt.endpoint != endpoint
    for ours in CHAINS:
        keys, most = ours, min(length, len(ours))
        expected = {}
        for request, attempt in there:
            blocks = min(shared(keys, request.event.keys), most)
            best = expected.get(attempt.endpoint, (have[attempt.endpoint], None))
            if attempt.current and blocks > best[0]:
                expected[attempt.endpoint] = (blocks, attempt)
        found = {
            e: (blocks, attempt) for e, blocks, attempt, _ in underway.reach(keys, most, have.__getitem__)
        }
        assert found == expected
    for request, attempt in there:
        underway.remove(request, attempt)
    assert not underway._roots
