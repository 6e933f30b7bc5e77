"""The sampler against textbook formulas written out in plain Python."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.engine.sampler import logprobs_of, mix64, sample
from sumibi.engine.sequence import SamplingParams, Sequence


def sequence(*, prompt=(1,), output=(), **params):
    tokens = [*prompt, *output]
    params = SamplingParams(max_tokens=100, **params)
    return Sequence(0, len(prompt), tokens, params, content_ids=[], root=b"")


def softmax(logits):
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def reference(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after temperature, top-k, top-p, min-p, in this order."""
    scores = [x / temperature for x in logits]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    kept = order[:top_k] if top_k else order
    nucleus, mass = [], 0.0
    for i, p in zip(kept, softmax([scores[i] for i in kept]), strict=True):
        if mass >= top_p and top_p < 1:
            break
        nucleus.append(i)
        mass += p
    best = softmax([scores[i] for i in nucleus])[0]
    final = [
        i for i, p in zip(nucleus, softmax([scores[i] for i in nucleus]), strict=True) if p >= min_p * best
    ]
    probabilities = dict(zip(final, softmax([scores[i] for i in final]), strict=True))
    return [probabilities.get(i, 0.0) for i in range(len(logits))]


def frequencies(logits, draws, **params):
    """How often each token is drawn, one seed a draw."""
    rows = torch.tensor([logits]).expand(draws, -1)
    drawn = sample(rows, [sequence(seed=seed, **params) for seed in range(draws)])
    counts = Counter(s.token for s in drawn)
    return [counts[i] for i in range(len(logits))]


LOGITS = [2.0, 0.5, -1.0, 1.5, 0.0, -3.0, 1.4, -0.2]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.9},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.15, "temperature": 1.3},
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_probability_says(params):
    draws = 10_000
    expected = reference(LOGITS, **params)
    seen = frequencies(LOGITS, draws, **params)
    assert all(count == 0 for count, p in zip(seen, expected, strict=True) if p == 0)
    # Pearson's chi-square with at most 7 degrees of freedom: beyond 37.3 with probability 4e-6.
    chi2 = sum((n - draws * p) ** 2 / (draws * p) for n, p in zip(seen, expected, strict=True) if p > 0)
    assert chi2 < 37.3


def test_draws_of_one_seed_at_different_positions_are_independent():
    logits = torch.zeros(4000, 2)
    first, second = (sample(logits, [sequence(seed=i, output=[0] * n) for i in range(4000)]) for n in (0, 1))
    pairs = Counter((a.token, b.token) for a, b in zip(first, second, strict=True))
    assert sum((n - 1000) ** 2 / 1000 for n in pairs.values()) < 27  # 3 degrees of freedom: 5e-6


def test_seeds_of_all_64_bits_count():
    logits = torch.zeros(1, 1000)
    seeds = [0, 1, 1 << 32, 1 << 63, (1 << 64) - 1]
    assert len({sample(logits, [sequence(seed=seed)])[0].token for seed in seeds}) == len(seeds)


def test_the_hash_is_splitmix64():
    # First outputs of the reference implementation for seed 1234567.
    gamma = 0x9E3779B97F4A7C15
    state = torch.tensor([((1234567 + gamma * i + (1 << 63)) % (1 << 64)) - (1 << 63) for i in (1, 2, 3)])
    unsigned = [x % (1 << 64) for x in mix64(state).tolist()]
    assert unsigned == [6457827717110365317, 3203168211198807973, 9817491932198370423]


mixed_params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "top_k": st.sampled_from([0, 5, 700]),
        "top_p": st.sampled_from([1.0, 0.9, 0.1]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=40, deadline=None)
@given(st.lists(mixed_params, min_size=2, max_size=6))
def test_a_row_gets_the_same_token_alone_and_in_any_company(rows):
    logits = torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(7)) * 2
    sequences = [sequence(prompt=[5], output=[3, 4, i], **params) for i, params in enumerate(rows)]
    together = [s.token for s in sample(logits, sequences)]
    alone = [sample(logits[i : i + 1], [s])[0].token for i, s in enumerate(sequences)]
    assert together == alone


def test_top_p_beyond_the_first_candidates_keeps_exactly_the_nucleus():
    logits = [math.log(1 + i % 97) for i in range(2000)]
    expected = reference(logits, top_p=0.7)
    nucleus = {i for i, p in enumerate(expected) if p > 0}
    assert len(nucleus) > 256  # more than the sampler looks at first
    rows = torch.tensor([logits]).expand(500, -1)
    drawn = {s.token for s in sample(rows, [sequence(seed=i, top_p=0.7) for i in range(500)])}
    ties = {i for i in range(2000) if logits[i] == min(logits[j] for j in nucleus)}
    assert drawn <= nucleus | ties


def test_greedy_takes_the_most_likely_and_leaves_the_logits_alone():
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    before = logits.clone()
    rows = [sequence(temperature=0.0), sequence(temperature=0.0, logit_bias={3: -100.0})]
    assert [s.token for s in sample(logits, rows)] == [0, 7]
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("params", "adjusted"),
    [
        ({"presence_penalty": 0.7}, [2.0, 0.5 - 0.7, -1.0 - 0.7, 1.5]),
        ({"frequency_penalty": 0.7}, [2.0, 0.5 - 2 * 0.7, -1.0 - 0.7, 1.5]),
        ({"repetition_penalty": 1.5}, [2.0 / 1.5, 0.5 / 1.5, -1.0 * 1.5, 1.5]),
        ({"logit_bias": {0: -1.0, 3: 0.5}}, [1.0, 0.5, -1.0, 2.0]),
    ],
    ids=str,
)
def test_penalties_and_bias_shift_the_logits_as_defined(params, adjusted):
    """Token 0 is in the prompt, 1 twice and 2 once in the output, 3 nowhere."""
    history = {"prompt": [0], "output": [1, 1, 2]}
    seen = frequencies([2.0, 0.5, -1.0, 1.5], 10_000, **history, **params)
    expected = softmax(adjusted)
    assert sum((n - 10_000 * p) ** 2 / (10_000 * p) for n, p in zip(seen, expected, strict=True)) < 27


def test_stop_tokens_cannot_be_chosen_before_min_tokens():
    logits = torch.tensor([[1.0, 9.0, 2.0]])
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": frozenset({1})}
    chosen = [sample(logits, [sequence(output=[0] * i, **params)])[0].token for i in range(4)]
    assert chosen == [2, 2, 1, 1]


def test_logprobs_are_of_the_models_own_distribution_whatever_the_sampling():
    logits = torch.tensor([LOGITS])
    (sampled,) = sample(logits, [sequence(temperature=0.3, top_k=1, logit_bias={4: 50.0}, logprobs=2)])
    expected = [math.log(p) for p in softmax(LOGITS)]
    assert sampled.token == 4
    assert sampled.logprob.logprob == pytest.approx(expected[4], abs=1e-5)
    assert sampled.logprob.rank == 5
    assert [token for token, _ in sampled.logprob.top] == [0, 3]
    assert [value for _, value in sampled.logprob.top] == pytest.approx([expected[0], expected[3]], abs=1e-5)


def test_logprobs_of_all_tokens_sum_to_one():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    (record,) = logprobs_of(logits, [3], top=50)
    assert math.fsum(math.exp(value) for _, value in record.top) == pytest.approx(1, abs=1e-5)
    assert record.top[record.rank - 1] == pytest.approx((3, record.logprob), abs=1e-6)
