"""Mixed exits without sockets, counted by an oracle of its own; a million of them: `make soak`."""

import pytest
from benchmarks.soak.exits import run


@pytest.mark.interpreted
def test_ten_thousand_mixed_exits_give_every_part_back_exactly_once():
    found = run(10_000, seed=3)
    assert found["exits"] >= 10_000
    ways = {
        "stop",
        "engine_error",
        "engine_gone",
        "timeout",
        "rejected",
        "refused",
        "client_gone",
        "shutdown",
    }
    assert ways <= set(found)
    assert {"pairs: ok", "pairs: decode-failed", "pairs: unfit-request", "pairs: kept"} <= set(found)
    assert {"refused: rejected-saturated", "refused: rejected-ttl-expired"} <= set(found)
