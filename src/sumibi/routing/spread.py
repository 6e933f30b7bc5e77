"""How evenly endpoints were given work lately, and cold prompts: what `cost` compares an endpoint with.

Work that is cold settles: whoever computes a new prompt keeps its KV, so those that begin like it follow, and
decode there. An endpoint's *settled* work is that of its prompts, each times the part of the prompt that
was new. Both are sums that fade (SHARE_HALF_LIFE_S) and are kept in seconds by the start's coefficients, so
they stay comparable while the hardware's speed is still being learnt.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sumibi.routing.fading import faded_s, share_epoch_t
from sumibi.routing.fleet import Roster
from sumibi.routing.learning import Hardware

FEW_PREFILLS: Final = 16
"""So many usual prefills are added to what each endpoint did: differences of a few do not count."""
FEW_SETTLED: Final = 1.6
"""The same where they settled: placed evenly, prompts are apart by one."""


class Spread(NamedTuple):
    """Of all endpoints that a request may go to."""

    few_s: float
    """FEW_PREFILLS usual prefills."""
    level_s: float
    """What they computed lately, on average, and that."""
    least_settled_s: float
    """The least settled at any of them."""
    settled_level_s: float
    """What settled at them, on average, and FEW_SETTLED usual prefills."""
    inflight: float
    """Requests of ours at each, on average."""


def spread(
    parts: Iterable[tuple[Hardware, Sequence[float], Sequence[float]]],
    faded: float,
    typical_s: float,
    inflight: int,
    count: int,
) -> Spread:
    """From work and settled work of each endpoint, by hardware, which count `faded` by now; from the usual
    prefills and the requests at all `count` of them, summed.
    """
    worked_s = settled_s = 0.0
    least_s = float("inf")
    for hardware, worked, settled in parts:
        worked_s += sum(worked) * hardware.work
        settled_s += sum(settled) * hardware.work
        least_s = min(least_s, min(settled) * hardware.work)
    usual_s = typical_s / count
    few_s = FEW_PREFILLS * usual_s
    return Spread(
        few_s,
        few_s + worked_s * faded / count,
        least_s * faded,
        settled_s * faded / count + FEW_SETTLED * usual_s,
        inflight / count,
    )


def spread_over(roster: Roster, t: float) -> Spread:
    """Over the endpoints of a roster, as of `t`."""
    endpoints, shares_t = roster.endpoints, share_epoch_t(t)
    return spread(
        [
            (
                hardware,
                [endpoints[place].worked_lately_s(shares_t) for place in places],
                [endpoints[place].settled_lately_s(shares_t) for place in places],
            )
            for hardware, places in roster.groups.items()
        ],
        faded_s(1.0, t - shares_t),
        sum([e.typical_prefill_s for e in endpoints]),
        sum([e.load.inflight for e in endpoints]),
        len(endpoints),
    )
