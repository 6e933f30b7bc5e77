"""The latency model of each endpoint, learnt online from what its requests took.

An endpoint starts from given coefficients that may be wrong by any factor up to 8. Three of its properties
are learnt as factors on them: the fixed cost of a prefill (`a`), the work in it (`b` and `q` together) and
decode steps (`d0..d2` together). They live as logarithms, so that "twice too slow" and "twice too fast"
weigh the same, and are clamped to [1/8, 8]: a run of odd observations can bend a model, never break it.

Each factor is a product of two: one shared by all endpoints that started from the same coefficients (the
same hardware, so what one teaches holds for a new one) and one of the endpoint itself, which moves slowly
so that chance does not make one of two equal machines look faster.

One observation says only the total. The error (log of actual over predicted) is dealt out to the factors by
their share of the prediction, which is gradient descent on the logarithms, and is clipped so that an
outlier counts no more than a factor e: the result tends to the median rather than the mean.
"""

from math import exp, log

from sumibi.core.latency import LatencyModel

MOST = 8.0
BAND = log(MOST)
"""Factors stay within exp(±BAND) of the start."""
CLIP = 1.0
"""An observation's log error counts up to this."""
SHARED_FLOOR = 0.02
"""Rate at which the shared factor keeps learning after many observations (it starts at 0.5)."""
OWN_RATE = 0.1
"""Rate at which an endpoint's own factor learns, in the end."""
OWN_DELAY = 20
"""Lessons after which it has half of that: what is wrong at first is the start, for all endpoints alike."""


class Factors:
    """Log factors on the coefficients of a latency model, and how often they were taught."""

    __slots__ = (
        "decode",
        "decode_factor",
        "decode_lessons",
        "fixed",
        "fixed_factor",
        "lessons",
        "prefill_lessons",
        "work",
        "work_factor",
    )

    def __init__(self) -> None:
        self.fixed = 0.0
        self.work = 0.0
        self.decode = 0.0
        self.fixed_factor = self.work_factor = self.decode_factor = 1.0
        """Exponentials of the three: taken when they change, not whenever an endpoint is priced."""
        self.prefill_lessons = 0
        self.decode_lessons = 0
        self.lessons = 0
        """Of both kinds: changes with every change of a factor."""

    def teach_prefill(self, fixed: float, work: float) -> None:
        """Add to the factors of prefills."""
        self.fixed = _clip(self.fixed + fixed, BAND)
        self.work = _clip(self.work + work, BAND)
        self.fixed_factor, self.work_factor = exp(self.fixed), exp(self.work)
        self.prefill_lessons += 1
        self.lessons += 1

    def teach_decode(self, decode: float) -> None:
        """Add to the factor of decode steps."""
        self.decode = _clip(self.decode + decode, BAND)
        self.decode_factor = exp(self.decode)
        self.decode_lessons += 1
        self.lessons += 1


class Learner:
    """What one endpoint's requests are expected to take."""

    __slots__ = ("_own", "_seen", "_shared", "decode_factor", "fixed_factor", "start", "work_factor")

    def __init__(self, start: LatencyModel, shared: Factors) -> None:
        self.start = start
        self._shared = shared
        self._own = Factors()
        self._seen = -1
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
        """Take over what other endpoints taught the shared factors meanwhile."""
        shared, own = self._shared, self._own
        if self._seen == shared.lessons:
            return
        self._seen = shared.lessons
        self.fixed_factor = _within(shared.fixed_factor * own.fixed_factor)
        self.work_factor = _within(shared.work_factor * own.work_factor)
        self.decode_factor = _within(shared.decode_factor * own.decode_factor)

    def observe_prefill(self, actual_s: float, prefills: int, start_work_s: float) -> None:
        """`prefills` prefills whose work was `start_work_s` by the start's coefficients took `actual_s`."""
        self.sync()
        fixed_s = prefills * self.start.a_s * self.fixed_factor
        predicted_s = fixed_s + start_work_s * self.work_factor
        if actual_s <= 0 or predicted_s <= 0:
            return
        error = _clip(log(actual_s / predicted_s), CLIP)
        share = fixed_s / predicted_s
        for factors, rate in zip(
            (self._shared, self._own), _rates(self._shared.prefill_lessons), strict=True
        ):
            factors.teach_prefill(rate * error * share, rate * error * (1 - share))
        self.sync()

    def observe_decode(self, actual_step_s: float, sequences: float, mean_context_tokens: float) -> None:
        """A decode step took `actual_step_s` on average, with so many sequences of such a context."""
        self.sync()
        start = self.start
        start_s = start.d0_s + start.d1_s * sequences + start.d2_s * sequences * mean_context_tokens
        if actual_step_s <= 0 or start_s <= 0:
            return
        error = _clip(log(actual_step_s / (start_s * self.decode_factor)), CLIP)
        for factors, rate in zip((self._shared, self._own), _rates(self._shared.decode_lessons), strict=True):
            factors.teach_decode(rate * error)
        self.sync()


def _rates(lessons: int) -> tuple[float, float]:
    """Learning rates of the shared and of the own factor, after so many lessons to the shared one."""
    return max(2.0 / (4.0 + lessons), SHARED_FLOOR), OWN_RATE * lessons / (lessons + OWN_DELAY)


def _within(factor: float) -> float:
    return factor if 1 / MOST < factor < MOST else min(max(factor, 1 / MOST), MOST)


def _clip(x: float, limit: float) -> float:
    return min(max(x, -limit), limit)
