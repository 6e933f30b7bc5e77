"""The router's settings: every limit and constant that a deployment may change, with its reason."""

import msgspec

from sumibi.core.latency import CPU_CORE_135M, INFINIBAND_NDR, LatencyModel, LinkModel


class BandLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may wait in one priority's queue, and how long. Sizes are llm-d's defaults."""

    priority: int = 0
    max_requests: int = 5_000
    """Beyond it new ones are refused (429)."""
    max_bytes: int = 1_000_000_000
    """Of their bodies, estimated from their prompts' tokens; beyond it new ones are refused (429)."""
    ttl_s: float | None = 300.0
    """Longest wait before a request is refused (429): about the patience of usual clients, for what waits
    here would wait in an engine's queue without us. None: as long as its client waits."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one `Router`. A recorded log replays bit-equal only under the same settings."""

    policy: str = "cost"
    """One of `sumibi.routing.policies.POLICIES`."""
    latency: LatencyModel = CPU_CORE_135M
    """Where learning starts for endpoints that do not say their own."""

    link: LinkModel = INFINIBAND_NDR
    """Of endpoints that do not say their own, like the next."""
    kv_bytes_per_token: int = 131_072
    """A model of eight billion parameters with grouped attention (32 layers, 8 heads of 128, two bytes)."""

    gateway: str = "gateway"
    gateway_epoch: int = 0
    """Who owns this router's reservations: with several gateways, entries of peers stand beside ours."""

    max_attempts: int = 2
    """Dispatches of one request, the first included."""
    max_requests: int = 100_000
    """Requests known at once; above it new ones are refused (429)."""
    max_waiting: int = 1_000
    """Requests that wait for an endpoint of their model; above it new ones are refused (429)."""
    wait_for_endpoint_s: float = 10.0
    """How long a request waits for an endpoint of its model to come up before it is refused (503)."""

    hold_above_s: float | None = 1.0
    """Under policies that price: a request whose pick cannot begin with it within this time is held back
    (see `flow`) and placed later. Some engine steps' worth, so that engines always have the next requests
    at hand even if predictions are off by a factor of 3; and about what the most urgent request may find
    before it. None: nothing is held, engines queue."""
    bands: list[BandLimits] = []
    """Priorities with limits of their own."""
    other_bands: BandLimits = BandLimits()
    """Limits of each other priority."""

    max_index_blocks: int = 2_000_000
    """Blocks in the index, all endpoints together; above it new ones are left out. One takes about 190
    bytes, the engine's hash for it included."""
    max_orphan_blocks: int = 10_000
    """Per endpoint: stored blocks kept although their parent is not known (yet)."""
    max_buffered_batches: int = 10_000
    """Per endpoint: live event batches held back while missed ones are replayed."""
    max_lower_tier_blocks: int = 1_000_000
    """Per endpoint and tier below the device: some report stores and never removals, the oldest go."""
    recall_blocks: int = 31_250
    """Per endpoint without KV events: own prompts' blocks remembered while its capacity is unknown."""

    foreign_half_life_s: float = 10.0
    """A scraped surplus of load loses half its weight in this time unless a new scrape renews it."""

    replay_attempts: int = 3
    """Tries to have missed event batches replayed before the endpoint's blocks are dropped."""
    replay_retry_s: float = 1.0
    """Pause before the second try; doubles."""
    replay_cooldown_s: float = 30.0
    """After the last failed try, how long until all of it is asked for anew."""

    r_peak_tokens_per_s: float = 15_928.0
    """`llmd-sticky-until-saturated`: prefill rate of an idle endpoint. llm-d ships 15,928; its authors
    measure it for each fleet (`policies.llmd_sticky` has what they published, and their rule)."""
    sticky_limit_s: float = 18.0
    """`llmd-sticky-until-saturated`: head start in seconds of prefill at which others are considered."""
    approximate_match_tokens: int = 131_072
    """llm-d's approximate index: how far into a prompt it looks."""

    decisions_kept: int = 1_000
    """Decision records and outcomes kept for the admin door, the newest."""
