"""`make fuzz`: every target for some minutes, guided by what it reaches; or one input once, to look at it.

    python tests/fuzz/run_fuzz.py [--minutes 1] [NAME ...]
    python tests/fuzz/run_fuzz.py NAME --input FILE

What was worth keeping is kept in out/fuzz/NAME and gone on from; an input that breaks a target is written to
out/fuzz/found/. Each target runs in a process of its own, ended by a time limit if it hangs.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = Path("out/fuzz")
LONGEST_INPUT = 512
HANG_S = 10
"""For one input."""
MEMORY_MB = 2048
START_S = 60.0
"""To import and instrument, beyond the time to fuzz."""


def main() -> int:
    """Fuzz, and say what was found; the exit code is 1 if anything was."""
    options = _options()
    if options.inside:
        return _fuzz(options.names[0], options.rest)
    if options.input is not None:
        return _once(options.names, options.input)
    from fuzz_targets import TARGETS

    unknown = [name for name in options.names if name not in TARGETS]
    if unknown:
        raise SystemExit(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    found = [name for name in options.names or TARGETS if not _run(name, options.minutes)]
    print(f"broken: {', '.join(found)}; see {OUT}/found" if found else "nothing was found")
    return 1 if found else 0


def _options() -> argparse.Namespace:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("names", nargs="*", help="targets [default: all]")
    known.add_argument("--minutes", type=float, default=1.0, help="for each target [default: 1]")
    known.add_argument("--input", type=Path, help="run the target once on this file")
    known.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options, options.rest = known.parse_known_args()
    if options.rest and not options.inside:
        known.error(f"unknown: {' '.join(options.rest)}")
    return options


def _once(names: list[str], path: Path) -> int:
    from fuzz_targets import TARGETS

    (name,) = names
    TARGETS[name](path.read_bytes())
    print(f"{name}: nothing wrong with {path}")
    return 0


def _run(name: str, minutes: float) -> bool:
    """Fuzz one target; True if nothing was found."""
    from fuzz_targets import seeds

    corpus, found = OUT / name, OUT / "found"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(name)):
        (corpus / f"seed-{number:03}").write_bytes(data)
    seconds = max(1, round(60 * minutes))
    command = [sys.executable, str(HERE / "run_fuzz.py"), name, "--inside", str(corpus)]
    command += [f"-max_total_time={seconds}", f"-max_len={LONGEST_INPUT}", f"-timeout={HANG_S}"]
    command += [f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={found}/{name}-", "-print_final_stats=1"]
    began = time.monotonic()
    log = OUT / f"{name}.log"
    with log.open("wb") as to:
        try:
            code = subprocess.run(
                command, stdout=to, stderr=to, timeout=seconds + START_S + HANG_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    said = log.read_text(errors="replace")
    runs = re.search(r"number_of_executed_units: (\d+)", said)
    reached = re.findall(r"cov: (\d+)", said)
    print(
        f"{name}: {'nothing found' if code == 0 else f'BROKEN, see {log}'}; "
        f"{int(runs[1]) if runs else 0:,} inputs in {time.monotonic() - began:.0f} s, "
        f"{reached[-1] if reached else '?'} places reached",
        flush=True,
    )
    return code == 0


def _fuzz(name: str, arguments: list[str]) -> int:
    """In the process of one target; does not come back."""
    import atheris

    with atheris.instrument_imports(
        include=["sumibi", "h11", "fuzz_bytes", "fuzz_engines", "fuzz_http", "fuzz_words"]
    ):
        from fuzz_targets import TARGETS
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
