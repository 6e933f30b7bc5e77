"""Requests through the router: placing, retries, refusals, reservations on every way out."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from routing_lab import BLOCK, MODEL, REPEATABLE, Lab, keys_of, prompt

from sumibi.core.errors import ConfigError, SumibiError
from sumibi.core.kvevents import BlockStored, EventBatch
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Dispatch,
    Dispatched,
    EndpointDown,
    EndpointSuspect,
    EndpointUp,
    EngineBatch,
    Finished,
    FinishReason,
    FirstToken,
    Grade,
    Moved,
    PromptGrade,
    Refuse,
    Signals,
    Tick,
    WakeAt,
)
from sumibi.routing.router import Router


def dispatches(instructions):
    return [i for i in instructions if isinstance(i, Dispatch)]


def refusals(instructions):
    return [(i.status, i.reason) for i in instructions if isinstance(i, Refuse)]


def lab_with(*names, **config):
    lab = Lab(**config)
    lab.up(*names)
    return lab


def test_a_request_is_placed_and_reserved_in_one_step():
    lab = lab_with("a")
    assert lab.ask("r", prompt("p", 100)) == "a"
    view = lab.view("a")
    assert (view.inflight, view.prefilling, view.prefill_tokens) == (1, 1, 100)
    lab.first("r")
    view = lab.view("a")
    assert (view.inflight, view.prefilling, view.decoding, view.prefill_tokens) == (1, 0, 1, 0)
    lab.finish("r")
    view = lab.view("a")
    assert (view.inflight, view.prefilling, view.decoding) == (0, 0, 0)


def test_requests_go_only_where_their_model_is_served():
    lab = Lab()
    lab.up("a", models=["m"])
    lab.up("b", models=["n", "n-adapter"])
    assert lab.ask("1", prompt(1, 50), model="n-adapter") == "b"
    assert lab.ask("2", prompt(2, 50)) == "a"
    assert lab.router.models() == ["m", "n", "n-adapter"]
    lab.up("b", models=["n"])
    assert lab.router.models() == ["m", "n"]


def test_a_request_goes_only_to_the_endpoints_that_it_names():
    lab = lab_with("a", "b", "c", wait_for_endpoint_s=0.0)
    lab.run("before", prompt("p", 160))  # "a" is where the prompt is
    assert lab.ask("any", prompt("p", 160)) == "a"
    assert lab.ask("not a", prompt("p", 160), only=["c", "b", "unknown"]) in ("b", "c")
    assert sorted(lab.candidates("not a")) == ["b", "c"]
    assert lab.ask("only c", prompt("p", 160), only=["c"]) == "c"
    assert dispatches(lab.finish("only c", FinishReason.REFUSED, answered=False)) == []  # nobody else may
    lab.ask("nobody", prompt("p", 160), only=[])
    assert refusals(lab.tell(Tick)) == [(503, "rejected-no-endpoints")]


def test_a_held_request_goes_only_to_the_endpoints_that_it_names():
    lab = Lab(hold_above_s=0.1)
    lab.up("a", "b", max_sequences=1)
    assert lab.ask("1", prompt(1, 16_000), only=["a"]) == "a"
    assert lab.ask("2", prompt(2, 160), only=["a"]) is None
    assert lab.ask("3", prompt(3, 160)) == "b"
    lab.finish("3", dt=0.1)
    assert "2" not in lab.attempts  # "b" is free
    lab.first("1", dt=0.1)
    lab.finish("1", dt=0.1)
    assert lab.attempts["2"].endpoint == "a"


def test_requests_that_nobody_follows_are_not_held():
    lab = Lab(hold_above_s=0.1)
    lab.up("a", max_sequences=1)
    assert lab.ask("1", prompt(1, 16_000)) == "a"
    assert lab.ask("2", prompt(2, 160)) is None
    assert lab.ask("3", prompt(3, 160), followed=False) == "a"


def test_where_a_proxy_went_by_itself_is_where_the_reservation_is():
    lab = lab_with("a", "b", "c")
    first = lab.ask("r", prompt("p", 160))
    served = "c" if first != "c" else "b"
    (again,) = dispatches(lab.tell(Moved, request="r", attempt=1, endpoint=served))
    assert (again.endpoint, again.attempt) == (served, 2)
    assert (lab.view(first).inflight, lab.view(served).inflight) == (0, 1)
    assert not lab.view(first).reachable
    lab.first("r")
    lab.finish("r")
    assert lab.view(served).inflight == 0
    assert [(o.endpoint, o.reason) for o in lab.router.outcomes()] == [
        (first, FinishReason.REFUSED),
        (served, FinishReason.STOP),
    ]


def test_a_request_that_went_to_an_unknown_endpoint_holds_nothing():
    lab = lab_with("a")
    lab.ask("r", prompt("p", 160))
    stale = lab.router.counters().stale_events
    lab.tell(Moved, request="r", attempt=1, endpoint="a")
    assert lab.router.counters().stale_events == stale + 1  # it is there already
    assert dispatches(lab.tell(Moved, request="r", attempt=1, endpoint="elsewhere")) == []
    assert lab.view("a").inflight == 0


ALIASES = [["old"], ["new", "old"], ["new"]]
"""Names of one model at three engines, in the order in which they come up."""


def test_all_names_of_a_model_share_the_key_name_and_block_size_of_the_one_known_first():
    lab = Lab()
    for number, aliases in enumerate(ALIASES):
        size = BLOCK * (number + 1)
        lab.up(f"e{number}", models=[*aliases, "adapter"], aliases=aliases, engine_block_tokens=size)
    router = lab.router
    assert [router.key_name(name) for name in ("old", "new", "adapter")] == ["old", "old", "adapter"]
    assert [router.block_tokens(name) for name in ("old", "new")] == [BLOCK, BLOCK]


def test_events_of_an_engine_count_for_every_name_of_its_model():
    lab = Lab()
    token_ids = prompt("p", 4 * BLOCK)
    for number, aliases in enumerate(ALIASES):
        lab.up(f"e{number}", models=aliases, aliases=aliases, has_events=True)
        blocks = BlockStored([1, 2, 3], None, token_ids[: 3 * BLOCK], BLOCK)
        batch = EventBatch(seq=0, ts=0.0, events=[blocks])
        lab.tell(EngineBatch, endpoint=f"e{number}", batch=batch, digest=1)
    for name, endpoints in (("old", ["e0", "e1"]), ("new", ["e1", "e2"])):
        lab.arrive(name, token_ids, model=name, keys=keys_of(token_ids, model="old"))
        matched = {e: c.matched_tokens for e, c in lab.candidates(name).items()}
        assert matched == dict.fromkeys(endpoints, 3 * BLOCK)


@pytest.mark.parametrize(
    ("sizes", "expected"), [([None, 24, 48], 24), ([8], 16), ([1], 16), ([12], 24), ([None], 32)]
)
def test_the_first_endpoint_that_names_a_block_size_fixes_the_model_s(sizes, expected):
    lab = Lab()
    for i, size in enumerate(sizes):
        lab.up(str(i), engine_block_tokens=size)
    assert lab.router.block_tokens(MODEL) == expected


# --- retries ---


@pytest.mark.parametrize("reason", [r for r in FinishReason if r.retriable])
def test_an_attempt_that_failed_before_any_answer_is_tried_elsewhere_once(reason):
    lab = lab_with("a", "b")
    first = lab.ask("r", prompt("p", 100))
    (again,) = dispatches(lab.finish("r", reason, answered=False))
    assert {first, again.endpoint} == {"a", "b"}
    assert again.attempt == 2
    assert lab.view(first).inflight == 0
    assert lab.view(again.endpoint).inflight == 1
    assert dispatches(lab.finish("r", reason, answered=False)) == []
    assert lab.router.counters().requests_now == 0
    assert lab.router.counters().retries == 1


@pytest.mark.parametrize(
    ("reason", "answered"),
    [(r, False) for r in FinishReason if not r.retriable] + [(FinishReason.ENGINE_GONE, True)],
)
def test_other_ends_are_final(reason, answered):
    lab = lab_with("a", "b")
    lab.ask("r", prompt("p", 100))
    assert dispatches(lab.finish("r", reason, answered=answered)) == []
    assert lab.router.counters().requests_now == 0


def test_without_another_endpoint_a_failed_attempt_is_final():
    lab = lab_with("a")
    lab.ask("r", prompt("p", 100))
    assert lab.finish("r", FinishReason.ENGINE_ERROR, answered=False) == []
    assert lab.router.counters().requests_now == 0


def test_an_endpoint_that_refused_gets_nothing_while_there_is_another():
    lab = lab_with("a", "b", "c")
    lab.ask("r", prompt("p", 100))
    refused = lab.attempts["r"].endpoint
    lab.finish("r", FinishReason.REFUSED, answered=False)
    taken = [lab.ask(str(i), prompt(i, 100)) for i in range(8)]
    assert refused not in taken
    lab.tell(Signals, endpoint=refused, scraped_t=lab.t)
    assert lab.ask("later", prompt("later", 100)) == refused


def test_unreachable_endpoints_are_better_than_none():
    lab = lab_with("a")
    lab.ask("r", prompt("p", 100))
    lab.finish("r", FinishReason.REFUSED, answered=False)
    assert lab.ask("again", prompt("p", 100)) == "a"


# --- waiting and refusing ---


def test_a_request_without_an_endpoint_waits_and_is_placed_when_one_comes_up():
    lab = lab_with("a")
    lab.tell(EndpointDown, endpoint="a", cause="health")
    instructions = lab.arrive("r", prompt("p", 100))
    assert instructions == [WakeAt(at=lab.t + 10.0)]
    assert lab.router.counters().waiting_now == 1
    (placed,) = dispatches(lab.up("a"))
    assert (placed.request, placed.endpoint, placed.attempt) == ("r", "a", 1)
    assert lab.router.counters().waiting_now == 0


def test_waiting_ends_at_its_deadline():
    lab = lab_with("a")
    lab.tell(EndpointDown, endpoint="a", cause="health")
    lab.arrive("r", prompt("p", 100))
    assert lab.tell(Tick, dt=9.9) == []
    assert refusals(lab.tell(Tick, dt=0.2)) == [(503, "rejected-no-endpoints")]
    assert dispatches(lab.up("a")) == []
    assert lab.router.counters().requests_now == 0


def test_the_waiting_room_is_bounded():
    lab = lab_with("a", max_waiting=2)
    lab.tell(EndpointDown, endpoint="a", cause="health")
    for i in range(2):
        lab.arrive(str(i), prompt(i, 100))
    assert refusals(lab.arrive("2", prompt(2, 100))) == [(429, "rejected-saturated")]
    assert lab.router.counters().refused == {"rejected-saturated": 1}


def test_known_requests_are_bounded():
    lab = lab_with("a", max_requests=1)
    lab.ask("0", prompt(0, 100))
    event = {"request": "1", "model": MODEL, "keys": [], "prompt_tokens": 5}
    assert refusals(lab.tell(Arrived, **event)) == [(429, "rejected-saturated")]


def test_a_client_that_leaves_while_waiting_leaves_nothing():
    lab = lab_with("a")
    lab.tell(EndpointDown, endpoint="a", cause="health")
    lab.arrive("r", prompt("p", 100))
    lab.finish("r", FinishReason.CLIENT_GONE, answered=False)
    assert lab.router.counters().waiting_now == 0
    assert dispatches(lab.up("a")) == []


# --- ledger and health (serving.md section 9) ---


def test_ledger_is_unchanged_by_health_transitions():
    """F8."""
    lab = lab_with("a")
    lab.ask("1", prompt(1, 100))
    lab.ask("2", prompt(2, 100))
    lab.first("1")
    before = lab.view("a")
    for _ in range(3):
        lab.tell(EndpointDown, endpoint="a", cause="health")
        lab.up("a")
    after = lab.view("a")
    assert (after.inflight, after.prefilling, after.decoding) == (before.inflight, 1, 1)
    assert after.prefill_tokens == 100


@pytest.mark.parametrize("when", ["arrived", "dispatched", "decoding", "retried"])
@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_way_out_leaves_the_ledger_at_zero(when, reason):
    """F10."""
    lab = lab_with("a", "b")
    if when == "arrived":
        lab.tell(Arrived, request="r", model=MODEL, keys=[], prompt_tokens=5)
    else:
        lab.ask("r", prompt("p", 100))
    if when == "decoding":
        lab.first("r")
    if when == "retried":
        lab.finish("r", FinishReason.ENGINE_ERROR, answered=False)
    lab.finish("r", reason, answered=True)
    for name in ("a", "b"):
        view = lab.view(name)
        assert (view.inflight, view.prefilling, view.decoding, view.prefill_tokens) == (0, 0, 0, 0)
    assert lab.router.counters().requests_now == 0


def test_a_reservation_lives_as_long_as_its_request():
    """F11: nothing reaps it, however long it takes."""
    lab = lab_with("a")
    lab.ask("r", prompt("p", 100))
    lab.tell(Tick, dt=3600.0)
    assert lab.view("a").inflight == 1


@pytest.mark.parametrize("flap", ["removed", "restarted"])
def test_a_late_release_of_an_old_life_is_ignored(flap):
    """F12: counters never go below zero and the new life's are its own."""
    lab = Lab()
    lab.up("a", process_start_s=1.0)
    lab.ask("old", prompt("old", 100))
    if flap == "removed":
        lab.tell(EndpointDown, endpoint="a", cause="scaled in", removed=True)
    lab.up("a", process_start_s=2.0)
    assert lab.view("a").inflight == 0
    lab.ask("new", prompt("new", 100))
    lab.first("old")
    lab.finish("old", FinishReason.ENGINE_GONE, answered=True)
    view = lab.view("a")
    assert (view.inflight, view.prefilling, view.decoding) == (1, 1, 0)
    assert view.reachable
    lab.finish("new")
    assert lab.view("a").inflight == 0


def test_frozen_metrics_do_not_halt_or_herd():
    """F13, F1: scrapes may be old or wrong; own reservations are what counts."""
    lab = lab_with("a", "b")
    lab.tell(Signals, endpoint="a", scraped_t=0.0, running=0, waiting=0)
    lab.tell(Signals, endpoint="b", scraped_t=0.0, running=0, waiting=0)
    lab.t = 900.0
    taken = [lab.ask(str(i), prompt(i, 500)) for i in range(20)]
    assert (taken.count("a"), taken.count("b")) == (10, 10)


@pytest.mark.parametrize("policy", ["cost", "round-robin", "least-loaded"])
def test_a_burst_of_equal_requests_spreads_evenly(policy):
    """F1."""
    names = [f"e{i}" for i in range(5)]
    lab = lab_with(*names, policy=policy)
    taken = [lab.ask(str(i), prompt(i, 300)) for i in range(32)]
    counts = [taken.count(name) for name in names]
    assert max(counts) - min(counts) <= 1


def test_cold_requests_respect_load():
    """F3: the endpoint that knows least is not the one to take what nobody knows."""
    lab = lab_with("a", "b")
    home = lab.run("1", prompt("known", 200))
    other = "b" if home == "a" else "a"
    for i in range(3):  # the other one is busy
        lab.tell(EndpointDown, endpoint=home, cause="for a moment")
        lab.ask(f"busy{i}", prompt(i, 1000))
        lab.up(home)
    assert lab.view(other).inflight == 3
    assert lab.ask("cold", prompt("cold", 200)) == home


def test_one_hot_endpoint_loses_traffic_and_the_others_keep_theirs():
    """F4."""
    lab = lab_with("a", "b", "c")
    homes = {}
    for i in range(3):
        homes[i] = lab.run(f"warm{i}", prompt(i, 2000))
    assert sorted(homes.values()) == ["a", "b", "c"]
    for i in range(8):
        lab.ask(f"hot{i}", prompt(0, 2000) + prompt(f"question{i}", 1500))
    for i in (1, 2):
        assert lab.ask(f"turn{i}", prompt(i, 2000) + prompt("next", 50)) == homes[i]


def test_work_counts_not_the_number_of_requests():
    """F6: two requests of 100k tokens outweigh ten of 100."""
    lab = lab_with("a", "b")
    lab.ask("long", prompt("long", 100_000))
    taken = [lab.ask(str(i), prompt(i, 100)) for i in range(10)]
    assert set(taken) == {"b" if lab.attempts["long"].endpoint == "a" else "a"}


def test_load_is_seen_from_the_decision_on():
    """F7: not from the response."""
    lab = lab_with("a", "b")
    first, second = (lab.arrive(str(i), prompt(i, 500)) for i in range(2))
    assert {dispatches(first)[0].endpoint, dispatches(second)[0].endpoint} == {"a", "b"}


def test_everybody_is_used_when_prompts_share_a_prefix():
    """F5: a shared system prompt pins nobody."""
    names = [f"e{i}" for i in range(4)]
    lab = lab_with(*names)
    shared = prompt("system", 30 * BLOCK)
    taken = [lab.ask(str(i), shared + prompt(i, 60 * BLOCK)) for i in range(40)]
    assert {taken.count(name) for name in names} == {10}


# --- what is known of prompts ---


def test_a_prompt_follows_its_prefix():
    lab = lab_with("a", "b")
    home = lab.run("1", prompt("agent", 1200))
    for turn in range(2, 6):
        longer = prompt("agent", 1200 + 100 * turn)
        assert lab.run(str(turn), longer) == home
    assert lab.candidates("5")[home].matched_tokens == (1200 + 400) // BLOCK * BLOCK


def test_a_hit_leaves_at_least_one_token_to_compute():
    lab = lab_with("a")
    lab.run("1", prompt("p", 4 * BLOCK))
    lab.ask("2", prompt("p", 4 * BLOCK))
    assert lab.candidates("2")["a"].matched_tokens == 3 * BLOCK


def test_a_prompt_being_computed_is_waited_for_and_is_no_hit():
    lab = lab_with("a", "b")
    home = lab.ask("1", prompt("p", 10 * BLOCK))
    other = "b" if home == "a" else "a"
    lab.tell(Tick, dt=0.05)
    lab.ask("2", [*prompt("p", 10 * BLOCK), 1])
    seen = lab.candidates("2")
    assert (seen[home].matched_tokens, seen[home].pending_tokens) == (0, 10 * BLOCK)
    assert seen[home].pending_s == pytest.approx(seen[home].wait_s)
    assert 0 < seen[home].pending_s < seen[other].compute_s
    assert (seen[other].matched_tokens, seen[other].pending_tokens) == (0, 0)


def test_pending_blocks_end_with_a_cancelled_request():
    lab = lab_with("a", "b")
    lab.ask("1", prompt("p", 10 * BLOCK))
    lab.finish("1", FinishReason.CLIENT_GONE, answered=False)
    lab.ask("2", [*prompt("p", 10 * BLOCK), 1])
    assert {c.pending_tokens for c in lab.candidates("2").values()} == {0}
    assert {c.matched_tokens for c in lab.candidates("2").values()} == {0}


def test_what_a_cancelled_request_had_computed_is_remembered():
    lab = lab_with("a", "b")
    home = lab.ask("1", prompt("p", 10 * BLOCK))
    lab.first("1")
    lab.finish("1", FinishReason.CLIENT_GONE, answered=True)
    lab.ask("2", [*prompt("p", 10 * BLOCK), 1])
    assert lab.candidates("2")[home].matched_tokens == 10 * BLOCK


def test_computed_blocks_count_until_their_events_come():
    lab = Lab()
    lab.up("a", has_events=True)
    lab.ask("1", prompt("p", 10 * BLOCK))
    lab.first("1")
    lab.ask("2", [*prompt("p", 10 * BLOCK), 1])
    seen = lab.candidates("2")["a"]
    assert (seen.pending_tokens, seen.pending_s) == (10 * BLOCK, 0.0)
    lab.finish("1", dt=0.1)
    lab.ask("3", [*prompt("p", 10 * BLOCK), 1])
    assert lab.candidates("3")["a"].pending_tokens == 10 * BLOCK
    lab.finish("2", FinishReason.CLIENT_GONE)
    lab.finish("3", FinishReason.CLIENT_GONE)
    lab.tell(Tick, dt=60.0)  # no event came: it was not so
    lab.ask("4", [*prompt("p", 10 * BLOCK), 1])
    assert lab.candidates("4")["a"].pending_tokens == 0


def test_a_name_of_a_request_that_is_used_again_does_not_keep_blocks_pending():
    """Clients choose names: the second `r` begins and ends while events of the first are still due."""
    lab = Lab(policy="round-robin")
    lab.up("a", "b", has_events=True)
    homes = []
    for name in ("p", "q"):
        homes.append(lab.ask("r", prompt(name, 10 * BLOCK)))
        lab.first("r")
        lab.finish("r", dt=0.1)
    assert homes == ["a", "b"]
    lab.tell(Tick, dt=60.0)
    for name in ("p", "q"):
        lab.ask("1" + name, [*prompt(name, 10 * BLOCK), 1])
        assert {c.pending_tokens for c in lab.candidates("1" + name).values()} == {0}


def test_usage_below_the_prediction_forgets_what_is_older_than_the_loss():
    lab = lab_with("a")
    for name in ("old", "lost", "young"):
        lab.run(name, prompt(name, 4 * BLOCK))
    lab.run("again", prompt("lost", 5 * BLOCK), cached_tokens=BLOCK)
    lab.ask("1", [*prompt("old", 4 * BLOCK), 1])
    lab.ask("2", [*prompt("young", 4 * BLOCK), 1])
    lab.ask("3", [*prompt("lost", 5 * BLOCK), 1])
    matched = [lab.candidates(r)["a"].matched_tokens for r in "123"]
    assert matched == [0, 4 * BLOCK, 5 * BLOCK]
    count = lab.router.counters()
    assert (count.predicted_cached_tokens, count.actual_cached_tokens) == (4 * BLOCK, BLOCK)


def test_remembered_prompts_fit_the_endpoint_s_cache():
    lab = Lab()
    lab.up("a", kv_tokens=10 * BLOCK)
    for i in range(6):
        lab.run(str(i), prompt(i, 4 * BLOCK))
    assert lab.view("a").blocks == 10
    assert lab.view("a").free_tokens == 0
    lab.ask("oldest", [*prompt(0, 4 * BLOCK), 1])
    lab.ask("newest", [*prompt(5, 4 * BLOCK), 1])
    assert lab.candidates("oldest")["a"].matched_tokens == 0
    assert lab.candidates("newest")["a"].matched_tokens == 4 * BLOCK


def test_a_prompt_without_exact_keys_is_remembered_where_events_tell_of_others_only():
    lab = Lab()
    lab.up("a", "b", has_events=True)
    keys = list(range(10))  # of byte chunks: no event will name them
    home = lab.ask("1", prompt("p", 160), keys=keys, prompt_grade=PromptGrade.APPROXIMATE)
    lab.first("1")
    lab.finish("1")
    assert lab.ask("2", prompt("p", 170), keys=keys, prompt_grade=PromptGrade.APPROXIMATE) == home
    assert lab.candidates("2")[home].matched_tokens == 160


def test_a_refused_connection_costs_an_endpoint_that_cannot_vouch_for_itself_its_blocks():
    lab = lab_with("a")
    lab.run("1", prompt("p", 4 * BLOCK))
    lab.ask("2", prompt("p", 5 * BLOCK))
    lab.finish("2", FinishReason.REFUSED, answered=False)
    lab.ask("3", prompt("p", 5 * BLOCK))
    assert lab.candidates("3")["a"].matched_tokens == 0
    assert lab.view("a").grade is Grade.APPROXIMATE


def test_a_suspect_with_a_known_start_is_trusted_again_by_the_same_start():
    lab = Lab()
    lab.up("a", process_start_s=1.0)
    lab.run("1", prompt("p", 4 * BLOCK))
    lab.tell(EndpointSuspect, endpoint="a", cause="?")
    lab.ask("2", prompt("p", 5 * BLOCK))
    assert lab.candidates("2")["a"].matched_tokens == 0
    assert lab.view("a").grade is Grade.NONE
    lab.tell(Signals, endpoint="a", scraped_t=lab.t, process_start_s=1.0)
    lab.ask("3", prompt("p", 5 * BLOCK))
    assert lab.candidates("3")["a"].matched_tokens == 4 * BLOCK
    lab.tell(Signals, endpoint="a", scraped_t=lab.t, process_start_s=7.0)
    lab.ask("4", prompt("p", 5 * BLOCK))
    assert lab.candidates("4")["a"].matched_tokens == 0
    assert lab.view("a").epoch == 2


# --- foreign load ---


def test_what_a_scrape_shows_beyond_our_own_requests_is_foreign_and_fades():
    lab = lab_with("a", "b", foreign_half_life_s=10.0)
    lab.ask("own", prompt("own", 100))
    lab.tell(Signals, endpoint="a", scraped_t=lab.t, running=3, waiting=2)
    own = 1 if lab.attempts["own"].endpoint == "a" else 0
    view = lab.view("a")
    assert view.foreign_running + view.foreign_waiting == 5 - own
    assert view.foreign_waiting == 2
    lab.tell(Tick, dt=10.0)
    view = lab.view("a")
    assert view.foreign_running + view.foreign_waiting == (5 - own) / 2


def test_a_request_that_ended_after_the_scrape_was_sent_is_not_foreign():
    lab = lab_with("a")
    lab.ask("own", prompt("own", 100))
    lab.finish("own", dt=1.0)
    lab.tell(Signals, dt=0.5, endpoint="a", scraped_t=0.5, running=1, waiting=0)
    assert lab.view("a").foreign_running == 0


def test_foreign_load_turns_requests_away():
    lab = lab_with("a", "b")
    lab.tell(Signals, endpoint="a", scraped_t=0.0, running=8, waiting=4)
    assert [lab.ask(str(i), prompt(i, 300)) for i in range(3)] == ["b", "b", "b"]


# --- time, chance, names ---


def test_an_endpoint_that_hangs_looks_worse_by_the_second():
    lab = lab_with("a", "b")
    stuck = lab.ask("1", prompt(1, 100))
    waits = []
    for _ in range(4):
        lab.tell(Tick, dt=1.0)
        waits.append(lab.view(stuck).wait_s)
    assert waits == sorted(waits)
    assert waits[-1] > 3.0


def test_time_that_goes_backwards_is_an_error():
    router = Router()
    router.handle(Tick(t=2.0))
    with pytest.raises(SumibiError, match="backwards"):
        router.handle(Tick(t=1.0))


def test_ties_are_broken_by_use_and_then_by_the_request_s_name_alone():
    picks = []
    for _ in range(2):
        lab = lab_with("a", "b", "c", "d")
        picks.append([lab.run(f"r{i}", prompt(i, 5)) for i in range(16)])
    assert picks[0] == picks[1]
    assert {picks[0].count(name) for name in "abcd"} == {4}


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"cost, round-robin, .*, session-sticky, .*, dynamo-kv"):
        Router(RouterConfig(policy="best"))


# --- every path at once ---

NAMES = ["a", "b", "c"]


class Requests(RuleBasedStateMachine):
    """Arrivals, retries, cancels, flaps, duplicates and late events in any order."""

    def __init__(self):
        super().__init__()
        self.lab = Lab(max_waiting=3, max_requests=12)
        self.known = []

    def tell(self, event_type, **fields):
        return self.lab.tell(event_type, dt=0.1, **fields)

    @rule(name=st.sampled_from(NAMES), start=st.sampled_from([None, 1.0, 2.0]), events=st.booleans())
    def up(self, name, start, events):
        self.tell(
            EndpointUp,
            endpoint=name,
            models=[MODEL],
            engine_block_tokens=BLOCK,
            kv_tokens=20 * BLOCK,
            max_sequences=2,
            process_start_s=start,
            has_events=events,
            has_replay=events,
        )

    @rule(name=st.sampled_from(NAMES), removed=st.booleans())
    def down(self, name, removed):
        self.tell(EndpointDown, endpoint=name, cause="test", removed=removed)

    @rule(name=st.sampled_from(NAMES))
    def suspect(self, name):
        self.tell(EndpointSuspect, endpoint=name, cause="test")

    @rule(name=st.sampled_from(NAMES), running=st.integers(0, 5), start=st.sampled_from([None, 1.0, 3.0]))
    def scrape(self, name, running, start):
        self.tell(
            Signals, endpoint=name, scraped_t=self.lab.t, running=running, waiting=1, process_start_s=start
        )

    @rule(
        which=st.integers(0, 5),
        tokens=st.integers(1, 100),
        stream=st.booleans(),
        only=st.sampled_from([None, None, NAMES[:1]]),
    )
    def arrive(self, which, tokens, stream, only):
        name = f"r{len(self.known)}"
        self.known.append(name)
        token_ids = prompt(which, tokens)
        self.tell(
            Arrived,
            request=name,
            model=MODEL,
            keys=keys_of(token_ids),
            prompt_tokens=tokens,
            stream=stream,
            max_tokens=10,
            only=only,
        )

    @rule(which=st.integers(0, 6), attempt=st.integers(1, 3), to=st.sampled_from([*NAMES, "unknown"]))
    def moved(self, which, attempt, to):
        self.tell(Moved, request=self.request(which), attempt=attempt, endpoint=to)

    def request(self, which):
        return self.known[-1 - which] if which < len(self.known) else "never seen"

    @rule(which=st.integers(0, 6))
    def admit(self, which):
        self.tell(Admitted, request=self.request(which))

    @rule(which=st.integers(0, 6), attempt=st.integers(0, 3))
    def dispatched(self, which, attempt):
        self.tell(Dispatched, request=self.request(which), attempt=attempt, endpoint="a")

    @rule(which=st.integers(0, 6), attempt=st.integers(1, 3))
    def first_token(self, which, attempt):
        self.tell(FirstToken, request=self.request(which), attempt=attempt)

    @rule(
        which=st.integers(0, 6),
        attempt=st.integers(0, 3),
        reason=st.sampled_from(FinishReason),
        answered=st.booleans(),
        usage=st.sampled_from([None, 0, 40]),
    )
    def finish(self, which, attempt, reason, answered, usage):
        self.tell(
            Finished,
            request=self.request(which),
            attempt=attempt,
            reason=reason,
            answered=answered,
            prompt_tokens=usage,
            cached_tokens=usage,
            output_tokens=usage,
        )

    @rule()
    def tick(self):
        self.lab.t += 10.0
        self.tell(Tick)

    @invariant()
    def nothing_is_below_zero(self):
        for view in self.lab.router.fleet_view():
            assert min(view.inflight, view.prefilling, view.decoding, view.prefill_tokens) >= 0
            assert view.wait_s >= 0

    def teardown(self):
        for name in self.known:
            for attempt in range(4):
                for _ in range(2):  # the second one is late
                    self.tell(
                        Finished,
                        request=name,
                        attempt=attempt,
                        reason=FinishReason.CLIENT_GONE,
                        answered=True,
                    )
        assert len(self.lab.router._ledger) == 0
        assert self.lab.router.counters().requests_now == 0
        for view in self.lab.router.fleet_view():
            assert (view.inflight, view.prefilling, view.decoding, view.prefill_tokens) == (0, 0, 0, 0)


Requests.TestCase.settings = settings(
    REPEATABLE, max_examples=120, stateful_step_count=60, suppress_health_check=list(HealthCheck)
)
TestNoReservationLeaksOnAnyPath = Requests.TestCase
