"""What a request leaves behind goes by itself: nothing of it waits for the garbage collector.

Compiled, a function within a function is a cycle of garbage at each call, which keeps all that it can see
(docs/decisions/0029): a prompt's keys, for one.
"""

import gc

import pytest
from routing_lab import Lab, prompt


@pytest.mark.parametrize("endpoints", [3, 40], ids=["all are priced", "few of many are"])
def test_a_request_leaves_no_cycles(endpoints):
    lab = Lab(check=False)
    lab.up(*(f"e{number}" for number in range(endpoints)), kv_tokens=100_000)
    for number in range(20):
        lab.run(f"before{number}", prompt(number % 7, 500))
    gc.collect()
    gc.disable()
    try:
        for number in range(200):
            lab.run(f"r{number}", prompt(number % 7, 500))
        assert gc.collect() < 20  # a request's worth; one cycle each would be hundreds
    finally:
        gc.enable()
