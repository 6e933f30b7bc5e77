"""The latency model of each endpoint, learnt online from what its requests took.

An endpoint starts from given coefficients that may be wrong by any factor up to 8. What is learnt are three
factors on them, for the fixed cost of a prefill (`a`), the work in it (`b` and `q` together) and decode steps
(`d0..d2` together), and one thing that no hardware tells: the *overhead* of a request (HTTP, tokenizing,
the step under way when it arrives), which passes once however many prefills follow each other.

All endpoints that started from the same coefficients learn together (the same hardware, so what one teaches
holds for a new one). Beside that each has a speed of its own, a factor that moves slowly so that chance does
not make one of two equal machines look faster. Everything stays within a factor 8 of the start (the fixed
cost up to FIXED_S at least): a run of odd observations can bend a model, never break it.

A stretch of prefills says only its total:  seconds = overhead + a*prefills + factor*work.  The three unknowns
are a Kalman filter's state: short prompts move overhead and `a`, long ones the work, each in proportion to
how uncertain it still is. Noise is proportional to what was observed, so a tenfold outlier hardly counts.
"""

from math import exp, log
from typing import Final

from sumibi.core.latency import LatencyModel, LinkModel

MOST: Final = 8.0
BAND = log(MOST)
"""Factors stay within exp(±BAND) of the start."""
FIXED_S: Final = 0.5
"""The fixed cost and the overhead may be learnt up to this in any case."""
NOISE: Final = 0.3
"""Standard deviation of an observation, relative to it."""
UNSURE = (0.05, 2.0, 2.0)
"""Standard deviations at the start: overhead (s), factor on the fixed cost, factor on the work."""
DRIFT = (0.001, 0.01, 0.01)
"""What each may change between two observations."""
CLIP: Final = 1.0
"""A log error counts up to this for what an endpoint learns of its own."""
SHARED_FLOOR: Final = 0.02
"""Rate at which the shared decode factor keeps learning after many observations (it starts at 0.5)."""
OWN_RATE: Final = 0.1
"""Rate at which an endpoint's own speed learns, in the end."""
OWN_DELAY: Final = 20
"""Lessons after which it has half of that: what is wrong at first is the start, for all endpoints alike."""


class Hardware:
    """What all endpoints with the same start have learnt together."""

    __slots__ = (
        "_p",
        "decode",
        "decode_factor",
        "decode_lessons",
        "lessons",
        "most_fixed",
        "prefill_lessons",
        "slowest",
        "slowest_decode",
        "start",
        "x",
    )

    def __init__(self, start: LatencyModel) -> None:
        self.start = start
        self.most_fixed = _most_fixed(start)
        self.x = [0.0, 1.0, 1.0]
        """Overhead (s), factor on the fixed cost, factor on the work."""
        self._p = [[u * u if i == j else 0.0 for j in range(3)] for i, u in enumerate(UNSURE)]
        self.decode = 0.0
        self.decode_factor = 1.0
        """Its exponential: taken when it changes, not whenever an endpoint is priced."""
        self.prefill_lessons = self.decode_lessons = 0
        self.lessons = 0
        """Of both kinds: changes with every change."""
        self.slowest = self.slowest_decode = 1.0
        """The largest factors of its own that an endpoint ever had."""

    @property
    def work(self) -> float:
        """The factor on the work of prefills."""
        return self.x[2]

    def least(self) -> tuple[float, float, float]:
        """Factors (fixed, work, decode): times an endpoint's own never above what it is priced with."""
        _, fixed, work = self.x
        return (
            min(fixed, self.most_fixed / self.slowest),
            min(work, MOST / self.slowest),
            min(self.decode_factor, MOST / self.slowest_decode),
        )

    def teach_prefill(self, actual_s: float, prefills: int, work_s: float) -> None:
        """So many prefills with this work by the start's coefficients took `actual_s` in all."""
        x, p = self.x, self._p
        h = (1.0, prefills * self.start.a_s, work_s)
        predicted_s = h[0] * x[0] + h[1] * x[1] + h[2] * x[2]
        for i in range(3):
            p[i][i] = min(p[i][i] + DRIFT[i] ** 2, UNSURE[i] ** 2)
        ph = [sum(p[i][j] * h[j] for j in range(3)) for i in range(3)]
        spread = sum(h[i] * ph[i] for i in range(3)) + (NOISE * max(actual_s, predicted_s)) ** 2
        gain = [each / spread for each in ph]
        error_s = actual_s - predicted_s
        most = (FIXED_S, self.most_fixed, MOST)
        least = (0.0, 1 / MOST, 1 / MOST)
        for i in range(3):
            x[i] = min(max(x[i] + gain[i] * error_s, least[i]), most[i])
            for j in range(3):
                p[i][j] -= gain[i] * ph[j]
        self.prefill_lessons += 1
        self.lessons += 1

    def teach_decode(self, change: float) -> None:
        """Add to the logarithm of the factor of decode steps."""
        self.decode = _clip(self.decode + change, BAND)
        self.decode_factor = exp(self.decode)
        self.decode_lessons += 1
        self.lessons += 1


class Learner:
    """What one endpoint's requests are expected to take."""

    __slots__ = (
        "_decode",
        "_prefill",
        "_seen",
        "a_s",
        "b_s",
        "d0_s",
        "d1_s",
        "d2_s",
        "decode_factor",
        "fixed_factor",
        "overhead_s",
        "own",
        "own_decode",
        "q_s",
        "shared",
        "start",
        "work_factor",
    )

    def __init__(self, start: LatencyModel, shared: Hardware) -> None:
        self.start = start
        self.a_s, self.b_s, self.q_s = start.a_s, start.b_s, start.q_s
        """The start's coefficients, close at hand, and the next."""
        self.d0_s, self.d1_s, self.d2_s = start.d0_s, start.d1_s, start.d2_s
        self.shared = shared
        self._prefill = self._decode = 0.0
        """Logarithms of its own speed, beside what is shared."""
        self.own = self.own_decode = 1.0
        """Their exponentials."""
        self._seen = -1
        self.overhead_s = 0.0
        self.fixed_factor = self.work_factor = self.decode_factor = 1.0
        self.sync()

    @property
    def model(self) -> LatencyModel:
        """The coefficients as learnt so far."""
        self.sync()
        s = self.start
        return LatencyModel(
            a_s=s.a_s * self.fixed_factor,
            b_s=s.b_s * self.work_factor,
            q_s=s.q_s * self.work_factor,
            d0_s=s.d0_s * self.decode_factor,
            d1_s=s.d1_s * self.decode_factor,
            d2_s=s.d2_s * self.decode_factor,
        )

    def sync(self) -> None:
        """Take over what other endpoints taught meanwhile."""
        shared = self.shared
        if self._seen == shared.lessons:
            return
        self._seen = shared.lessons
        self.overhead_s, fixed, work = shared.x
        self.fixed_factor = min(max(fixed * self.own, 1 / MOST), shared.most_fixed)
        self.work_factor = _within(work * self.own)
        self.decode_factor = _within(shared.decode_factor * self.own_decode)

    def observe_prefill(self, actual_s: float, prefills: int, start_work_s: float) -> None:
        """`prefills` prefills whose work was `start_work_s` by the start's coefficients took `actual_s`, from
        the first one's dispatch to the last one's first token.
        """
        self.sync()
        start_fixed_s = prefills * self.start.a_s
        busy_s = start_fixed_s * self.fixed_factor + start_work_s * self.work_factor
        predicted_s = self.overhead_s + busy_s
        if actual_s <= 0 or predicted_s <= 0:
            return
        shared = self.shared
        rate = OWN_RATE * shared.prefill_lessons / (shared.prefill_lessons + OWN_DELAY)
        error = _clip(log(actual_s / predicted_s), CLIP)
        own = self.own
        # What it would have taken on hardware that is like the others'.
        shared.teach_prefill(
            actual_s * (self.overhead_s + busy_s / own) / predicted_s, prefills, start_work_s
        )
        self._prefill = _clip(self._prefill + rate * error * busy_s / predicted_s, BAND)
        self.own = exp(self._prefill)
        shared.slowest = max(shared.slowest, self.own)
        self.sync()

    def observe_decode(self, actual_step_s: float, sequences: float, mean_context_tokens: float) -> None:
        """A decode step took `actual_step_s` on average, with so many sequences of such a context."""
        self.sync()
        start, shared = self.start, self.shared
        start_s = start.d0_s + start.d1_s * sequences + start.d2_s * sequences * mean_context_tokens
        if actual_step_s <= 0 or start_s <= 0:
            return
        lessons = shared.decode_lessons
        error = _clip(log(actual_step_s / (start_s * self.decode_factor)), CLIP)
        self._decode = _clip(self._decode + OWN_RATE * lessons / (lessons + OWN_DELAY) * error, BAND)
        self.own_decode = exp(self._decode)
        shared.slowest_decode = max(shared.slowest_decode, self.own_decode)
        shared.teach_decode(max(2.0 / (4.0 + lessons), SHARED_FLOOR) * error)
        self.sync()


class Transfers:
    """What it takes to bring KV to an endpoint: by what is known of its link, times a factor learnt here."""

    __slots__ = ("_factor", "bytes_per_token", "factor", "link")

    def __init__(self, link: LinkModel, bytes_per_token: int) -> None:
        self.link = link
        self.bytes_per_token = bytes_per_token
        self._factor = 0.0
        self.factor = 1.0
        """On the seconds of the link's model; its logarithm is kept beside it."""

    def know(self, link: LinkModel, bytes_per_token: int) -> None:
        """What the endpoint says of itself. Another link is learnt anew."""
        if (link, bytes_per_token) != (self.link, self.bytes_per_token):
            self.link, self.bytes_per_token = link, bytes_per_token
            self._factor, self.factor = 0.0, 1.0

    def predict_s(self, tokens: int, source: LinkModel) -> float:
        """Seconds for the KV of so many tokens from an endpoint that gives them over `source`."""
        return self.factor * self.link.transfer_s(tokens * self.bytes_per_token, source)

    def observe(self, actual_s: float, predicted_s: float, transfer_s: float) -> None:
        """`transfer_s` and other things were predicted to take `predicted_s` together and took `actual_s`."""
        if actual_s > 0 and predicted_s > 0:
            error = _clip(log(actual_s / predicted_s), CLIP)
            self._factor = _clip(self._factor + OWN_RATE * error * transfer_s / predicted_s, BAND)
            self.factor = exp(self._factor)


def _most_fixed(start: LatencyModel) -> float:
    """How far the factor on the fixed cost may go."""
    return max(MOST, FIXED_S / start.a_s) if start.a_s > 0 else MOST


def _within(factor: float) -> float:
    return factor if 1 / MOST < factor < MOST else min(max(factor, 1 / MOST), MOST)


def _clip(x: float, limit: float) -> float:
    return min(max(x, -limit), limit)
