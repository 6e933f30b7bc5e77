"""Published directions at reduced size. Those that do not come out there are on the benchmark's page."""

import pytest

from sumibi.bench.directions import controls, w3, w4
from sumibi.bench.effects import Row, figures_of
from sumibi.bench.fetched import w12
from sumibi.bench.workloads.fetching import coding, documents


def test_host_memory_below_the_device_helps_w3():
    """Published: 43.67 -> 0.89 s and 115.6 -> 25.4 s of mean TTFT; 114,663 -> 300,749 tokens/s."""
    rows = list(w3(quick=True))
    assert [row.agrees for row in rows] == [True] * 3


def test_separate_pools_end_w4_sooner_and_begin_it_later():
    """Published: 25 -> 8 ms between tokens, 6.7 -> 3.5 s end to end, TTFT 0.53 -> 1.4 s."""
    rows = list(w4(quick=True))
    assert [row.agrees for row in rows] == [True] * 3


def test_fetching_from_peers_beats_computing_again():
    """W12, published: 2.80 -> 4.43 requests/s; 6.83 -> 1.09 s of median TTFT; 0.82 -> 1.24 requests/s."""
    rows = list(w12())
    assert [row.agrees for row in rows] == [True] * 3
    assert rows[0].before == pytest.approx(2.80, rel=0.4), "computing again is as slow as published"


def test_conversations_of_the_fetching_workloads_share_no_document():
    asked = documents(users=4, sessions=5)
    firsts = [session.turns[0] for session in asked.sessions]
    assert [(turn.prompt_tokens, turn.output_tokens) for turn in firsts] == [(49_408, 256)] * 5
    assert len({session.keys[0] for session in asked.sessions}) == 5
    assert [len(session.turns) for session in asked.sessions] == [6] * 5
    played = coding(sessions=200)
    prompts = [turn.prompt_tokens for session in played.sessions for turn in session.turns]
    assert sum(prompts) / len(prompts) == pytest.approx(61_900, rel=0.05)
    assert all(4 <= len(session.turns) <= 40 for session in played.sessions)


def test_where_pools_and_tiers_must_not_look_good_they_do_not():
    rows = list(controls(None, quick=True))
    assert len(rows) >= 5
    assert [row.what for row in rows if not row.agrees] == []


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
