"""`sumibi bench claims`: figures that others state for KV-aware serving, each put to the test it allows.

A claim is a before and an after; here they are what a load-blind fleet and ours give for the same traffic
and engines, with what was possible beside them. Where it does not hold, that is a finding too.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sumibi.bench.grid import apart, cache_point, fleet, mooncake, serving_point
from sumibi.bench.judging import Runs, gather, hit_rate
from sumibi.bench.pool import Kept, default_cache, fingerprint, run
from sumibi.bench.replay import Report
from sumibi.bench.report import Figure, figure, statement
from sumibi.bench.routing import STANDARD
from sumibi.bench.scenes import Outcome, Scene, points
from sumibi.bench.traffic import available
from sumibi.bench.verdicts import OURS
from sumibi.sim.latency import StepTimes, named

BLIND = "round-robin"
CMD = "sumibi bench claims"
CHUNKS = (8_192, 2_048)
BATCH, CONTEXT = 32, 8_192
"""Sequences that decode beside a chunk, and what each has read."""
PD_USERS = (32, 96)
SPLITS = ((1, 7), (2, 6), (4, 4))
"""Replicas for prefill and for decode, of eight."""
TOGETHER = "8 together"
PD_HOURS = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One test of a claim."""

    what: str
    before: float
    after: float
    unit: str
    bound: float | None
    """What no router gets past, in the same unit."""
    held: bool | None
    """None: for the reader."""


@dataclass(slots=True)
class Claim:
    """One claim and what became of it."""

    title: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def bench_claims(
    *, traces: Path | None, jobs: int | None, report: Report, cache: Path | None = None
) -> list[Claim]:
    """Play what the claims need and judge them. Raises ConfigError, EnvironmentProblem, TraceError."""
    agents = "weka" if available("weka", traces) else STANDARD
    chosen = [scene for scene in _scenes(agents) if available(scene.traffic, traces)]
    done, failed = run(
        points(chosen, (OURS, BLIND)),
        traces=traces,
        jobs=jobs or os.cpu_count() or 1,
        kept=Kept(cache or default_cache(), fingerprint(traces)),
        report=report,
    )
    claims = claims_of([one for one in gather(done) if len(one.played) == 2])
    if agents != "weka":
        claims[0].notes.append(f"No recorded agent sessions here: made-up ones ({agents}) stand in.")
    claims[0].notes += [
        f"failed: {each.point.scene.name}, {each.point.policy}: {each.cause}" for each in failed
    ]
    return claims


def claims_of(runs: Sequence[Runs]) -> list[Claim]:
    """All claims, from runs under both policies."""
    return [
        _hit_rate(runs),
        _tiers(runs),
        _median_ttft(runs),
        _apart(runs),
        _stalls(runs),
        _system_prompt(runs),
    ]


def figures_of(claims: Sequence[Claim]) -> list[Figure]:
    """For `--json`."""
    figures = []
    for number, claim in enumerate(claims, 1):
        for finding in claim.findings:
            made = figure(
                f"{number}. {finding.what}", [finding.after], finding.unit, baseline=finding.before, cmd=CMD
            )
            figures.append(replace(made, held=finding.held))
        figures += [statement(f"{number}. {claim.title}", note) for note in claim.notes]
    return figures


def show(claims: Sequence[Claim]) -> None:
    """Print claim by claim."""
    print(
        f"Simulated: {BLIND} -> {OURS} for the same requests on equal fleets, unless a line says otherwise."
        "\nEngine steps take +-15 %, our router starts from speeds wrong by up to 3x and sees no session ids."
        "\nBound: what no router gets past."
    )
    for number, claim in enumerate(claims, 1):
        print(f"\n{number}. {claim.title}")
        for one in claim.findings:
            mark = {True: "holds", False: "DOES NOT HOLD", None: ""}[one.held]
            bound = "" if one.bound is None else f"  (bound {_number(one.bound)}{_share(one)})"
            change = f"{_number(one.before)} -> {_number(one.after)} {one.unit}".rstrip()
            print(f"   {one.what:<66} {change}{_part(one)}{bound}  {mark}".rstrip())
        for note in claim.notes:
            print(f"   {note}")


def _number(value: float) -> str:
    return f"{value:.4g}"


def _share(one: Finding) -> str:
    return f", {one.after / one.bound:.1%} of it" if one.bound and not one.unit else ""


def _part(one: Finding) -> str:
    return f", {one.after / one.before - 1:+.0%}" if one.before and one.unit != "" else ""


def _scenes(agents: str) -> list[Scene]:
    eight = fleet("70b-tp4-h100", count=8)
    scenes = [cache_point(agents, 32, 16_384)]
    scenes += [cache_point(agents, 64, blocks) for blocks in (4_096, 8_192, 16_384, 32_768)]
    scenes += mooncake()[:1]
    scenes += [
        Scene(row="70B", name=f"{users} agents, 8 x Llama-70B", traffic=agents, users=users, fleet=eight)
        for users in (16, 32, 64)
    ]
    scenes += [serving_point(agents, 64, "0.6 M", host=host) for host in (False, True)]
    scenes.append(serving_point(agents, 32, "1.77 M", host=False))
    scenes += [
        Scene(row="P/D", name=f"{users} agents, {name}", traffic=agents, users=users, fleet=spec)
        for users in PD_USERS
        for name, spec in [(TOGETHER, fleet("glm52-8xh200"))]
        + [(_split(*split), apart("glm52-8xh200", *split)) for split in SPLITS]
    ]
    scenes += [
        Scene(
            row="chunks",
            name=f"W7, 60 users, {_split(*split)}",
            traffic="w7:users=60",
            fleet=apart("qwen3-32b-tp2-h100", *split),
        )
        for split in SPLITS[1:]
    ]
    scenes += [
        Scene(
            row="chunks",
            name=f"W7, 60 users, chunks of {chunk:,}",
            traffic="w7:users=60",
            fleet=fleet("qwen3-32b-tp2-h100", chunk_tokens=chunk),
        )
        for chunk in CHUNKS
    ]
    scenes.append(
        Scene(
            row="W1",
            name="W1",
            traffic="w1",
            fleet=fleet("70b-tp4-h100"),
            rates=(5, 3, 5, 8, 10, 12, 15, 18, 20),
        )
    )
    return scenes


def _of(runs: Runs, policy: str) -> Outcome:
    return runs.played[policy][0]


def _hit_rate(all_runs: Sequence[Runs]) -> Claim:
    claim = Claim("Token hit rate from 35 % to 70 %")
    for runs in all_runs:
        if runs.scene.row not in ("cache grid", "Mooncake"):
            continue
        if runs.scene.row == "cache grid" and runs.scene.name not in (
            "32 users, 16,384 blocks",
            "64 users, 8,192 blocks",
        ):
            continue
        before, after = _of(runs, BLIND), _of(runs, OURS)
        what = f"{runs.scene.row}, {runs.scene.name}"
        held = hit_rate(after) >= 0.70
        claim.findings.append(
            Finding(what, hit_rate(before), hit_rate(after), "", after.bound_hit_rate, held)
        )
        if after.bound_hit_rate < 0.70:
            claim.notes.append(
                f"{what}: an endless cache finds {after.bound_hit_rate:.1%}; 70 % cannot be had there."
            )
        elif not held:
            claim.notes.append(
                f"{what}: one LRU cache of all replicas' memory together finds"
                f" {after.pooled_lru_hit_rate:.1%}: most of what lacks is memory, see the next claim."
            )
    return claim


def _tiers(all_runs: Sequence[Runs]) -> Claim:
    """Device and host memory, each block in one of them, count as one LRU cache of both sizes."""
    claim = Claim("KV below the device: 64 agents, 4,096 blocks (0.26 M tokens) on each of 8 devices")
    by_name = {runs.scene.name: runs for runs in all_runs}
    base = by_name.get("64 users, 4,096 blocks")
    for blocks in (8_192, 16_384, 32_768):
        more = by_name.get(f"64 users, {blocks:,} blocks")
        if base is not None and more is not None:
            after = _of(more, OURS)
            what = f"hit rate, + {blocks - 4_096:,} blocks of host memory"
            claim.findings.append(
                Finding(what, hit_rate(_of(base, OURS)), hit_rate(after), "", after.pooled_lru_hit_rate, None)
            )
    without, host = by_name.get("64 users, 0.6 M tokens"), by_name.get("64 users, 0.6 M tokens + host")
    if without is not None and host is not None:
        before, after = _of(without, OURS), _of(host, OURS)
        claim.findings.append(
            Finding(
                "mean TTFT, GLM-5.2, 0.6 M tokens, + twice that at 20 GB/s",
                before.whole.ttft_mean_s,
                after.whole.ttft_mean_s,
                "s",
                after.least_ttft_mean_s,
                None,
            )
        )
    claim.notes.append(
        "Bound of the hit rates: one LRU cache of all memory together. Restoring costs time in the last line"
        " only."
    )
    return claim


def _median_ttft(all_runs: Sequence[Runs]) -> Claim:
    claim = Claim("Median TTFT 70 to 85 % lower on multi-turn agent work, equal load")
    for runs in all_runs:
        if runs.scene.row == "70B" or (runs.scene.row, runs.scene.name) == (
            "serving grid",
            "32 users, 1.77 M tokens",
        ):
            before, after = _of(runs, BLIND), _of(runs, OURS)
            what = runs.scene.name if runs.scene.row == "70B" else f"{runs.scene.name}, 8 x GLM-5.2"
            held = after.ttft_p50_s <= 0.30 * before.ttft_p50_s
            claim.findings.append(
                Finding(what, before.ttft_p50_s, after.ttft_p50_s, "s", after.least_ttft_p50_s, held)
            )
            claim.findings.append(
                Finding(
                    "  its mean",
                    before.whole.ttft_mean_s,
                    after.whole.ttft_mean_s,
                    "s",
                    after.least_ttft_mean_s,
                    None,
                )
            )
    claim.notes.append("Users wait for answers before they go on, so the slower fleet gets requests later.")
    return claim


def _split(prefill: int, decode: int) -> str:
    return f"{prefill}P + {decode}D"


def _apart(all_runs: Sequence[Runs]) -> Claim:
    claim = Claim(
        "Prefill and decode on separate pools, with routing: TTFT 4x, +60 % requests (GLM-5.2, 8 x H200)"
    )
    by_name = {runs.scene.name: runs for runs in all_runs if runs.scene.row == "P/D"}
    for users in PD_USERS:
        together = by_name.get(f"{users} agents, {TOGETHER}")
        splits = {
            name: by_name[f"{users} agents, {name}"]
            for name in (_split(*split) for split in SPLITS)
            if f"{users} agents, {name}" in by_name
        }
        if together is None or not splits:
            continue
        best = min(splits, key=lambda name: _of(splits[name], OURS).whole.ttft_mean_s)
        after = _of(splits[best], OURS)
        for policy in (BLIND, OURS):
            before = _of(together, policy)
            what = f"{users} agents, together with {policy} -> {best} with {OURS}"
            ttft = before.whole.ttft_mean_s, after.whole.ttft_mean_s
            served = _served(before), _served(after)
            claim.findings += [
                Finding(f"mean TTFT, {what}", *ttft, "s", after.least_ttft_mean_s, ttft[1] <= ttft[0] / 4),
                Finding(
                    f"requests in {PD_HOURS} h, {what}",
                    *served,
                    "requests",
                    None,
                    served[1] >= 1.6 * served[0],
                ),
            ]
        for policy in (OURS, BLIND):
            row = {TOGETHER: together, **splits}
            figures = (
                f"{name}: {_number(_of(runs, policy).whole.ttft_mean_s)} s,"
                f" p99 between tokens {1_000 * _of(runs, policy).itl_p99_s:.0f} ms,"
                f" hit rate {hit_rate(_of(runs, policy)):.1%}"
                for name, runs in row.items()
            )
            claim.notes.append(f"{users} agents, {policy}, mean TTFT: {'; '.join(figures)}")
    if claim.findings:
        claim.notes += [
            "Sixty-four GPUs in each fleet, 1.77 M tokens of KV a replica: whoever finds no room where it"
            " decodes waits. KV goes over 40 GB/s; every pair pays HTTP twice. The split with the lowest mean"
            " TTFT is shown, the others are in the notes.",
            "What is gained over round-robin is routing's; the lines with the same policy before and after"
            " say what separate pools add. Agents' turns have few new tokens and long prefixes, which lie on"
            " two replicas once a pair has computed them: pools cost cache, and few turns gain from them.",
        ]
    return claim


def _served(one: Outcome) -> float:
    """Requests served in the first hours."""
    hours = one.served_by_hour
    return float(hours[min(PD_HOURS, len(hours)) - 1]) if hours else 0.0


def chunk_stall_s(times: StepTimes, chunk_tokens: int, cached_tokens: int) -> float:
    """A step that computes a chunk after what is cached, beside a batch that decodes."""
    return times.step_s(times.chunk_s(chunk_tokens, cached_tokens), BATCH, BATCH * CONTEXT)


def _stalls(all_runs: Sequence[Runs]) -> Claim:
    claim = Claim("P99 time between tokens from 900 to 100 ms")
    for hardware in ("qwen3-32b/2xh100", "llama-3.1-70b/4xh100"):
        times = named(hardware)
        before, after = (1_000 * chunk_stall_s(times, chunk, 32_768) for chunk in CHUNKS)
        alone_ms = 1_000 * times.decode_line(BATCH, BATCH * CONTEXT)[0]
        what = f"one step, chunk of 8,192 -> 2,048 after 32,768, {hardware}"
        claim.findings.append(Finding(what, before, after, "ms", alone_ms, after <= 100.0))
    by_name = {runs.scene.name: runs for runs in all_runs}
    wide, narrow = (by_name.get(f"W7, 60 users, chunks of {chunk:,}") for chunk in CHUNKS)
    for policy in (BLIND, OURS):
        if wide is not None and narrow is not None:
            claim.findings.append(
                Finding(
                    f"p99, W7, chunks of 8,192 -> 2,048, {policy}",
                    1_000 * _of(wide, policy).itl_p99_s,
                    1_000 * _of(narrow, policy).itl_p99_s,
                    "ms",
                    None,
                    1_000 * _of(narrow, policy).itl_p99_s <= 100.0,
                )
            )
    for runs in (wide, narrow):
        if runs is not None:
            before_ms, after_ms = (1_000 * _of(runs, policy).itl_p99_s for policy in (BLIND, OURS))
            what = f"p99, {runs.scene.name}, {BLIND} -> {OURS}"
            claim.findings.append(Finding(what, before_ms, after_ms, "ms", None, after_ms <= 100.0))
    for name in (_split(*split) for split in SPLITS):
        pools = by_name.get(f"W7, 60 users, {name}")
        if wide is None or pools is None:
            continue
        for policy in (BLIND, OURS):
            before_one, after_one = _of(wide, policy), _of(pools, policy)
            claim.findings.append(
                Finding(
                    f"p99, W7, 60 users, 8 together -> {name}, {policy}",
                    1_000 * before_one.itl_p99_s,
                    1_000 * after_one.itl_p99_s,
                    "ms",
                    None,
                    1_000 * after_one.itl_p99_s <= 100.0,
                )
            )
            claim.findings.append(
                Finding(
                    "  its mean TTFT",
                    before_one.whole.ttft_mean_s,
                    after_one.whole.ttft_mean_s,
                    "s",
                    None,
                    None,
                )
            )
    claim.notes.append(
        "Bound of a step: the same batch decodes by itself. On one pool smaller chunks and fewer of them are"
        " all there is. On pools of their own round-robin sends every prompt away, whatever that costs before"
        f" the first token; {OURS} lets those wait who decode where that is the smaller loss."
    )
    return claim


def _system_prompt(all_runs: Sequence[Runs]) -> Claim:
    claim = Claim("A cached system prompt: TTFT from 3 s to 1 s")
    times = named("llama-3.1-70b/4xh100")
    cold_s, warm_s = times.alone_s(15_000 + 512), times.alone_s(512, 15_000)
    what = "service alone, 15,000 of system prompt + 512, 70B on 4 x H100"
    claim.findings.append(Finding(what, cold_s, warm_s, "s", None, warm_s <= cold_s / 3))
    for runs in all_runs:
        if runs.scene.row != "W1":
            continue
        for at, rate in enumerate(runs.scene.rates):
            if at and rate in (3, 10, 20):
                before, after = _of(runs, BLIND).stages[at], _of(runs, OURS).stages[at]
                claim.findings.append(
                    Finding(
                        f"W1 (system prompts of 8,000), {rate} requests/s: mean TTFT",
                        before.ttft_mean_s,
                        after.ttft_mean_s,
                        "s",
                        None,
                        after.ttft_mean_s <= before.ttft_mean_s / 3,
                    )
                )
    claim.notes.append(
        f"3 s are no service time: computing the whole prompt takes {cold_s:.2f} s. They need a queue, and"
        " then what a router gains is the queue."
    )
    return claim
