from policy_lab import candidate

from sumibi.routing.policies import SCORERS
from sumibi.routing.policies.base import least, ranks

FOUR = [candidate(name) for name in "abcd"]


def test_the_least_score_is_picked_and_ties_go_by_the_request_alone():
    assert least("r", [2.0, -1.0, 3.0]) == 1
    picks = [least(f"r{i}", [5.0, 1.0, 1.0, 1.0]) for i in range(300)]
    assert picks == [least(f"r{i}", [9.0, 0.0, 0.0, 0.0]) for i in range(300)]
    assert {picks.count(i) > 70 for i in (1, 2, 3)} == {True}
    assert 0 not in picks


def test_ranks_order_by_the_first_criterion_then_the_second():
    assert ranks([(1, 9), (0, 5), (1, 2), (0, 5)]) == [2.0, 0.0, 1.0, 0.0]


def test_random_is_even_and_a_function_of_the_request():
    def pick(i):
        return least(f"r{i}", SCORERS["random"](f"r{i}", 0, FOUR))

    picks = [pick(i) for i in range(4000)]
    assert picks == [least(f"r{i}", SCORERS["random"](f"r{i}", 7, FOUR)) for i in range(4000)]
    # 1,000 each is expected; 120 is more than four standard deviations (27) away.
    assert all(abs(picks.count(i) - 1000) < 120 for i in range(4))


def test_random_is_not_the_order_of_ties():
    ties = [least(f"r{i}", [0.0] * 4) for i in range(400)]
    drawn = [least(f"r{i}", SCORERS["random"](f"r{i}", 0, FOUR)) for i in range(400)]
    assert 60 < sum(a == b for a, b in zip(ties, drawn, strict=True)) < 140


def test_least_loaded_counts_requests_not_their_size():
    two_long, ten_short = candidate("a", inflight=2, prefill_tokens=200_000), candidate("b", inflight=10)
    assert SCORERS["least-loaded"]("r", 0, [two_long, ten_short]) == [0.0, 1.0]
