"""`python -m benchmarks.directions`: published effects of tiers and separate pools, played."""

import argparse
from pathlib import Path

from sumibi.bench.directions import directions
from sumibi.bench.effects import CMD, figures_of
from sumibi.bench.report import finish, machine, statement
from sumibi.bench.traffic import default_traces

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Play, write, print; 1 if a direction does not come out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer replicas, requests and points")
    parser.add_argument("--traces", type=Path, default=default_traces(ROOT))
    parser.add_argument("--json", type=Path, default=Path("out/bench-directions.json"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/directions/RESULTS.md")
    args = parser.parse_args()
    rows = []
    for row in directions(args.traces, quick=args.quick):
        mark = "agrees" if row.agrees else "DOES NOT AGREE"
        print(f"{mark}: {row.group}. {row.what}: {row.before:.4g} -> {row.after:.4g} {row.unit}", flush=True)
        rows.append(row)
    said = [
        ("command", CMD + (" --quick" if args.quick else "")),
        ("agree", f"{sum(row.agrees for row in rows)} of {len(rows)} directions"),
        (
            "reading",
            "value: after / before. Held: the direction is the published one; how large the effect is, is"
            " not tested. Group `controls`: where tiers and pools are published, or bound, not to pay",
        ),
        (
            "scale",
            "a quarter to a half of the published fleets and traffic, made-up agents for W11"
            if args.quick
            else "the published fleets and traffic; the 120 recorded agents' sessions for W11",
        ),
        (
            "estimated",
            "gpt-oss-120b's prefill (W4, W12) is fitted to published times to recompute, the speed of pulls"
            " to published ones; all other step times are a kernel database's. Of W12's coding sessions only"
            " ranges and the mean prompt are published",
        ),
        (
            "W12",
            "its figures come from three experiments: documents (8 x H200 over TCP), coding sessions"
            " (Qwen3-30B-A3B, 2P + 4D), recorded agents (GLM-5.2, 2P + 2D of 8 H200 each). The last is played"
            " on the same GPUs together, as the policies compared make no pairs, and counted over the first"
            " hour",
        ),
        (
            "not played",
            "BLIS's and agentic-kvc's own thresholds (every prompt sent away stands for the first, our"
            " router's choice for the second); Mooncake's tool agents (their synthetic sibling is, not in"
            " the quick run); how eviction orders fare (see benchmarks/tiers/EVICTIONS.md)",
        ),
    ]
    figures = [machine(), *(statement(name, text) for name, text in said), *figures_of(rows)]
    return finish(figures, args.json, args.results, "Published directions of tiers and separate pools")


if __name__ == "__main__":
    raise SystemExit(main())
