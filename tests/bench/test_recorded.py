"""A recording against the simulation it came from: there, and only there, the truth is known."""

from array import array
from io import BytesIO
from random import Random

import msgspec
import pytest

from sumibi.bench.recorded import (
    Recording,
    by_steps,
    differing,
    fleet,
    simulated,
    token_hit_rate,
    ttft_p50_s,
)
from sumibi.bench.traces import read
from sumibi.core.errors import BadRequest
from sumibi.core.keys import DEFAULT_BLOCK_TOKENS
from sumibi.core.latency import LatencyModel
from sumibi.sim import simulate
from sumibi.sim.fleet import FleetSpec, Group
from sumibi.sim.workload import Session, Turn, Workload

TRUTH = LatencyModel(a_s=0.04, b_s=1.8e-3, q_s=3e-7, d0_s=0.04, d1_s=3e-3, d2_s=3e-6)
FLEET = FleetSpec(
    name="truth",
    groups=[Group(name="m", count=2, latency=TRUTH, kv_tokens=7200, chunk_tokens=256, max_sequences=64)],
    overhead_s=0.03,
)


def conversations(users: int = 8, turns: int = 12) -> Workload:
    """Each begins with 1,280 tokens, and every turn adds 96."""
    draw, block = Random(3), DEFAULT_BLOCK_TOKENS
    workload = Workload("conversations", block)
    for user in range(users):
        session = Session(f"u{user}", list(range(user * 1000 + 1, user * 1000 + 200)), [], start_s=3.0 * user)
        for turn in range(turns):
            tokens = 1280 + 96 * turn
            session.turns.append(
                Turn(
                    blocks=array("I", range(tokens // block)),
                    prompt_tokens=tokens,
                    output_tokens=16,
                    after=turn - 1 if turn else None,
                    delay_s=draw.uniform(0, 14),
                )
            )
        workload.sessions.append(session)
    return workload


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    log = BytesIO()
    run = simulate(conversations(), FLEET, seed=5, log=log)
    path = tmp_path_factory.mktemp("recorded") / "events.jsonl"
    path.write_bytes(log.getvalue())
    return run, path


def test_how_requests_fared_is_read_from_the_log(played):
    run, path = played
    found = Recording.read(path.read_bytes().splitlines()).fared()
    assert len(found) == 96
    assert ttft_p50_s(found) == pytest.approx(run.summary.ttft_p50_s, abs=1e-12)
    assert token_hit_rate(found) == pytest.approx(run.summary.token_hit_rate, abs=1e-12)
    assert [one.arrival_s for one in found] == sorted(one.arrival_s for one in found)


def test_a_decision_that_differs_in_its_last_bit_is_counted(played):
    _, path = played
    made = Recording.read(path.read_bytes().splitlines()).decisions()
    lines = [msgspec.json.encode(one) for one in made]
    assert differing(made, lines) == (96, 0)
    picked = made[7].candidates[0]
    odd = msgspec.structs.replace(picked, total_s=picked.total_s + 2**-50)
    changed = msgspec.structs.replace(made[7], candidates=[odd, *made[7].candidates[1:]])
    lines[7] = msgspec.json.encode(changed)
    assert differing(made, lines) == (96, 1)
    assert differing(made, lines[:-1]) == (95, 2)


def test_a_run_is_predicted_from_its_first_third(played):
    """With engines and constants as wrong as in any other run: noise of 15 %, a router that began off by up
    to 3."""
    _, path = played
    recording, workload = Recording.read(path.read_bytes().splitlines()), read(path)
    learnt = recording.learnt(32)
    found = fleet(learnt, chunk_tokens=256, max_sequences=64)
    assert [group.kv_tokens for group in found.groups] == [7200, 7200]
    run = simulate(workload, found, config=recording.config, wrong_constants=False, noise=0.0)
    then, now = recording.fared()[32:], simulated(workload, run)[32:]
    assert ttft_p50_s(now) == pytest.approx(ttft_p50_s(then), rel=0.25)
    assert token_hit_rate(now) == pytest.approx(token_hit_rate(then), rel=0.25)


def test_what_is_learnt_later_is_not_known_before(played):
    _, path = played
    recording = Recording.read(path.read_bytes().splitlines())
    before, after = recording.learnt(0), recording.learnt(96)
    assert {one.work_factor for one in before} == {1.0}
    assert all(one.work_factor != 1.0 for one in after)


def test_the_weights_are_read_once_a_step():
    """A prefill of 1,152 tokens (4.5 steps, which are 5) takes a router's 0.1 + 1,152 * 2 ms = 2.404 s; so do
    5 steps of 0.04 s, 1,152 * (2 ms - 0.04 s / 256) = 2.124 s of work in them and 0.08 s beside them."""
    learnt = LatencyModel(a_s=0.1, b_s=2e-3, q_s=0.0, d0_s=0.04, d1_s=0.0, d2_s=0.0)
    steps, beside_s = by_steps(learnt, 256)
    assert beside_s == pytest.approx(0.08)
    assert steps.b_s * 1152 == pytest.approx(2.124)
    assert beside_s + 5 * steps.a_s + 1152 * steps.b_s == pytest.approx(2.404)


@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "empty"), ([b"{}"], "no record"), ([b'{"type":"Tick","t":1.0}'], "the beginning of the run")],
)
def test_what_is_no_recording_of_one_run_is_refused(lines, message):
    with pytest.raises(BadRequest, match=message):
        Recording.read(lines)
