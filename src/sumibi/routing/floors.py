"""What a request costs at an endpoint at least, as a few numbers that change only when its load does.

From them follows, with a handful of multiplications, a lower bound of the price in `cost`: the prefills
reserved there, this one's compute, those held up by it who decode there, the work itself, and crowding by
what lies there already. Whatever else the price has (evictions, returns, places, foreign load, more than a
share of the work) is never negative and left out.
"""

from typing import NamedTuple

from sumibi.routing.cost import CROWD, DECODE, MILD, POWER, WORK
from sumibi.routing.fleet import Endpoint
from sumibi.routing.learning import Hardware


class Floor(NamedTuple):
    """Multipliers of one endpoint, beside what its hardware learnt (`Terms`)."""

    fixed: float
    """Of a fixed cost: this prefill's, for those it holds up too, and of those reserved but the first."""
    work: float
    """Of its work."""
    steps: float
    """Of what one more sequence adds to all steps of an answer."""
    rest_s: float
    """Work of all prefills reserved there but the first."""
    head: float
    """Of the first one's fixed cost; 0 if there is none."""
    head_s: float
    """Its work."""
    since_t: float
    """When it was begun."""


class Terms(NamedTuple):
    """A request's costs on one kind of hardware, in seconds. Factors may be smaller than learnt."""

    fixed_s: float
    work_factor: float
    steps_s: float
    """What one more sequence adds to all steps of its answer."""


def floor(endpoint: Endpoint, kind: tuple[int, int]) -> Floor:
    """Of an endpoint as it is now, for requests of this kind: (priority, tokens of a block)."""
    floors = endpoint.load.floors
    known = floors.get(kind)
    if known is None:
        known = floors[kind] = _floor(endpoint, *kind)
    return known


def _floor(endpoint: Endpoint, priority: int, block_tokens: int) -> Floor:
    load, learner = endpoint.load, endpoint.learner
    own = learner.own
    held_up = DECODE * load.decode_weight(priority)
    crowd = 0.0
    if endpoint.kv_tokens:
        live_tokens = endpoint.recency.live_blocks * block_tokens + load.prefill_tokens
        crowd = CROWD * min(1.0, live_tokens / endpoint.kv_tokens) ** POWER
    others = head_s = rest_s = 0.0
    if load.prefills:
        others = len(load.prefills) - 1.0
        head_s = next(iter(load.prefills.values())).work_ns * 1e-9
        rest_s = load.prefill_work_ns * 1e-9 - head_s
    return Floor(
        own * (1.0 + held_up + others),
        own * (1.0 + held_up + WORK - MILD + crowd),
        learner.own_decode * (held_up + DECODE * len(load.prefills)),
        own * rest_s,
        own if load.prefills else 0.0,
        own * head_s,
        load.head_since_t,
    )


def terms(hardware: Hardware, prompt_tokens: int, output_tokens: float) -> Terms:
    """What a request is on this hardware."""
    start = hardware.start
    fixed, work, decode = hardware.least()
    context = prompt_tokens + output_tokens / 2
    return Terms(
        start.a_s * fixed,
        work,
        output_tokens * decode * (start.d1_s + start.d2_s * context),
    )


def work_s(hardware: Hardware, prompt_tokens: int, reused_tokens: int) -> float:
    """Work of a prefill by the start's coefficients."""
    start = hardware.start
    return (prompt_tokens - reused_tokens) * (start.b_s + start.q_s / 2 * (prompt_tokens + reused_tokens))
