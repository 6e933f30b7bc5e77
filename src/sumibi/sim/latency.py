"""How long an engine's steps take: the simulated truth, finer than the model that the router learns.

A step computes chunks of prompts, one token for every sequence that decodes, or both. Its time is the sum of
the work in it plus one fixed part (launches, reading the weights), which is counted once:

    chunk of n tokens after c:  n * (rate(n) + over(c))
    decode of B sequences:      weights(B) + d2 * their contexts

`rate(n)` is the time of a token in a prompt of n (grows with n: attention within the chunk), `over(c)` what
a token takes longer after c others. Both are straight lines for a model with plain coefficients
(rate = b + q*n/2, over = q*c, see `core.latency`) and interpolate the measured points where there is a grid.

Values: least-squares fits and grids from the kernel database of aiconfigurator-core 0.12.0 (Apache-2.0;
measured with vLLM 0.24.0 and SGLang 0.5.14): one prompt at a time, kernel time only. What a request takes
beside that (HTTP, tokenizing, queues) is the fleet's `overhead_s`. gpt-oss-120b's prefill alone is another
source's, said where it stands.
"""

from bisect import bisect_right
from collections.abc import Sequence

from sumibi.core.errors import ConfigError
from sumibi.core.latency import LatencyModel


class Line:
    """Straight pieces through given points, continued at both ends with the slope of the last piece.

    `flat_start`: constant before the first point instead.
    """

    __slots__ = ("_flat_start", "_inner", "_slopes", "_xs", "_ys")

    def __init__(self, xs: Sequence[float], ys: Sequence[float], *, flat_start: bool = False) -> None:
        self._xs, self._ys = list(xs), list(ys)
        self._inner = self._xs[1:-1]
        self._slopes = [
            (self._ys[i + 1] - self._ys[i]) / (self._xs[i + 1] - self._xs[i]) for i in range(len(xs) - 1)
        ]
        self._flat_start = flat_start

    def __call__(self, x: float) -> float:
        """The value at `x`."""
        if self._flat_start and x < self._xs[0]:
            return self._ys[0]
        piece = bisect_right(self._inner, x)
        return self._ys[piece] + self._slopes[piece] * (x - self._xs[piece])

    def slope(self, x: float) -> float:
        """How fast it grows at `x`."""
        if self._flat_start and x < self._xs[0]:
            return 0.0
        return self._slopes[bisect_right(self._inner, x)]


class ExpertDecode:
    """Decode steps of a mixture of experts, through measured points.

    A step reads the weights of every expert that any of its tokens needs: of E experts, k a token, B
    sequences need E*(1 - (1 - k/E)^B) different ones if the choice is even. So the step grows fast for the
    first few dozen sequences and slowly from then on. Between measured batch sizes we interpolate over that
    number (plus what a sequence costs by itself), which fits three measured batches with two constants.
    """

    __slots__ = ("_base", "_experts", "_left_out", "_lines", "_own_s", "_per_token", "_scale", "_spread")

    def __init__(
        self,
        *,
        experts: int,
        per_token: int,
        expert_s: float,
        sequence_s: float,
        batches: Sequence[int],
        contexts: Sequence[int],
        seconds: Sequence[Sequence[float]],
    ) -> None:
        """`seconds[i][j]`: a step of `batches[j]` sequences with `contexts[i]` tokens each.

        `expert_s`, `sequence_s`: seconds to read an expert's weights, and for one more sequence.
        """
        self._experts, self._per_token = experts, per_token
        self._left_out = 1.0 - per_token / experts
        self._scale = sequence_s / expert_s
        self._own_s = sequence_s
        spread = [self._reads(b) for b in batches]
        self._lines = [Line(contexts, [row[j] for row in seconds]) for j in range(len(batches))]
        self._spread = spread
        self._base = Line(spread, [line(0) for line in self._lines])

    def _reads(self, sequences: float) -> float:
        """Experts read, with the sequences' own cost expressed in reads."""
        return float(self._experts * (1.0 - self._left_out**sequences) + self._scale * sequences)

    def line(self, sequences: int, context_tokens: float) -> tuple[float, float]:
        """Seconds of a step, and how much each further step is longer (every context grows by one)."""
        reads, spread = self._reads(sequences), self._spread
        right = min(max(1, bisect_right(spread, reads)), len(spread) - 1)
        part = (reads - spread[right - 1]) / (spread[right] - spread[right - 1])
        mean = context_tokens / sequences
        low, high = self._lines[right - 1], self._lines[right]
        at_low, slope_low = low(mean), low.slope(mean)
        return (
            at_low + part * (high(mean) - at_low),
            max(0.0, slope_low + part * (high.slope(mean) - slope_low)),
        )

    def beside_prefill_s(self, sequences: int, context_tokens: float) -> tuple[float, float]:
        """A step of the same sequences alone, and what they add to one that reads all weights for a prompt
        anyway.
        """
        alone_s, _ = self.line(sequences, context_tokens)
        return alone_s, max(0.0, alone_s - self._base(self._reads(sequences))) + self._own_s * sequences


class StepTimes:
    """Seconds of the steps of one kind of engine."""

    __slots__ = ("_d1_s", "_d2_s", "_decode", "_over", "_rate", "fixed_s", "model", "weights_s")

    def __init__(
        self,
        model: LatencyModel,
        *,
        rate: Line | None = None,
        over: Line | None = None,
        decode: ExpertDecode | None = None,
    ) -> None:
        self.model = model
        """The nearest plain coefficients: what somebody would tell a router who has them right."""
        self.fixed_s = model.a_s
        """Of a step that computes a chunk of a prompt."""
        self.weights_s = model.d0_s
        """Of any step: to read the weights."""
        self._d1_s, self._d2_s = model.d1_s, model.d2_s
        self._rate = rate or Line((0, 1), (model.b_s, model.b_s + model.q_s / 2))
        self._over = over or Line((0, 1), (0, model.q_s))
        self._decode = decode

    def chunk_s(self, new_tokens: int, before_tokens: int) -> float:
        """Work of `new_tokens` of a prompt after `before_tokens`, without the fixed part of the step."""
        return new_tokens * (self._rate(new_tokens) + self._over(before_tokens))

    def step_s(self, chunks_s: float, sequences: int, context_tokens: int) -> float:
        """A step with chunks that take `chunks_s` beside `sequences` that decode (contexts in all given)."""
        if not sequences:
            return max(self.fixed_s + chunks_s, self.weights_s)
        if self._decode is None:
            beside_s = self._d1_s * sequences + self._d2_s * context_tokens
            return max(self.fixed_s, self.weights_s) + chunks_s + beside_s
        alone_s, beside_s = self._decode.beside_prefill_s(sequences, context_tokens)
        # A chunk of few tokens does not need all experts: what the sequences need bounds the step from below.
        return max(alone_s, max(self.fixed_s, self.weights_s) + chunks_s + beside_s)

    def decode_line(self, sequences: int, context_tokens: int) -> tuple[float, float]:
        """A step in which `sequences` decode: its seconds, and how much each further one is longer."""
        if self._decode is not None:
            return self._decode.line(sequences, context_tokens)
        growth_s = self._d2_s * sequences
        return self.weights_s + self._d1_s * sequences + self._d2_s * context_tokens, growth_s

    def alone_s(self, new_tokens: int, cached_tokens: int = 0, *, chunk_tokens: int = 8192) -> float:
        """A prefill in chunks on an idle engine."""
        total_s, before = 0.0, cached_tokens
        while new_tokens > 0:
            chunk = min(new_tokens, chunk_tokens)
            total_s += self.step_s(self.chunk_s(chunk, before), 0, 0)
            new_tokens -= chunk
            before += chunk
        return total_s


def _plain(a: float, b: float, q: float, d0: float, d1: float, d2: float) -> LatencyModel:
    """Coefficients given in milliseconds."""
    return LatencyModel(a * 1e-3, b * 1e-3, q * 1e-3, d0 * 1e-3, d1 * 1e-3, d2 * 1e-3)


def _grid(
    model: LatencyModel,
    prompts_ms: dict[int, float],
    after_ms: dict[int, float],
    decode: ExpertDecode | None = None,
) -> StepTimes:
    """Measured points: whole prompts by length, and 2,048 tokens by how many are cached before them."""
    a_s = model.a_s
    rates = {n: (ms * 1e-3 - a_s) / n for n, ms in prompts_ms.items()}
    overs = {c: (ms - prompts_ms[2048]) * 1e-3 / 2048 for c, ms in after_ms.items()}
    over = Line((0, *overs), (0.0, *overs.values())) if overs else None
    return StepTimes(
        model, rate=Line(list(rates), list(rates.values()), flat_start=True), over=over, decode=decode
    )


_GLM_5_2_DECODE = ExpertDecode(
    # 256 experts, 8 a token. The two constants solve the three batches at 1,024 tokens exactly.
    experts=256,
    per_token=8,
    expert_s=1.2136e-4,
    sequence_s=8.17e-6,
    batches=(1, 32, 128),
    contexts=(1024, 8192, 32768),
    seconds=((10.5e-3, 29.6e-3, 41.1e-3), (10.8e-3, 31.1e-3, 48.4e-3), (11.0e-3, 35.1e-3, 69.0e-3)),
)

# gpt-oss-120b (MXFP4) on one H200 and on four: 128 experts, 4 a token. The two constants are what the first
# two batches at 1,024 tokens differ by for each expert read, and the last two for each sequence, less what
# its context takes; between batches their ratio matters, beside a prefill the second.
_GPT_OSS_DECODE = ExpertDecode(
    experts=128,
    per_token=4,
    expert_s=1.86e-4,
    sequence_s=5.8e-5,
    batches=(1, 4, 8, 16, 32, 64, 128, 256),
    contexts=(1024, 8192, 32768, 65536),
    seconds=(
        (4.09e-3, 6.19e-3, 8.63e-3, 11.39e-3, 14.39e-3, 21.67e-3, 25.36e-3, 33.93e-3),
        (4.17e-3, 6.46e-3, 9.17e-3, 12.42e-3, 16.30e-3, 25.20e-3, 33.31e-3, 50.19e-3),
        (4.45e-3, 7.31e-3, 10.80e-3, 15.70e-3, 23.07e-3, 38.87e-3, 60.19e-3, 103.67e-3),
        (4.73e-3, 8.40e-3, 13.00e-3, 20.31e-3, 32.10e-3, 56.63e-3, 96.47e-3, 175.97e-3),
    ),
)
_GPT_OSS_TP4_DECODE = ExpertDecode(
    experts=128,
    per_token=4,
    expert_s=3.5e-5,
    sequence_s=1.8e-5,
    batches=(1, 4, 8, 16, 32, 64, 128, 256),
    contexts=(1024, 8192, 32768, 65536),
    seconds=(
        (3.22e-3, 3.62e-3, 4.33e-3, 4.98e-3, 5.72e-3, 7.83e-3, 8.99e-3, 11.59e-3),
        (3.26e-3, 3.69e-3, 4.46e-3, 5.26e-3, 6.27e-3, 8.86e-3, 10.93e-3, 15.72e-3),
        (3.39e-3, 3.95e-3, 4.93e-3, 6.10e-3, 7.92e-3, 12.14e-3, 17.72e-3, 29.34e-3),
        (3.49e-3, 4.22e-3, 5.46e-3, 7.20e-3, 10.10e-3, 16.76e-3, 26.78e-3, 46.90e-3),
    ),
)
_QWEN3_30B_DECODE = ExpertDecode(
    # 128 experts, 8 a token.
    experts=128,
    per_token=8,
    expert_s=1.14e-4,
    sequence_s=1.9e-5,
    batches=(1, 4, 8, 16, 32, 64, 128, 256),
    contexts=(1024, 8192, 32768, 65536),
    seconds=(
        (4.04e-3, 6.45e-3, 8.32e-3, 10.27e-3, 15.80e-3, 17.75e-3, 20.99e-3, 26.40e-3),
        (4.22e-3, 7.19e-3, 9.75e-3, 13.09e-3, 20.92e-3, 27.65e-3, 41.36e-3, 67.87e-3),
        (5.00e-3, 9.41e-3, 14.14e-3, 21.77e-3, 38.79e-3, 63.49e-3, 111.61e-3, 207.41e-3),
        (5.77e-3, 12.30e-3, 19.80e-3, 33.82e-3, 62.84e-3, 110.89e-3, 210.35e-3, 402.13e-3),
    ),
)

TABLE: dict[str, StepTimes] = {
    "llama-3.1-8b/1xh100": _grid(
        _plain(1.38, 0.02014, 7.92e-7, 6.30, 0.0104, 4.18e-5),
        {
            512: 12.0,
            1024: 22.1,
            2048: 43.5,
            4096: 90.1,
            8192: 199.7,
            16384: 440.0,
            32768: 1082.0,
            65536: 3056.0,
        },
        {129024: 254.8},
    ),
    "llama-3.1-8b/1xh200": StepTimes(_plain(0.57, 0.02041, 8.03e-7, 4.90, 0.0102, 2.95e-5)),
    "llama-3.1-70b/4xh100": _grid(
        _plain(4.73, 0.06157, 9.76e-7, 15.21, 0.0324, 2.64e-5),
        {2048: 130.0, 8192: 577.0, 32768: 2531.0, 65536: 6194.0},
        {30720: 192.0, 129024: 394.0},
    ),
    "llama-3.1-70b/4xh200": StepTimes(_plain(2.21, 0.06243, 9.83e-7, 12.27, 0.0316, 1.85e-5)),
    "qwen3-32b/2xh100": _grid(
        _plain(3.75, 0.05010, 1.59e-6, 13.58, 0.0259, 4.21e-5),
        {2048: 107.0, 8192: 476.0, 32768: 2503.0, 65536: 6701.0},
        {30720: 207.0, 129024: 534.0},
    ),
    "qwen3-32b/2xh200": StepTimes(_plain(2.0, 0.05450, 1.72e-6, 10.29, 0.0189, 2.94e-5)),
    # The fits' fixed part is negative for the next two (their long prompts are faster than a parabola):
    # 5 ms stands for it.
    "glm-5.2/8xh200": _grid(
        _plain(5.0, 0.0941, 6.6e-7, 11.2, 0.266, 7.5e-6),
        {2048: 161.0, 8192: 819.0, 32768: 3360.0, 65536: 7367.0},
        {30720: 269.0, 129024: 336.0},
        _GLM_5_2_DECODE,
    ),
    "glm-5/8xh200": StepTimes(_plain(5.0, 0.1142, 1.26e-6, 13.5, 0.559, 8.9e-6)),
    # Prefill: a fit to what llm-d published of one H200 with vLLM, 250, 510, 1,173 and 1,988 ms to recompute
    # 8 k to 49 k tokens, 15 ms a request beside. (The database has 194, 393, 949 and 1,659; llm-d's own
    # calibration of its pool, 33,821 tokens/s or 242 ms for 8,192, is nearer to the former.) On four, as the
    # database scales.
    "gpt-oss-120b/1xh200": StepTimes(_plain(5.0, 0.0275, 5.2e-7, 5.2, 0.145, 9.8e-6), decode=_GPT_OSS_DECODE),
    "gpt-oss-120b/4xh200": StepTimes(
        _plain(5.0, 0.0110, 1.8e-7, 3.7, 0.036, 2.3e-6), decode=_GPT_OSS_TP4_DECODE
    ),
    "qwen3-30b-a3b/1xh200": _grid(
        _plain(17.2, 0.00985, 1.24e-6, 5.2, 0.091, 2.5e-5),
        {2048: 40.4, 4096: 69.1, 8192: 138.4, 16384: 338.6, 32768: 1015.6, 65536: 3363.7},
        {8192: 59.7, 16384: 79.7, 30720: 116.9, 63488: 200.3, 129024: 367.1},
        _QWEN3_30B_DECODE,
    ),
    "deepseek-v3/8xh200": StepTimes(_plain(38.6, 0.0350, 3.35e-6, 11.5, 0.179, 1.20e-4)),
}
"""By model and hardware. Lower-case, `MODEL/COUNTxGPU`."""


def named(name: str) -> StepTimes:
    """The step times called `name`. Raises ConfigError that lists those there are."""
    try:
        return TABLE[name]
    except KeyError as cause:
        raise ConfigError(f"latency {name!r} is not one of {', '.join(TABLE)}") from cause
