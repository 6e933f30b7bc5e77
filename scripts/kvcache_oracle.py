"""Ask PyPI `kvcache-simulator` 0.1.3 for the values that tests/sim/test_arithmetic.py has recorded.

    python -m venv oracle-venv && oracle-venv/bin/pip install kvcache-simulator==0.1.3
    python scripts/kvcache_oracle.py oracle-venv/bin/kvcache-simulator synthetic_trace.jsonl.xz

The trace is Mooncake's synthetic one. Prints one line a cache size: blocks, hit tokens of LRU, hit tokens
of the optimal rule. It counts the last half of the requests, and lets a prompt that ends with a known
partial block use all of it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sumibi.bench.traces.lines import read_lines

OPTIONS = (
    "--model glm-5.2 --kv-precision fp8_int8 --indexer-precision fp4_int4 --policies lru,optimal"
    " --backend python --no-progress --format json"
)


def main(simulator: str, trace: Path) -> None:
    """Run it on a copy of the trace with the `block_size` that it wants in each line."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as copy:
        for _, line in read_lines(trace):
            copy.write(json.dumps(json.loads(line) | {"block_size": 512}) + "\n")
        copy.flush()
        command = [simulator, "run", "--trace", copy.name, *OPTIONS.split()]
        run = subprocess.run(command, capture_output=True, check=True, timeout=600)
    found = json.loads(run.stdout)
    print(f"bound {found['ceiling']['hitTokens']:_} of {found['metadata']['totalMeasuredTokens']:_}")
    for point in found["points"]:
        lru, optimal = (point["results"][name]["hitTokens"] for name in ("lru", "optimal"))
        print(f"({point['cacheBlocks']:_}, {lru:_}, {optimal:_}),")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
