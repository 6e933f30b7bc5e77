"""Latency models learnt from engines that know their own true one."""

import random
from statistics import median

import pytest
from routing_lab import BLOCK, Lab, prompt

from sumibi.core.latency import CPU_CORE_135M, LatencyModel
from sumibi.routing.learning import FIXED_S, MOST, Hardware, Learner

TRUE = LatencyModel(a_s=0.03, b_s=1e-3, q_s=2e-7, d0_s=0.02, d1_s=2e-3, d2_s=1e-6)


def scaled(model, fixed, work, decode):
    return LatencyModel(
        a_s=model.a_s * fixed,
        b_s=model.b_s * work,
        q_s=model.q_s * work,
        d0_s=model.d0_s * decode,
        d1_s=model.d1_s * decode,
        d2_s=model.d2_s * decode,
    )


def serve(start, *, requests, speeds=(1.0,), rate=1.0, noise=0.15, seed=0, outliers=0.0):
    """Endpoints that prefill in order of arrival and decode beside. Returns lab and outcomes."""
    draw = random.Random(seed)
    lab = Lab(check=False, latency=start)
    names = [f"e{i}" for i in range(len(speeds))]
    lab.up(*names, kv_tokens=1_000_000)
    free_at = dict.fromkeys(names, 0.0)
    happenings, arrival = [], 0.0
    for i in range(requests):
        arrival += draw.expovariate(rate)
        happenings.append((arrival, i, "arrive", 0))
    tokens = [draw.choice([40, 200, 700, 1500]) for _ in range(requests)]
    while happenings:
        happenings.sort(reverse=True)
        lab.t, i, what, output = happenings.pop()
        name = f"r{i}"
        if what == "arrive":
            endpoint = lab.ask(name, prompt(i, tokens[i]))
            true_s = TRUE.prefill_s(tokens[i]) * speeds[names.index(endpoint)]
            true_s *= draw.uniform(1 - noise, 1 + noise) * (20 if draw.random() < outliers else 1)
            free_at[endpoint] = max(free_at[endpoint], lab.t) + true_s
            happenings.append((free_at[endpoint], i, "first", 0))
        elif what == "first":
            lab.first(name)
            output = draw.randint(5, 60)
            sequences = max(1, lab.view(lab.attempts[name].endpoint).decoding)
            step_s = TRUE.decode_step_s(sequences, tokens[i]) * draw.uniform(1 - noise, 1 + noise)
            happenings.append((lab.t + (output - 1) * step_s, i, "finish", output))
        else:
            lab.finish(name, output_tokens=output, cached_tokens=0)
    return lab, lab.router.outcomes(requests)


def ratio(outcomes):
    return median(o.predicted_ttft_s / o.ttft_s for o in outcomes)


@pytest.mark.parametrize("seed", range(6))
def test_ttft_is_predicted_within_a_quarter_after_200_requests_from_wrong_constants(seed):
    draw = random.Random(f"start {seed}")
    factors = [3 ** draw.uniform(-1, 1) for _ in range(3)]
    _, outcomes = serve(scaled(TRUE, *factors), requests=300, speeds=(1.0, 1.0), seed=seed)
    assert 0.8 <= ratio(outcomes[200:]) <= 1.25


@pytest.mark.parametrize("factor", [1 / 8, 8])
def test_a_start_wrong_by_the_whole_band_is_corrected(factor):
    lab, outcomes = serve(scaled(TRUE, factor, factor, factor), requests=300, seed=3)
    assert 0.8 <= ratio(outcomes[200:]) <= 1.25
    assert lab.view("e0").decode_factor == pytest.approx(1 / factor, rel=0.3)


def test_a_start_wrong_by_more_stays_within_the_band():
    lab, _ = serve(scaled(TRUE, 50, 50, 50), requests=200, seed=4)
    view = lab.view("e0")
    assert min(view.fixed_factor, view.work_factor, view.decode_factor) == pytest.approx(1 / 8)


def test_outliers_hardly_move_the_prediction():
    _, outcomes = serve(TRUE, requests=300, seed=5, outliers=0.05, rate=0.3)
    assert 0.8 <= ratio(outcomes[200:]) <= 1.25


def test_endpoints_of_different_speed_are_told_apart():
    lab, _ = serve(TRUE, requests=300, speeds=(1.0, 2.0), seed=6, rate=1.0)
    fast, slow = lab.view("e0").work_factor, lab.view("e1").work_factor
    assert slow / fast == pytest.approx(2.0, rel=0.3)


def test_an_endpoint_without_requests_takes_over_what_its_like_have_learnt():
    shared = Hardware(TRUE)
    taught, untaught = Learner(TRUE, shared), Learner(TRUE, shared)
    other = Learner(CPU_CORE_135M, Hardware(CPU_CORE_135M))
    for _ in range(20):
        taught.observe_prefill(4 * TRUE.prefill_s(1000), 1, TRUE.prefill_s(1000) - TRUE.a_s)
    assert untaught.model.prefill_s(1000) == pytest.approx(4 * TRUE.prefill_s(1000), rel=0.25)
    assert other.model == CPU_CORE_135M


SIZES = (5, 20, 500, 2000)


def teach(learner, truth, overhead_s, draw, *, noise=0.0, prefills=(1,), tokens=SIZES, times=1.0):
    """One busy period of an engine with this truth: overhead once, and prefills one after another."""
    sizes = [draw.choice(tokens) for _ in range(draw.choice(prefills))]
    actual_s = overhead_s + sum(truth.prefill_s(each) for each in sizes)
    actual_s *= draw.uniform(1 - noise, 1 + noise) * times
    start = learner.start
    learner.observe_prefill(actual_s, len(sizes), sum(start.prefill_s(each) - start.a_s for each in sizes))


def taught(truth, overhead_s, periods, *, start=TRUE, seed=7, **what):
    """A learner after so many busy periods."""
    learner, draw = Learner(start, Hardware(start)), random.Random(seed)
    for _ in range(periods):
        teach(learner, truth, overhead_s, draw, **what)
    return learner


def test_fixed_cost_and_work_are_told_apart_by_short_and_long_prompts():
    learner = taught(scaled(TRUE, 4.0, 0.5, 1.0), 0.0, 400)
    # One prefill at a time does not tell what of the fixed time passes once and what with each prefill.
    assert learner.overhead_s + TRUE.a_s * learner.fixed_factor == pytest.approx(0.12, rel=0.1)
    assert learner.work_factor == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_the_overhead_is_told_apart_by_periods_of_several_prefills(seed):
    """It passes once a period, the fixed cost with each prefill."""
    truth = scaled(TRUE, 4.0, 0.5, 1.0)
    learner = taught(truth, 0.1, 300, seed=seed, noise=0.15, prefills=(1, 2, 4, 8))
    assert learner.overhead_s == pytest.approx(0.1, rel=0.15)
    assert learner.fixed_factor == pytest.approx(4.0, rel=0.15)
    assert learner.work_factor == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize("fixed", [1 / 3, 1, 3])
@pytest.mark.parametrize("work", [1 / 3, 1, 3])
def test_a_start_wrong_by_three_in_either_is_right_for_any_period_in_the_end(fixed, work):
    start = scaled(TRUE, fixed, work, 1.0)
    learner = taught(TRUE, 0.05, 200, start=start, noise=0.15, prefills=(1, 2, 4))
    for prefills in (1, 4):
        for tokens in (20, 500, 4000):
            predicted_s = learner.overhead_s + prefills * learner.model.prefill_s(tokens)
            assert predicted_s == pytest.approx(0.05 + prefills * TRUE.prefill_s(tokens), rel=0.1)


def predicted(learner, tokens=1000):
    return learner.overhead_s + learner.model.prefill_s(tokens)


def test_an_outlier_of_twenty_times_hardly_counts():
    draw, usual = random.Random(1), {"noise": 0.15, "prefills": (1, 2, 4)}
    learner = taught(TRUE, 0.05, 200, **usual)
    before_s = predicted(learner)
    teach(learner, TRUE, 0.05, draw, tokens=(1000,), times=20.0)
    assert predicted(learner) <= 1.15 * before_s
    for _ in range(40):
        teach(learner, TRUE, 0.05, draw, **usual)
    assert predicted(learner) == pytest.approx(before_s, rel=0.1)


def test_one_slow_endpoint_of_eight_is_told_apart_and_bends_nobody_else():
    shared, draw = Hardware(TRUE), random.Random(2)
    learners = [Learner(TRUE, shared) for _ in range(8)]
    slow = learners[5]
    for _ in range(150):
        for learner in learners:
            truth = scaled(TRUE, 3.0, 3.0, 1.0) if learner is slow else TRUE
            teach(learner, truth, 0.05, draw, noise=0.15, prefills=(1, 2, 4))
    assert slow.work_factor == pytest.approx(3.0, rel=0.15)
    assert predicted(slow) == pytest.approx(0.05 + 3 * TRUE.prefill_s(1000), rel=0.15)
    for learner in learners:
        if learner is not slow:
            assert predicted(learner) == pytest.approx(0.05 + TRUE.prefill_s(1000), rel=0.15)


def test_it_follows_hardware_that_becomes_slower():
    draw, usual = random.Random(3), {"noise": 0.15, "prefills": (1, 2, 4)}
    learner, slower = taught(TRUE, 0.05, 300, **usual), scaled(TRUE, 2.0, 2.0, 1.0)
    for _ in range(60):
        teach(learner, slower, 0.05, draw, **usual)
    assert predicted(learner) == pytest.approx(0.05 + slower.prefill_s(1000), rel=0.15)


def test_the_fixed_cost_may_leave_the_band_up_to_half_a_second():
    """Starts of fast engines are a few milliseconds; what stands around them may take far more."""
    start, truth = scaled(TRUE, 1 / 3, 1.0, 1.0), scaled(TRUE, 5.0, 1.0, 1.0)  # 10 ms, 150 ms
    learner = taught(truth, 0.0, 400, start=start, noise=0.1, prefills=(1, 2, 4, 8), tokens=(20, 100, 500))
    assert MOST * start.a_s < learner.model.a_s < FIXED_S
    for prefills in (1, 8):
        predicted_s = learner.overhead_s + prefills * learner.model.prefill_s(100)
        assert predicted_s == pytest.approx(prefills * truth.prefill_s(100), rel=0.15)
    # Whatever is said, no further.
    for _ in range(400):
        learner.observe_prefill(40.0, 8, 0.0)
    assert FIXED_S / 2 < learner.model.a_s <= FIXED_S * 1.001
    assert learner.overhead_s <= FIXED_S


def test_work_is_learnt_whatever_order_the_engine_serves_in():
    """A short prompt that overtakes a long one must not make prefills look cheap."""
    lab = Lab(check=False, latency=TRUE)
    lab.up("e")
    long_s, short_s = TRUE.prefill_s(5000), TRUE.prefill_s(100)
    for i in range(40):
        lab.ask(f"long{i}", prompt(f"long{i}", 5000))
        lab.t += 0.1
        lab.ask(f"short{i}", prompt(f"short{i}", 100))
        lab.first(f"short{i}", dt=short_s)
        lab.first(f"long{i}", dt=long_s - 0.1)
        lab.finish(f"short{i}")
        lab.finish(f"long{i}")
        lab.t += 1.0
    assert lab.view("e").work_factor == pytest.approx(1.0, rel=0.1)


def test_an_aborted_prefill_teaches_nothing():
    lab = Lab(latency=TRUE)
    lab.up("e")
    lab.ask("1", prompt(1, 1000))
    lab.ask("2", prompt(2, 1000))
    lab.finish("1", dt=0.01)
    lab.first("2", dt=30.0)
    view = lab.view("e")
    assert (view.fixed_factor, view.work_factor) == (1.0, 1.0)


def test_requests_that_do_not_stream_teach_nothing_about_prefills():
    lab = Lab(latency=TRUE)
    lab.up("e")
    lab.ask("1", prompt(1, 1000), stream=False)
    lab.first("1", dt=50.0)
    lab.finish("1", output_tokens=500)
    assert lab.view("e").work_factor == 1.0
    assert lab.router.outcomes(1)[0].ttft_s is None


def test_the_usual_length_of_answers_is_learnt():
    lab = Lab()
    lab.up("e")
    for i in range(60):
        lab.run(str(i), prompt(i, BLOCK), output_tokens=900)
    assert lab.router._fleet.models["m"].output_tokens == pytest.approx(900, rel=0.05)
