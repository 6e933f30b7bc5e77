"""What a newcomer meets: clone into an empty directory with an empty HOME, do what README says, time it.

The commands are README's own: every line of the shell blocks between its two `newcomer` marks, except
the one that installs system packages and the one that clones (this script clones). So a README that
does not work fails here. Run it by `make newcomer`; it takes some minutes and needs ports 8000 to 8002
and 8080 free.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP_TIMEOUT_S = 1500
AGAIN = ["make up", "make down"]
"""Afterwards: how long a start takes when everything is there."""
_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_KEPT = ("PATH", "LANG", "PYTHON", "TORCH_INDEX", "SSL_CERT_FILE")
"""Variables a fresh machine has too; how pip reaches its index (PIP_*) is kept as well."""


def readme_commands(readme: str) -> list[str]:
    """The commands between the marks, continued lines joined, without comments."""
    marked = readme.split("<!-- newcomer -->")[1]
    lines = "".join(_BLOCK.findall(marked)).replace("\\\n", " ").splitlines()
    commands = [line.split("  #")[0].strip() for line in lines]
    return [c for c in commands if c and not c.startswith(("#", "sudo apt-get", "git clone"))]


def empty_home(home: Path) -> dict[str, str]:
    """The environment of somebody who has just got this machine."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("PIP_")}
    return kept | {"HOME": str(home), "TMPDIR": str(home)}


def run(command: str, directory: Path, environment: dict[str, str]) -> tuple[int, float]:
    """Exit code and seconds of one command; a session of its own, so that a timeout ends all of it."""
    print(f"\n$ {command}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(STEP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        code = process.wait()
    return code, time.monotonic() - began


def main() -> int:
    """Do every step until one fails; print the table either way."""
    commands = [*readme_commands((ROOT / "README.md").read_text()), *AGAIN]
    base = Path(tempfile.mkdtemp(prefix="newcomer-"))
    home, clone = base / "home", base / "sumibi"
    home.mkdir()
    environment = empty_home(home)
    table: list[tuple[str, int, float]] = []
    try:
        for command in [f"git clone --quiet {ROOT} {clone}", *commands]:
            code, seconds = run(command, clone if clone.exists() else base, environment)
            table.append((command, code, seconds))
            if code:
                break
    finally:
        if (clone / ".venv/bin/sumibi").exists():
            run(".venv/bin/sumibi down", clone, environment)
        shutil.rmtree(base, ignore_errors=True)
    print(f"\n{'seconds':>8}  exit  step")
    for command, code, seconds in table:
        print(f"{seconds:8.1f}  {code:4}  {command if len(command) < 80 else command[:77] + '...'}")
    passed = len(table) == len(commands) + 1 and all(code == 0 for _, code, _ in table)
    print("a newcomer gets there" if passed else "a newcomer gets stuck")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
