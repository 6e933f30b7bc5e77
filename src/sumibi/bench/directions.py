"""Published effects of KV tiers and of separate pools, played: does the direction come out, not the number.

W3 (host memory below the device), W4 (prefill and decode apart), W11 (recorded agents), W12 (KV fetched from
peers: `bench.fetched`), and the negative controls that go with any claim for separate pools.
What does not come out is said as plainly as what does.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from sumibi.bench.effects import BLIND, OURS, Row, e2e, output_rate, play, row, scraped, ttft
from sumibi.bench.fetched import OSS_KV_BYTES, c64, w12, w12_controls
from sumibi.bench.grid import apart, fleet
from sumibi.bench.traffic import available, workload
from sumibi.bench.workloads import generate
from sumibi.bench.workloads.groups import shared_prefix
from sumibi.sim.fleet import FleetSpec, Group, HostTier, LinkSpec
from sumibi.sim.results import Summary
from sumibi.sim.workload import Workload

W4_OUTPUT_TOKENS = 250


def directions(traces: Path | None, *, quick: bool) -> Iterator[Row]:
    """Play all, one after the other. `quick`: fewer requests and points, a few seconds each.

    Raises ConfigError, TraceError.
    """
    yield from w3(quick)
    yield from w4(quick)
    yield from w11(traces, quick)
    yield from w12()
    if not quick:
        yield from c64(_agents(traces, quick))
    yield from controls(traces, quick)


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
            play(
                played,
                fleet("qwen3-32b-tp2-h100", count=count, kv_tokens=298_000, host=tier),
                "llmd-precise",
            )
            for tier in (None, host)
        )
        what = f"{rate} requests/s: mean TTFT, host tier off -> on"
        yield row("W3", what, ttft, off, on, published)
        if rate == 20:
            what = f"{rate} requests/s: output, host tier off -> on"
            yield row("W3", what, output_rate, off, on, "114,663 -> 300,749 tok/s (input counted)")


# --- W4 ---


def _w4_fleets(part: int) -> tuple[FleetSpec, FleetSpec]:
    """Sixteen H200 together, and 8 x TP1 + 2 x TP4; KV as published (1.22 M tokens of one, about 10 M of
    four, 41.5 KB each). Each GPU has its own 400 Gb/s way (40 GB/s in practice): a decode engine has four.
    """
    one = Group(
        name="both",
        count=16 // part,
        latency="gpt-oss-120b/1xh200",
        kv_tokens=1_220_000,
        kv_bytes_per_token=OSS_KV_BYTES,
        link=LinkSpec(gb_per_s=40.0),
    )
    four = msgspec.structs.replace(
        one,
        name="decode",
        role="decode",
        count=2 // part,
        latency="gpt-oss-120b/4xh200",
        kv_tokens=10_000_000,
        link=LinkSpec(gb_per_s=160.0),
    )
    prefill = msgspec.structs.replace(one, name="prefill", role="prefill", count=8 // part)
    return scraped("w4 together", one), scraped("w4 apart", prefill, four)


def w4(quick: bool) -> Iterator[Row]:
    """5,000 tokens in, 250 out, 45 requests/s, no shared prefix; requests go around in turn in both."""
    part = 2 if quick else 1
    seconds = 20 if quick else 120
    per_s = 45 // part
    played = shared_prefix("W4", per_s * seconds, 1, (4_744, 256, W4_OUTPUT_TOKENS), [(per_s, seconds)], 0)
    together, pools = (play(played, spec, BLIND) for spec in _w4_fleets(part))
    yield Row(
        "W4",
        "mean time between tokens, together -> apart",
        True,
        True,
        _between_ms(together),
        _between_ms(pools),
        "ms",
        "25 -> 8 ms",
    )
    yield row("W4", "mean end to end, together -> apart", e2e, together, pools, "6.7 -> 3.5 s")
    yield row(
        "controls",
        "W4: separate pools lose TTFT, together -> apart",
        ttft,
        together,
        pools,
        "0.53 -> 1.4 s",
        better=False,
    )


def _between_ms(one: Summary) -> float:
    """Mean of W4's answers, which are all as long."""
    return 1_000 * (one.e2e_mean_s - one.ttft_mean_s) / (W4_OUTPUT_TOKENS - 1)


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
            play(
                played,
                fleet("glm52-8xh200", count=count, kv_tokens=tokens, host=tier),
                "llmd-precise",
                live,
            )
            for tier in (None, HostTier(tokens=4 * tokens, gb_per_s=20.0))
        )
        at = f"{live} agents"
        yield row("W11", f"{at}: mean TTFT, host tier off -> on", ttft, off, on, published_ttft)
        yield row("W11", f"{at}: output, host tier off -> on", output_rate, off, on, published_rate)
    live = 6 if quick else 32
    together = play(played, fleet("glm52-8xh200", count=count), BLIND, live)
    affine = play(played, fleet("glm52-8xh200", count=count), "llmd-precise", live)
    yield row(
        "W11",
        f"{live} agents: mean TTFT, round-robin -> cache-aware (routing takes 91.4 of 93.9 % there)",
        ttft,
        together,
        affine,
        "most of the gain is routing's",
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
    together = play(agents, small, "llmd-precise", live)
    away = play(agents, pooled, BLIND, live)
    ours = play(agents, pooled, OURS, live)
    name = f"{live} agents, small decode memory"
    yield row(
        "controls",
        f"{name}: mean TTFT, cache-aware together -> every prompt sent away",
        ttft,
        together,
        away,
        "TTFT +72 %, decode KV 97 % full (agentic-kvc)",
        better=False,
    )
    yield row(
        "controls",
        f"{name}: mean TTFT, every prompt sent away -> only those that gain",
        ttft,
        away,
        ours,
        "TTFT p50 -49 %, p90 -56 % (agentic-kvc: heavy prefills only)",
    )
    blind = play(agents, small, BLIND, live)
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
    yield from w12_controls()
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
    away, chosen = play(played, patient, BLIND), play(played, patient, OURS)
    yield row(
        "controls",
        "W7: mean TTFT, chosen in seconds -> every prompt sent away (a threshold of 16 tokens does)",
        ttft,
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
        play(
            played,
            fleet("qwen3-32b-tp2-h100", count=count, kv_tokens=298_000, host=tier),
            "llmd-precise",
        )
        for tier in (None, HostTier(tokens=1_312_500, gb_per_s=0.2))
    )
    yield row(
        "controls",
        "W3: mean TTFT, no tier -> a tier slower than recompute (0.2 GB/s)",
        ttft,
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
    together = play(played, base, "llmd-precise")
    yield row(
        "controls",
        "Mooncake synthetic, Qwen3-32B TP2 H200: mean TTFT, 8 together -> 4P + 4D",
        ttft,
        together,
        play(played, pools, BLIND),
        "worse (DynoSim, toolagent)",
        better=False,
    )
