"""What the authors of the baseline policies would set for a fleet.

llm-d's `llmd-sticky-until-saturated` wants the prefill rate of an idle endpoint. Where llm-d published one
for a model and its hardware, that is taken; else it is measured as they do: one prompt of a chunk of 8,192
tokens on an idle endpoint, from request to first token. They set one rate for a pool, so a fleet of unequal
replicas gets that of the kind there is most of.
"""

import msgspec

from sumibi.routing.config import RouterConfig
from sumibi.routing.policies.llmd_sticky import CHUNK_TOKENS, R_PEAK_TOKENS_PER_S
from sumibi.sim.fleet import FleetSpec

PUBLISHED = {"qwen3-32b/2xh100": R_PEAK_TOKENS_PER_S["qwen3-32b 2xH100"]}
"""By the name of the step times (`sim.latency`): tokens a second."""


def calibrated(fleet: FleetSpec, config: RouterConfig | None = None) -> RouterConfig:
    """`config` with the calibration of the baselines for `fleet`. Leaves alone what `cost` looks at."""
    group = max(fleet.groups, key=lambda group: group.count)
    r_peak = PUBLISHED.get(group.latency) if isinstance(group.latency, str) else None
    if r_peak is None:
        chunk_s = fleet.overhead_s + group.times().alone_s(CHUNK_TOKENS, chunk_tokens=group.chunk_tokens)
        r_peak = CHUNK_TOKENS / chunk_s
    return msgspec.structs.replace(config or RouterConfig(), r_peak_tokens_per_s=r_peak)
