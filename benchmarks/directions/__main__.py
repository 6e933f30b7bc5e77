"""`python -m benchmarks.directions`: published effects of tiers and separate pools, played."""

import argparse
from pathlib import Path

from sumibi.bench.directions import CMD, directions, figures_of
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
            "step times of gpt-oss-120b (W4, W12): prefill fitted to published recompute times, decode from"
            " bytes read over bandwidth; what comes out for W4 depends on the latter",
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
