"""What counts as a hit at an endpoint whose queue will have evicted it."""

import pytest
from routing_lab import BLOCK, Engine, Lab, prompt

CAPACITY = 100
"""Blocks."""


def lab_with(first_blocks, *, events=False, **fields):
    """An endpoint that computed a prompt of so many blocks."""
    lab, engine = Lab(), Engine(CAPACITY)
    lab.up("e", kv_tokens=CAPACITY * BLOCK, has_events=events, **fields)
    token_ids = prompt("first", first_blocks * BLOCK)
    lab.run("first", token_ids)
    engine.run(token_ids)
    if events:
        lab.batch("e", engine.publish())
    return lab, token_ids


def matched_blocks(lab, token_ids):
    name = f"probe {len(lab.router.decisions(1000))}"
    lab.arrive(name, [*token_ids, 1])
    return lab.candidates(name)["e"].matched_tokens / BLOCK


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize(("queued_blocks", "left"), [(40, 60), (50, 50), (70, 30), (100, 0)])
def test_what_the_queue_evicts_before_its_turn_is_no_hit(events, queued_blocks, left):
    lab, token_ids = lab_with(60, events=events)
    lab.ask("queued", prompt("queued", queued_blocks * BLOCK))
    assert matched_blocks(lab, token_ids) == left


def test_what_is_younger_in_the_order_stays():
    lab, token_ids = lab_with(40)
    lab.run("other", prompt("other", 40 * BLOCK))
    lab.run("first again", token_ids)
    lab.ask("queued", prompt("queued", 30 * BLOCK))  # 10 of the other's have to go
    assert matched_blocks(lab, token_ids) == 40
    lab.finish("probe 4")
    assert matched_blocks(lab, prompt("other", 40 * BLOCK)) == 30


def test_what_waiting_requests_use_is_not_evicted():
    lab, token_ids = lab_with(60)
    lab.ask("goes on", token_ids + prompt("more", 5 * BLOCK))
    lab.ask("queued", prompt("queued", 70 * BLOCK))
    assert matched_blocks(lab, token_ids) == 60


def test_when_the_queue_has_been_computed_what_is_known_of_the_cache_counts_again():
    lab, token_ids = lab_with(60)
    lab.ask("queued", prompt("queued", 70 * BLOCK))
    assert matched_blocks(lab, token_ids) == 30
    lab.finish("probe 2")
    lab.first("queued")
    lab.finish("queued", cached_tokens=0)
    assert matched_blocks(lab, token_ids) == 30  # the same, by what was remembered


def test_an_endpoint_of_unknown_size_evicts_nothing():
    lab = Lab()
    lab.up("e")
    lab.run("first", prompt("first", 60 * BLOCK))
    lab.ask("queued", prompt("queued", 1000 * BLOCK))
    assert matched_blocks(lab, prompt("first", 60 * BLOCK)) == 60


def test_where_tiers_below_keep_what_the_device_evicts_it_is_a_hit():
    lab, token_ids = lab_with(60)
    # Pushed out of the device by other prompts, and found all the same: there is room below.
    for i in range(3):
        lab.run(f"other {i}", prompt(f"other {i}", 50 * BLOCK))
    assert matched_blocks(lab, token_ids) == 0
    lab.first("probe 4")
    lab.finish("probe 4", cached_tokens=60 * BLOCK)
    lab.ask("queued", prompt("queued", 70 * BLOCK))
    assert matched_blocks(lab, token_ids) == 60
