"""F29, F36-F38, F50: prefill on one endpoint, decode on another, as far as the router sees to it."""

import msgspec
import pytest
from pair_lab import FIELDS, NOTHING, begin, busy, crowd, decision, fleet, leave, load, prefilled
from routing_lab import BLOCK, Engine, Lab, prompt

from sumibi.routing.decisions import explain
from sumibi.routing.disagg import FALLBACK, PAIR, WHOLE
from sumibi.routing.events import Dispatch, EndpointDown, FinishReason, Role

WRITER = (1, 0, 0, 1)
"""The load of a decode endpoint where somebody else decodes."""


def paired(**config):
    """A pair `r` under way, on p and d."""
    lab = fleet(**config)
    busy(lab)
    assert begin(lab, "r", prompt("r", 2000)) == ("p", "d")
    return lab


def test_f29_a_prefill_and_a_decode_endpoint_have_states_of_their_own():
    """ray#58835: one tree for both kinds, and a KeyError when one evicts what only the other one has."""
    lab = Lab()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        lab.up(name, role=role, has_events=True, **FIELDS)
    tokens = prompt("shared", 800)
    both = {name: Engine(60) for name in ("p", "d")}
    for name, engine in both.items():
        engine.run(tokens)
        lab.batch(name, engine.publish())
    both["d"].run(prompt("other", 900))  # 57 blocks: 10 are free, 47 of the 50 go, the last ones first
    lab.batch("d", both["d"].publish())
    busy(lab)
    begin(lab, "r", tokens)
    assert [leg.matched_tokens for leg in decision(lab).legs] == [784]
    assert [c.matched_tokens for c in decision(lab).candidates if not c.prefill] == [3 * BLOCK]


def test_f36_a_pair_is_one_instruction_and_its_decode_waits_for_the_prefill_s_answer():
    """R#2438, R#2451: the decode leg leaves first and waits 15.8 s for KV that nobody computes yet."""
    lab = fleet()
    busy(lab)
    (sent,) = [i for i in lab.arrive("r", prompt("r", 2000)) if isinstance(i, Dispatch)]
    assert (sent.prefill, sent.endpoint, sent.attempt) == ("p", "d", 1)
    leave(lab, "r")
    _, _, coming, decoding = load(lab, "d")
    assert (coming, decoding) == (1, 1), "it does not decode beside the writer, it is expected"
    assert prefilled(lab, "r", dt=2.0, cached_tokens=0) == []
    assert load(lab, "d") == (2, 0, 0, 2)


def test_f36_after_a_prefill_that_failed_nobody_waits_for_its_kv():
    """R#2438, R#2451: decode goes on without the KV it was promised."""
    lab = paired()
    (again,) = [i for i in prefilled(lab, "r", failed=FinishReason.TIMEOUT) if isinstance(i, Dispatch)]
    assert (again.prefill, again.endpoint, again.attempt) == (None, "d", 2)
    assert load(lab, "d") == (2, 1, 0, 1), "it computes the prompt itself"


@pytest.mark.parametrize("after", ["arrival", "prefill", "first token"])
def test_f37_a_client_that_leaves_a_pair_leaves_no_load_on_either_side(after):
    """L#1138, sgl#13631, sgl#6531: a cancel between prefill and decode strands what was reserved."""
    lab = paired()
    if after != "arrival":
        prefilled(lab, "r", dt=2.0, cached_tokens=0)
    if after == "first token":
        lab.dispatched("r")
        lab.first("r", dt=0.1)
    lab.finish("r", FinishReason.CLIENT_GONE)
    assert (load(lab, "p"), load(lab, "d")) == (NOTHING, WRITER)
    prefilled(lab, "r")  # the prefill endpoint answers all the same
    assert (load(lab, "p"), load(lab, "d")) == (NOTHING, WRITER)
    assert lab.router.counters().requests_now == 1, "the writer"


def test_f37_a_decode_endpoint_that_dies_after_the_prefill_strands_nothing():
    """L#1138, sgl#13631, sgl#6531: it dies between the two: the request goes on from what is computed."""
    lab = fleet(decode=("d", "e"))
    busy(lab)
    p, died = begin(lab, "r", prompt("r", 2000))
    assert p == "p"
    prefilled(lab, "r", dt=2.0, cached_tokens=0)
    lab.tell(EndpointDown, endpoint=died, cause="test")
    lab.finish("r", FinishReason.ENGINE_GONE, answered=False)
    again = lab.attempts["r"]
    assert again.attempt == 2
    assert again.endpoint == ({"d", "e"} - {died}).pop()
    assert again.prefill == "p"
    assert decision(lab).picked.matched_tokens >= 1900, "the prompt is there"
    leave(lab, "r")
    prefilled(lab, "r", dt=0.1)
    lab.first("r", dt=0.2)
    lab.finish("r")
    assert (load(lab, "p"), load(lab, again.endpoint)) == (NOTHING, WRITER)


def test_f37_a_prefill_endpoint_that_dies_leaves_no_load_and_attracts_nobody():
    """L#1138, sgl#13631, sgl#6531: prefill dies: the other side holds a place for KV that never comes."""
    lab = paired()
    lab.tell(EndpointDown, endpoint="p", cause="test")
    prefilled(lab, "r", failed=FinishReason.ENGINE_GONE)
    assert (lab.attempts["r"].prefill, lab.attempts["r"].endpoint) == (None, "d")
    lab.dispatched("r")
    lab.first("r", dt=2.0)
    lab.finish("r")
    assert (load(lab, "d"), lab.router.counters().requests_now) == (WRITER, 1)
    assert begin(lab, "next", prompt("next", 2000)) == (None, "d")


def test_f38_a_congested_prefill_pool_is_passed_by_and_used_again():
    """sgl#15070: every request queues at prefill, though those who decode could compute it sooner."""
    lab = fleet()
    crowd(lab)
    made = {}
    for i in range(30):
        queued = sum(prefill is not None for prefill in made.values())
        made[f"r{i}"] = begin(lab, f"r{i}", prompt(i, 4000))[0]
        (leg,) = decision(lab).legs
        assert leg.wait_s == pytest.approx(queued * (0.01 + 4000 * 0.001)), "the queue is weighed"
    assert made["r0"] == "p"
    assert None in made.values()
    for request, prefill in made.items():
        if prefill:
            prefilled(lab, request, dt=4.0, cached_tokens=0)
        lab.first(request)
        lab.finish(request)
    assert load(lab, "p") == NOTHING
    assert begin(lab, "later", prompt("later", 4000))[0] == "p"


def test_f50_a_choice_of_a_pair_has_a_reason_and_its_predictions_stand_beside_what_came():
    """R#792, R#2380, R#2896, R#2897: why a pair or not is told nowhere, nor how wrong it was."""
    lab = fleet()
    assert begin(lab, "idle", prompt("idle", 1000)) == (None, "d")
    assert decision(lab).reason == "transfer", "nobody to hold up: a pair only costs its transfer"
    lab.first("idle", dt=1.0)
    assert begin(lab, "r", prompt("r", 1000)) == ("p", "d")
    said = msgspec.json.decode(explain(decision(lab)))
    assert said["reason"] == "delay", "a prefill there would hold up who decodes"
    prefilled(lab, "r", dt=1.0, cached_tokens=0)
    lab.dispatched("r")
    lab.first("r", dt=0.2)
    lab.finish("r", output_tokens=5, prompt_tokens=1000, cached_tokens=0)
    outcome = lab.router.outcomes()[-1]
    assert (outcome.prefill, outcome.endpoint) == ("p", "d")
    assert (outcome.predicted_cached_tokens, outcome.cached_tokens) == (0, 0)
    # by hand: 0.01 + 1,000 at 1 ms; 0.002 + 100 MB at 1 GB/s; a step of two sequences
    assert outcome.predicted_ttft_s == pytest.approx(1.01 + 0.102 + 0.022, rel=0.05)
    assert outcome.ttft_s == pytest.approx(1.2)
    begin(lab, "s", prompt("s", 1000))
    prefilled(lab, "s", failed=FinishReason.REFUSED)
    assert decision(lab).reason == FALLBACK
    assert lab.router.counters().disagg == {WHOLE: {"transfer": 1, FALLBACK: 1}, PAIR: {"delay": 2}}
