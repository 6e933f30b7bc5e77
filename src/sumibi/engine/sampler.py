"""The sampler: from logits to tokens, one row a sequence.

Order, as in transformers: penalties and bias, temperature, top-k, top-p, min-p, draw. Log-probabilities
are of the logits as the model gave them.

Chance is a function, not a state: the noise of a token is a hash of (seed, position in the output, token
id). So a request's draws do not depend on what else is in the batch, survive preemption, and need no
generator to be kept. The draw takes the argmax of `logit + Gumbel noise`, which is an exact sample
(Gumbel 1954; Maddison et al., "A* Sampling", 2014) and, other than inverting a cumulative sum, changes
its mind under rounding errors only where two candidates are nearly level.

Sorting a vocabulary costs as much as a decode step of a small model, so top-p looks at the most likely
`CANDIDATES` tokens first, and at more only if those do not hold the wanted probability.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sumibi.engine.sequence import SamplingParams, Sequence, TokenLogprob

CANDIDATES = 256
"""Tokens that top-p looks at first."""

# SplitMix64 (Steele, Lea, Flood 2014): its increment and the two multipliers of its output function, as
# the signed 64-bit integers that torch has.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token with what was asked for about it."""

    token: int
    logprob: TokenLogprob | None = None


def sample(logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """Choose one token for each sequence. `logits` is float32 [len(sequences), vocabulary]; not changed."""
    adjusted = [row for row, sequence in enumerate(sequences) if sequence.params.adjusts_logits]
    scores = logits.clone() if adjusted else logits
    for row in adjusted:
        _adjust(scores[row], sequences[row])
    tokens = scores.argmax(dim=-1)
    random = [row for row, sequence in enumerate(sequences) if sequence.params.temperature > 0]
    if random:
        tokens[random] = _draw(scores[random], [sequences[row] for row in random])
    chosen: list[int] = tokens.tolist()
    reported = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    result = [Sampled(token) for token in chosen]
    if reported:
        counts = [sequences[row].params.logprobs or 0 for row in reported]
        records = logprobs_of(logits[reported], [chosen[row] for row in reported], max(counts))
        for row, record, count in zip(reported, records, counts, strict=True):
            trimmed = TokenLogprob(record.token, record.logprob, record.rank, record.top[:count])
            result[row] = Sampled(chosen[row], trimmed)
    return result


def logprobs_of(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """Log-probability and rank of `tokens[i]` under row i of `logits`, with the `top` most likely tokens."""
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    wanted = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    own = logits.gather(1, wanted)
    ranks = (logits > own).sum(dim=-1) + 1
    values, ids = logits.topk(min(top, logits.shape[1]), dim=-1)
    rows = zip(
        tokens,
        (own - normaliser).squeeze(1).tolist(),
        ranks.tolist(),
        ids.tolist(),
        (values - normaliser).tolist(),
        strict=True,
    )
    return [
        TokenLogprob(token, logprob, rank, tuple(zip(row_ids, row_values, strict=True)))
        for token, logprob, rank, row_ids, row_values in rows
    ]


def _adjust(row: Tensor, sequence: Sequence) -> None:
    """Penalties, bias and the ban on stop tokens, in place.

    Presence and frequency as OpenAI's API documents them (over the output); repetition as Keskar et al.
    2019 ("CTRL") and transformers do it (over prompt and output).
    """
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    output = sequence.tokens[sequence.prompt_tokens :]
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(output, device=row.device).unique(return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), device=row.device)
    if sequence.output_tokens < params.min_tokens and params.stop_token_ids:
        row[torch.tensor(sorted(params.stop_token_ids), device=row.device)] = -torch.inf


def _draw(scores: Tensor, sequences: list[Sequence]) -> Tensor:
    """One token id a row, drawn at each row's temperature from what its limits leave."""
    params = [sequence.params for sequence in sequences]
    device = scores.device
    scores = scores / torch.tensor([p.temperature for p in params], device=device).unsqueeze(1)
    keys = _keys([p.seed for p in params], [s.output_tokens for s in sequences]).to(device)
    tokens = torch.empty(len(params), dtype=torch.int64, device=device)
    whole = [row for row, p in enumerate(params) if not p.truncates]
    if whole:
        ids = torch.arange(scores.shape[1], device=device).unsqueeze(0)
        tokens[whole] = _pick(scores[whole], ids, [params[row] for row in whole], keys[whole])
    truncated = [row for row, p in enumerate(params) if p.truncates]
    if truncated:
        limits = [params[row] for row in truncated]
        kept, ids = _truncate(scores[truncated], limits)
        tokens[truncated] = _pick(kept, ids, limits, keys[truncated])
    return tokens


def _truncate(scores: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Top-k, then top-p over what is left: candidates' scores (-inf where cut off) and their token ids."""
    vocabulary = scores.shape[1]
    top_k = torch.tensor([p.top_k or vocabulary for p in params], device=scores.device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], device=scores.device).unsqueeze(1)
    total = scores.logsumexp(-1, keepdim=True)
    width = max(CANDIDATES, *(p.top_k for p in params))
    while True:
        width = min(width, vocabulary)
        kept, ids = scores.topk(width, dim=-1)
        mass = (kept.logsumexp(-1, keepdim=True) - total).exp()
        if width == vocabulary or ((top_k <= width) | (mass >= top_p)).all():
            break
        width *= 8
    kept = kept.masked_fill(torch.arange(width, device=scores.device) >= top_k, -torch.inf)
    # Top-p is of what top-k leaves; without top-k that is the vocabulary, seen here or not.
    total = torch.where(top_k <= width, kept.logsumexp(-1, keepdim=True), total)
    probability = (kept - total).exp()
    before = probability.cumsum(-1) - probability
    return kept.masked_fill((before >= top_p) & (top_p < 1), -torch.inf), ids


def _pick(scores: Tensor, ids: Tensor, params: list[SamplingParams], keys: Tensor) -> Tensor:
    """Argmax of score + noise over what min-p leaves. `scores` [rows, width], `ids` too, or [1, width]."""
    noisy = scores + _gumbel(keys.unsqueeze(1), ids)
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([p.min_p for p in params], device=scores.device).log().unsqueeze(1)
        noisy.masked_fill_(scores < scores.amax(-1, keepdim=True) + floor, -torch.inf)
    winner = noisy.argmax(dim=-1, keepdim=True)
    return ids.expand_as(scores).gather(1, winner).squeeze(1)


def _keys(seeds: list[int], positions: list[int]) -> Tensor:
    """Where the noise of each (seed, position) starts: int64 [rows], every bit a function of both."""
    seed = torch.tensor([seed - (1 << 64) if seed >> 63 else seed for seed in seeds])
    return mix64(mix64(seed + _GAMMA) + (torch.tensor(positions) + 1) * _GAMMA)


def _gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32: output number `ids` of the SplitMix64 streams that start at `keys`."""
    bits = mix64(keys + (ids + 1) * _GAMMA)
    # v = P(this or a larger value). Large noise is small v, where float32 has all its precision: so
    # -log(-log(1 - v)), by log1p, and not -log(-log(u)) with u near 1.
    v = _shift(bits, 11).float().add_(0.5).mul_(2.0**-53)
    return v.neg_().log1p_().neg_().log_().neg_()


def mix64(bits: Tensor) -> Tensor:
    """SplitMix64's output function on int64 tensors: a bijection that looks random, wrapping at 64 bits."""
    bits = (bits ^ _shift(bits, 30)).mul_(_MIX_1)
    bits = (bits ^ _shift(bits, 27)).mul_(_MIX_2)
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return bits.bitwise_right_shift(by).bitwise_and_((1 << (64 - by)) - 1)
