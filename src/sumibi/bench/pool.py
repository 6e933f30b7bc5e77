"""Many points on several cores, each kept on disk when it is done, so that a run that was broken off goes on.

What is kept is found again only while nothing that could change it has changed: the code that plays points
(its files' hash), the point, the recorded traffic.
"""

import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from hashlib import sha256
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from shutil import rmtree
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask
from threading import Thread
from time import monotonic

import msgspec

import sumibi
from sumibi.bench.playing import play
from sumibi.bench.replay import Report
from sumibi.bench.scenes import Outcome, Point
from sumibi.bench.traffic import RECORDED
from sumibi.core.errors import EnvironmentProblem

_PACKAGES = ("core", "routing", "sim", "bench")
_ONLY_SHOWS = frozenset(
    {"routing.py", "judging.py", "verdicts.py", "tables.py", "plots.py", "claims.py", "report.py"}
    | {"grid.py", "pool.py", "published.py", "program_figures.py", "recorded.py", "replay_report.py"}
    | {"pictures.py"}
)
"""Files of `bench` that judge and show outcomes, and the grid, of which a point is part."""

_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Outcome).decode


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/sumibi/bench`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sumibi" / "bench"


def fingerprint(traces: Path | None) -> str:
    """Hash of the code that plays points and of the recorded traffic."""
    digest = sha256()
    root = Path(sumibi.__file__).parent
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if package != "bench" or path.name not in _ONLY_SHOWS:
                digest.update(f"{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    for name in RECORDED.values() if traces is not None else ():
        path = (traces / name) if traces is not None else Path()
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


KEPT_VERSIONS = 8
"""Of the code, the latest used; outcomes of older ones are deleted."""


class Kept:
    """Outcomes on disk, one small file a point. Raises EnvironmentProblem where it cannot write."""

    def __init__(self, directory: Path, of: str) -> None:
        self._directory = directory / of
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._directory.touch()
            probe = self._directory / f"probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as cause:
            raise _cannot_keep(directory, cause) from cause
        versions = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in versions[KEPT_VERSIONS:]:
            rmtree(old, ignore_errors=True)

    def _path(self, point: Point) -> Path:
        """What a run depends on, whatever table it is for."""
        scene = msgspec.structs.replace(point.scene, row="", name="", seeds=1)
        plain = Point(scene, point.policy, point.seed)
        return self._directory / sha256(_encode(plain)).hexdigest()[:32]

    def get(self, point: Point) -> Outcome | None:
        """None if it is not there, or unreadable."""
        try:
            return _decode(self._path(point).read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None

    def put(self, point: Point, outcome: Outcome) -> None:
        """Whole or not at all."""
        path = self._path(point)
        made = path.with_suffix(f".{os.getpid()}")
        try:
            made.write_bytes(_encode(outcome))
            made.replace(path)
        except OSError as cause:
            raise _cannot_keep(path.parent, cause) from cause


def _cannot_keep(directory: Path, cause: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"cannot keep what was played in {directory}: {cause.strerror}. XDG_CACHE_HOME names the directory"
        " above it"
    )


class Failed(msgspec.Struct, frozen=True):
    """A point that could not be played."""

    point: Point
    cause: str


def run(
    points: Sequence[Point],
    *,
    traces: Path | None,
    jobs: int,
    kept: Kept,
    report: Report,
) -> tuple[list[tuple[Point, Outcome]], list[Failed]]:
    """Outcomes of all points, in their order, and what failed. `report` is told of progress and time left.

    Whatever ends it early, Ctrl-C too, ends its processes at once; what was played until then is kept.
    """
    if not points:
        return [], []
    found: dict[int, Outcome] = {}
    failed: list[Failed] = []
    open_: list[int] = []
    for number, point in enumerate(points):
        outcome = kept.get(point)
        if outcome is None:
            open_.append(number)
        else:
            found[number] = outcome
    known = len(found)
    clock = _Clock(points, found)
    began_s = monotonic()

    def tell() -> None:
        done = len(found) + len(failed)
        left_s = clock.left_s([n for n in open_ if n not in found])
        before = f" ({known} kept from before)" if known else ""
        what = f"{done} of {len(points)} runs{before}"
        if left_s is not None:
            what += f", about {_duration(left_s / min(jobs, max(1, len(open_))))} left"
        if done == len(points):
            what = f"{len(points)} runs{before} in {_duration(monotonic() - began_s)}"
        report("simulations", what, done / len(points))

    tell()
    if open_:
        # spawned, not forked: the parent draws progress in a thread
        others = set(active_children())
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
            running: dict[Future[Outcome], int] = {}
            waiting = iter(open_)
            try:
                while True:
                    while len(running) < 2 * jobs and (number := next(waiting, -1)) >= 0:
                        running[_submit(pool, points[number], traces)] = number
                    if not running:
                        break
                    ended, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in ended:
                        number = running.pop(future)
                        try:
                            outcome = future.result()
                        except BrokenExecutor as problem:
                            raise EnvironmentProblem(
                                "a process that played a simulation was killed: out of memory? Fewer --jobs"
                                " need less; what was played is kept"
                            ) from problem
                        except Exception as problem:
                            # a bug at one point of hundreds is reported; the others go on
                            failed.append(Failed(points[number], f"{type(problem).__name__}: {problem}"))
                            continue
                        found[number] = outcome
                        kept.put(points[number], outcome)
                    tell()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in set(active_children()) - others:
                    worker.terminate()  # else the simulations that run now are waited for
                raise
    return [(points[number], found[number]) for number in sorted(found)], failed


def _submit(pool: ProcessPoolExecutor, point: Point, traces: Path | None) -> Future[Outcome]:
    """Workers are started in here, and inherit that Ctrl-C is not for them: they would each print where they
    were. The parent ends them.
    """
    before = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        return pool.submit(play, point, traces)
    finally:
        pthread_sigmask(SIG_SETMASK, before)


def _end_with_parent() -> None:
    """In a worker: whatever ends the parent ends it too, in the middle of a simulation if need be."""
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()


class _Clock:
    """How long runs will take: as those of the same scene, else of the same row, else of any."""

    def __init__(self, points: Sequence[Point], found: dict[int, Outcome]) -> None:
        self._points, self._found = points, found

    def left_s(self, numbers: Sequence[int]) -> float | None:
        """Seconds of work on one core; None before anything is known."""
        if not self._found:
            return None
        scenes: dict[str, list[float]] = {}
        for number, outcome in self._found.items():
            scene = self._points[number].scene
            for key in (f"{scene.row}/{scene.name}", scene.row, ""):
                scenes.setdefault(key, []).append(outcome.wall_s)
        total = 0.0
        for number in numbers:
            scene = self._points[number].scene
            for key in (f"{scene.row}/{scene.name}", scene.row, ""):
                if walls := scenes.get(key):
                    total += sum(walls) / len(walls)
                    break
        return total


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
