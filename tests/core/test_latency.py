"""The latency model: hand-computed values, and additivity of chunks."""

import pytest

from sumibi.core.latency import LatencyModel

MODEL = LatencyModel(a_s=0.5, b_s=0.01, q_s=0.001, d0_s=0.1, d1_s=0.02, d2_s=0.0001)


def test_prefill_by_hand():
    # 0.5 + 0.01*10 + 0.001*10*(4 + 5)
    assert MODEL.prefill_s(10, 4) == pytest.approx(0.69)
    assert MODEL.prefill_s(0) == pytest.approx(0.5)


def test_decode_by_hand():
    # 0.1 + 0.02*3 + 0.0001*3*200
    assert MODEL.decode_step_s(3, 200) == pytest.approx(0.22)


def test_a_prompt_in_two_chunks_costs_one_more_fixed_part_and_nothing_else():
    whole = MODEL.prefill_s(100)
    halves = MODEL.prefill_s(40, 0) + MODEL.prefill_s(60, 40)
    assert halves - whole == pytest.approx(MODEL.a_s)
