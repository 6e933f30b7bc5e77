"""Published effects of KV tiers and of separate pools, played: does the direction come out, not the number.

W3 (host memory below the device), W4 (prefill and decode apart), W11 (recorded agents), W12 (a long shared
system prompt that can be fetched), and the negative controls that go with any claim for separate pools.
What does not come out is said as plainly as what does.

gpt-oss-120b has no entry in `sim.latency`. Its prefill is a fit to published times to recompute 2 k to 49 k
tokens (78, 250, 510, 1,173, 1,988 ms). Its decode is an estimate, said so on the page: reading the weights of
the experts that a batch needs (4 of 128 a token, 60 GB in all, at 80 % of 4.8 TB/s a GPU), the KV, and 3 ms
of launches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from sumibi.bench.grid import SCRAPE_S, apart, fleet
from sumibi.bench.playing import PATIENT
from sumibi.bench.report import Figure, figure
from sumibi.bench.traffic import available, workload
from sumibi.bench.workloads import generate
from sumibi.bench.workloads.groups import shared_prefix
from sumibi.core.latency import LatencyModel
from sumibi.sim.calibration import calibrated
from sumibi.sim.fleet import FleetSpec, Group, HostTier, LinkSpec, Store
from sumibi.sim.results import Summary
from sumibi.sim.simulate import simulate
from sumibi.sim.workload import Workload

CMD = "python -m benchmarks.directions"
BLIND, OURS = "round-robin", "cost"
OSS_PREFILL = (5e-3, 27.5e-6, 5.2e-10)
"""a, b, q of `core.latency`, fitted as the module says: with the fleet's 15 ms a request within 6 % from 8 k
tokens on.
"""
OSS_TP1 = LatencyModel(*OSS_PREFILL, d0_s=4e-3, d1_s=3e-4, d2_s=9.6e-9)
OSS_TP4 = LatencyModel(
    OSS_PREFILL[0], OSS_PREFILL[1] / 3, OSS_PREFILL[2] / 3, d0_s=3.5e-3, d1_s=7e-5, d2_s=2.4e-9
)
OSS_KV_BYTES = 73_728
"""36 layers x 2 x 8 heads x 64 x 2 bytes."""
W4_OUTPUT_TOKENS = 250
PULL = LinkSpec(gb_per_s=OSS_KV_BYTES / 4.3e-6 / 1e9, setup_s=0.026)
"""Published: 26 ms + 4.3 us a token."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published effect and ours, before -> after."""

    group: str
    what: str
    better: bool
    """Published direction: True: `after` is better; False: it is not (a negative control)."""
    lower_is_better: bool
    before: float
    after: float
    unit: str
    published: str

    @property
    def agrees(self) -> bool:
        """Whether the direction comes out."""
        improved = self.after < self.before if self.lower_is_better else self.after > self.before
        return improved if self.better else not improved


def directions(traces: Path | None, *, quick: bool) -> Iterator[Row]:
    """Play all, one after the other. `quick`: fewer requests and points, a few seconds each.

    Raises ConfigError, TraceError.
    """
    yield from w3(quick)
    yield from w4(quick)
    yield from w11(traces, quick)
    yield from w12(quick)
    yield from controls(traces, quick)


def _play(played: Workload, spec: FleetSpec, policy: str, users: int | None = None) -> Summary:
    run = simulate(played, spec, policy=policy, users=users, config=calibrated(spec, PATIENT))
    return run.summary


_Figure = Callable[[Summary], float]


def _ttft(one: Summary) -> float:
    return one.ttft_mean_s


def _itl(one: Summary) -> float:
    """Mean of W4's answers."""
    return 1_000 * (one.e2e_mean_s - one.ttft_mean_s) / (W4_OUTPUT_TOKENS - 1)


def _e2e(one: Summary) -> float:
    return one.e2e_mean_s


def _rate(one: Summary) -> float:
    return one.output_tokens_per_s


def _row(
    group: str,
    what: str,
    read: _Figure,
    before: Summary,
    after: Summary,
    published: str,
    *,
    better: bool = True,
) -> Row:
    units: dict[_Figure, str] = {_ttft: "s", _itl: "ms", _e2e: "s", _rate: "tok/s"}
    lower = read is not _rate
    return Row(group, what, better, lower, read(before), read(after), units[read], published)


# --- W3 ---


def w3(quick: bool) -> Iterator[Row]:
    """Prompts of twice the devices' memory, without and with host memory below."""
    count, groups = (2, 62) if quick else (8, 250)
    host = HostTier(tokens=1_312_500, gb_per_s=20.0)
    for rate, published in ((20, "43.67 -> 0.89 s"), (40, "115.6 -> 25.4 s")):
        per_fleet = rate * count // 8
        played = shared_prefix(
            "W3", groups, 5, (16_000, 256, 256), [(25 * count // 8, 50), (per_fleet, 40)], 0
        )
        off, on = (
            _play(
                played,
                fleet("qwen3-32b-tp2-h100", count=count, kv_tokens=298_000, host=tier),
                "llmd-precise",
            )
            for tier in (None, host)
        )
        what = f"{rate} requests/s: mean TTFT, host tier off -> on"
        yield _row("W3", what, _ttft, off, on, published)
        if rate == 20:
            what = f"{rate} requests/s: output, host tier off -> on"
            yield _row("W3", what, _rate, off, on, "114,663 -> 300,749 tok/s (input counted)")


# --- W4 ---


def _oss(name: str, *groups: Group, store: Store | None = None) -> FleetSpec:
    return FleetSpec(name=name, groups=list(groups), scrape_interval_s=SCRAPE_S, store=store)


def _oss_group(name: str, count: int, *, tp4: bool = False, **more: object) -> Group:
    group = Group(
        name=name,
        count=count,
        latency=OSS_TP4 if tp4 else OSS_TP1,
        kv_tokens=3_000_000 if tp4 else 600_000,
        kv_bytes_per_token=OSS_KV_BYTES,
        link=PULL,
    )
    return msgspec.structs.replace(group, **more)


def _w4_fleets(part: int) -> tuple[FleetSpec, FleetSpec]:
    together = _oss("w4 together", _oss_group("both", 16 // part))
    pools = _oss(
        "w4 apart",
        _oss_group("prefill", 8 // part, role="prefill"),
        _oss_group("decode", 2 // part, tp4=True, role="decode"),
    )
    return together, pools


def w4(quick: bool) -> Iterator[Row]:
    """5,000 tokens in, 250 out, no shared prefix: sixteen GPUs together, or 8 x TP1 + 2 x TP4."""
    part = 2 if quick else 1
    seconds = 20 if quick else 120
    rate = 44 // part
    played = shared_prefix("W4", rate * seconds, 1, (4_744, 256, W4_OUTPUT_TOKENS), [(rate, seconds)], 0)
    together_fleet, pools_fleet = _w4_fleets(part)
    together = _play(played, together_fleet, BLIND)
    pools = _play(played, pools_fleet, BLIND)
    yield _row("W4", "mean time between tokens, together -> apart", _itl, together, pools, "25 -> 8 ms")
    yield _row("W4", "mean end to end, together -> apart", _e2e, together, pools, "6.7 -> 3.5 s")
    yield _row(
        "controls",
        "W4: separate pools lose TTFT, together -> apart",
        _ttft,
        together,
        pools,
        "0.53 -> 1.4 s",
        better=False,
    )


# --- W11 ---


def _agents(traces: Path | None, quick: bool) -> Workload:
    if quick or not available("weka", traces):
        return generate("agents:sessions=10,users=6" if quick else "agents:sessions=120")
    return workload("weka", None, 0, traces)


def w11(traces: Path | None, quick: bool) -> Iterator[Row]:
    """Agents on GLM-5.2: host memory below small devices; pools beside the same replicas together."""
    played = _agents(traces, quick)
    count = 2 if quick else 8
    tokens = 150_000 if quick else 598_000
    for users, published_ttft, published_rate in (
        (32, "-32 %", "+13 %"),
        (64, "124.5 -> 22.2 s (400 sessions)", "951 -> 2,776 tok/s (c128)"),
    ):
        if quick and users == 64:
            continue
        live = 6 if quick else users
        off, on = (
            _play(
                played,
                fleet("glm52-8xh200", count=count, kv_tokens=tokens, host=tier),
                "llmd-precise",
                live,
            )
            for tier in (None, HostTier(tokens=4 * tokens, gb_per_s=20.0))
        )
        at = f"{live} agents"
        yield _row("W11", f"{at}: mean TTFT, host tier off -> on", _ttft, off, on, published_ttft)
        yield _row("W11", f"{at}: output, host tier off -> on", _rate, off, on, published_rate)
    live = 6 if quick else 32
    together = _play(played, fleet("glm52-8xh200", count=count), BLIND, live)
    affine = _play(played, fleet("glm52-8xh200", count=count), "llmd-precise", live)
    yield _row(
        "W11",
        f"{live} agents: mean TTFT, round-robin -> cache-aware (routing takes 91.4 of 93.9 % there)",
        _ttft,
        together,
        affine,
        "most of the gain is routing's",
    )


# --- W12 ---


def w12(quick: bool) -> Iterator[Row]:
    """Conversations behind 49,152 shared tokens: computed by every replica, or fetched from one another.

    Replicas that pull from each other are played as a store that all read, at the published speed of pulls.
    """
    users, sessions = (16, 24) if quick else (128, 192)
    count = 4 if quick else 8
    played = generate(f"w12:users={users},sessions={sessions}")
    pull = Store(tokens=20_000_000, gb_per_s=PULL.gb_per_s * count, latency_s=PULL.setup_s)
    for name, groups in (
        ("together", [_oss_group("both", count)]),
        (
            "pools",
            [
                _oss_group("prefill", count // 2, role="prefill"),
                _oss_group("decode", count // 2, role="decode"),
            ],
        ),
    ):
        without, fetched = (
            _play(played, _oss(f"w12 {name}", *groups, store=store), BLIND) for store in (None, pull)
        )
        published = "6.83 -> 1.09 s" if name == "pools" else "2.890 -> 3.023 requests/s"
        yield _row("W12", f"{name}: mean TTFT, recompute -> fetch", _ttft, without, fetched, published)
    precise = _play(played, _oss("w12 both", _oss_group("both", count), store=pull), "llmd-precise")
    blind = _play(played, _oss("w12 both", _oss_group("both", count)), BLIND)
    yield _row(
        "W12",
        "together: output, neither -> fetch and cache-aware routing",
        _rate,
        blind,
        precise,
        "2.890 -> 3.210 requests/s",
    )


# --- negative controls ---


def controls(traces: Path | None, quick: bool) -> Iterator[Row]:
    """Where tiers and separate pools must not look good."""
    agents = _agents(traces, quick)
    count, live = (2, 6) if quick else (8, 32)
    split = (1, 1) if quick else (4, 4)
    tokens = 430_000 if quick else 598_000
    small = fleet("glm52-8xh200", count=count, kv_tokens=tokens)
    pooled = apart("glm52-8xh200", *split)
    pooled = msgspec.structs.replace(
        pooled, groups=[msgspec.structs.replace(each, kv_tokens=tokens) for each in pooled.groups]
    )
    together = _play(agents, small, "llmd-precise", live)
    away = _play(agents, pooled, BLIND, live)
    ours = _play(agents, pooled, OURS, live)
    name = f"{live} agents, small decode memory"
    yield _row(
        "controls",
        f"{name}: mean TTFT, cache-aware together -> every prompt sent away",
        _ttft,
        together,
        away,
        "TTFT +72 %, decode KV 97 % full (agentic-kvc)",
        better=False,
    )
    yield _row(
        "controls",
        f"{name}: mean TTFT, every prompt sent away -> only those that gain",
        _ttft,
        away,
        ours,
        "TTFT p50 -49 %, p90 -56 % (agentic-kvc: heavy prefills only)",
    )
    blind = _play(agents, small, BLIND, live)
    yield Row(
        "controls",
        f"{name}: token hit rate, round-robin -> cache-aware",
        True,
        False,
        blind.token_hit_rate,
        together.token_hit_rate,
        "",
        "20.8 -> 44.7 % (agentic-kvc)",
    )
    yield from _short_prompts(quick)
    yield from _slow_tier(quick)
    if available("mooncake", traces) and not quick:
        yield from _toolagent(traces)


def _short_prompts(quick: bool) -> Iterator[Row]:
    """A threshold of a few tokens sends nearly everything away: warm turns of W7 wait for nothing."""
    played = generate("w7:users=6" if quick else "w7:users=60")
    split = (1, 1) if quick else (4, 4)
    pools = apart("qwen3-32b-tp2-h100", *split)
    patient = msgspec.structs.replace(pools, timeout_s=None)
    away, chosen = _play(played, patient, BLIND), _play(played, patient, OURS)
    yield _row(
        "controls",
        "W7: mean TTFT, chosen in seconds -> every prompt sent away (a threshold of 16 tokens does)",
        _ttft,
        chosen,
        away,
        "up to 20x worse (BLIS, fixed 16-token threshold)",
        better=False,
    )


def _slow_tier(quick: bool) -> Iterator[Row]:
    """Fetching at 0.2 GB/s takes ten times as long as computing; engines fetch whatever they find."""
    count = 2 if quick else 8
    played = shared_prefix("W3", 31 * count, 5, (16_000, 256, 256), [(3 * count, 30), (2 * count, 40)], 0)
    off, slow = (
        _play(
            played,
            fleet("qwen3-32b-tp2-h100", count=count, kv_tokens=298_000, host=tier),
            "llmd-precise",
        )
        for tier in (None, HostTier(tokens=1_312_500, gb_per_s=0.2))
    )
    yield _row(
        "controls",
        "W3: mean TTFT, no tier -> a tier slower than recompute (0.2 GB/s)",
        _ttft,
        off,
        slow,
        "by the constants: 1.3 ms a token fetched, 0.05 computed",
        better=False,
    )


def _toolagent(traces: Path | None) -> Iterator[Row]:
    """DynoSim: separate pools worse than together on the tool agents' trace; here its synthetic sibling."""
    played = workload("mooncake", None, 0, traces)
    base = fleet("qwen3-32b-tp2-h100", latency="qwen3-32b/2xh200")
    groups = [
        msgspec.structs.replace(base.groups[0], name=role, role=role, count=4)
        for role in ("prefill", "decode")
    ]
    pools = msgspec.structs.replace(base, groups=groups)
    together = _play(played, base, "llmd-precise")
    yield _row(
        "controls",
        "Mooncake synthetic, Qwen3-32B TP2 H200: mean TTFT, 8 together -> 4P + 4D",
        _ttft,
        together,
        _play(played, pools, BLIND),
        "worse (DynoSim, toolagent)",
        better=False,
    )


def figures_of(rows: list[Row]) -> list[Figure]:
    """One figure a row: after as part of before, with the direction as its target."""
    figures = []
    for row in rows:
        ratio = row.after / row.before if row.before else float("inf")
        lower = row.lower_is_better is row.better
        made = figure(
            f"{row.group}. {row.what}: {row.before:.4g} -> {row.after:.4g} {row.unit}".rstrip()
            + f" (published: {row.published})",
            [ratio],
            "x",
            at_most=1.0 if lower else None,
            at_least=None if lower else 1.0,
            baseline=row.before,
            cmd=CMD,
        )
        # From the unrounded figures.
        figures.append(replace(made, held=row.agrees))
    return figures
