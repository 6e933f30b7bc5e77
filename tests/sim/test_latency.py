"""Step times against the measured points and bands that they stand for."""

import itertools

import pytest

from sumibi.core.errors import ConfigError
from sumibi.core.latency import LatencyModel
from sumibi.sim.latency import TABLE, StepTimes, named


@pytest.mark.parametrize(
    ("name", "new", "cached", "ms"),
    [
        ("llama-3.1-8b/1xh100", 512, 0, 12.0),
        ("llama-3.1-8b/1xh100", 16384, 0, 440.0),
        ("llama-3.1-8b/1xh100", 2048, 129024, 254.8),
        ("llama-3.1-70b/4xh100", 8192, 0, 577.0),
        ("llama-3.1-70b/4xh100", 2048, 30720, 192.0),
        ("llama-3.1-70b/4xh100", 2048, 129024, 394.0),
        ("qwen3-32b/2xh100", 32768, 0, 2503.0),
        ("qwen3-32b/2xh100", 2048, 129024, 534.0),
        ("glm-5.2/8xh200", 65536, 0, 7367.0),
        ("glm-5.2/8xh200", 2048, 30720, 269.0),
        ("glm-5.2/8xh200", 2048, 129024, 336.0),
        ("qwen3-30b-a3b/1xh200", 8192, 0, 138.4),
        ("qwen3-30b-a3b/1xh200", 2048, 63488, 200.3),
    ],
)
def test_measured_prefills_are_met(name, new, cached, ms):
    times = named(name)
    assert times.step_s(times.chunk_s(new, cached), 0, 0) == pytest.approx(ms * 1e-3)


@pytest.mark.parametrize(
    ("batch", "context", "ms"),
    [
        (1, 1024, 10.5),
        (32, 1024, 29.6),
        (128, 1024, 41.1),
        (32, 8192, 31.1),
        (128, 8192, 48.4),
        (1, 32768, 11.0),
        (32, 32768, 35.1),
        (128, 32768, 69.0),
    ],
)
def test_measured_steps_of_a_mixture_of_experts_are_met(batch, context, ms):
    step_s, growth_s = named("glm-5.2/8xh200").decode_line(batch, batch * context)
    assert step_s == pytest.approx(ms * 1e-3)
    later_s, _ = named("glm-5.2/8xh200").decode_line(batch, batch * (context + 100))
    assert later_s == pytest.approx(step_s + 100 * growth_s, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "batch", "context", "ms"),
    [
        ("gpt-oss-120b/1xh200", 16, 1024, 11.39),
        ("gpt-oss-120b/1xh200", 128, 8192, 33.31),
        ("gpt-oss-120b/4xh200", 32, 32768, 7.92),
        ("qwen3-30b-a3b/1xh200", 8, 65536, 19.80),
        # Between the points that the table has.
        ("gpt-oss-120b/1xh200", 24, 5120, 13.76),
        ("gpt-oss-120b/4xh200", 96, 8192, 9.82),
    ],
)
def test_measured_steps_of_small_mixtures_are_met(name, batch, context, ms):
    step_s, _ = named(name).decode_line(batch, batch * context)
    assert step_s == pytest.approx(ms * 1e-3, rel=0.03)


@pytest.mark.parametrize(
    ("tokens", "published_s"), [(8_192, 0.250), (16_384, 0.510), (32_768, 1.173), (49_152, 1.988)]
)
def test_gpt_oss_recomputes_in_the_published_time(tokens, published_s):
    """With the fleet's 15 ms a request."""
    assert 0.015 + named("gpt-oss-120b/1xh200").alone_s(tokens) == pytest.approx(published_s, rel=0.07)


@pytest.mark.parametrize(("batch", "ms"), [(1, 13.7), (32, 25.6), (64, 37.7), (128, 60.6)])
def test_measured_dense_steps_are_met_within_two_percent(batch, ms):
    step_s, _ = named("qwen3-32b/2xh100").decode_line(batch, batch * 8192)
    assert step_s == pytest.approx(ms * 1e-3, rel=0.02)


def test_experts_make_the_first_sequences_dear_and_the_later_ones_cheap():
    times = named("glm-5.2/8xh200")
    steps = [times.decode_line(b, b * 1024)[0] for b in range(1, 257)]
    growth = [b - a for a, b in itertools.pairwise(steps)]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(growth))
    assert growth[0] > 10 * growth[150] > 0


def test_a_prefill_of_45k_tokens_in_chunks_is_what_was_measured_in_service():
    # Published for GLM-5.2: about 5.7 s.
    assert named("glm-5.2/8xh200").alone_s(45_000) == pytest.approx(5.7, rel=0.05)


def test_a_chunk_on_a_long_context_stalls_decodes_for_the_published_time():
    times = named("qwen3-32b/2xh200")
    assert times.step_s(times.chunk_s(8192, 32768), 1, 32768) == pytest.approx(0.97, rel=0.02)
    h100 = named("qwen3-32b/2xh100")
    assert h100.step_s(h100.chunk_s(8192, 32768), 1, 32768) == pytest.approx(0.89, rel=0.05)
    assert h100.step_s(h100.chunk_s(2048, 32768), 1, 32768) == pytest.approx(0.23, rel=0.06)


def test_bands():
    assert 0.020 <= named("llama-3.1-8b/1xh100").alone_s(1_000) + 0.015 <= 0.060
    assert 0.200 <= named("llama-3.1-8b/1xh100").alone_s(8_192) + 0.015 <= 0.450
    assert 0.58 <= named("llama-3.1-70b/4xh100").alone_s(8_192) + 0.015 <= 1.3
    for batch in (1, 8):
        assert 0.006 <= named("llama-3.1-8b/1xh100").decode_line(batch, batch * 4096)[0] <= 0.015
        assert 0.015 <= named("llama-3.1-70b/4xh100").decode_line(batch, batch * 4096)[0] <= 0.040


@pytest.mark.parametrize("name", TABLE)
def test_everything_takes_longer_with_more_work(name):
    times = TABLE[name]
    work = [times.chunk_s(n, 0) for n in (1, 100, 512, 2048, 5000, 8192, 40_000, 200_000)]
    assert work == sorted(work)
    after = [times.chunk_s(2048, c) for c in (0, 1_000, 30_720, 100_000, 500_000)]
    assert after == sorted(after)
    steps = [times.decode_line(b, b * c)[0] for b, c in ((1, 100), (1, 10_000), (8, 10_000), (64, 20_000))]
    assert steps == sorted(steps)
    for chunk_s in (0.0, 0.5):
        mixed = [times.step_s(chunk_s, b, b * 10_000) for b in (0, 1, 8, 64)]
        assert mixed == sorted(mixed)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("new_tokens", [1, 16, 200, 2048])
@pytest.mark.parametrize("sequences", [1, 8, 32, 100])
def test_a_step_with_a_chunk_is_no_shorter_than_one_without(name, new_tokens, sequences):
    times, context = TABLE[name], 4000 * sequences
    alone_s, _ = times.decode_line(sequences, context)
    assert times.step_s(times.chunk_s(new_tokens, 0), sequences, context) >= alone_s


def test_weights_are_read_once_in_a_mixed_step():
    model = LatencyModel(a_s=0.004, b_s=5e-5, q_s=1.6e-9, d0_s=0.0136, d1_s=2.6e-5, d2_s=4.2e-8)
    times = StepTimes(model)
    chunk_s = 1000 * 5e-5 + 1.6e-9 * 1000 * (200 + 500)
    assert times.chunk_s(1000, 200) == pytest.approx(chunk_s)
    assert times.step_s(chunk_s, 10, 5_000) == pytest.approx(0.0136 + chunk_s + 10 * 2.6e-5 + 4.2e-8 * 5_000)
    assert times.step_s(chunk_s, 0, 0) == pytest.approx(0.004 + chunk_s)
    assert times.step_s(0.0, 0, 0) == 0.0136


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="qwen3-32b/2xh100"):
        named("qwen/h100")
