"""Traffic of scenes: recorded or made up, half of it, in another order; kept, because many runs share it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from sumibi.bench.traces import read
from sumibi.bench.workloads import generate, generator_of
from sumibi.core.errors import ConfigError
from sumibi.sim.arithmetic import Request, Stream, prepare
from sumibi.sim.workload import Workload

RECORDED = {
    "weka": "weka/sessions.jsonl.xz",
    "mooncake": "mooncake/synthetic_trace.jsonl.xz",
}
"""Where recorded traffic lies below the directory of traces."""


def default_traces(checkout: Path) -> Path | None:
    """`shared/traces` beside the checkout, if it is there."""
    beside = checkout.parent / "shared" / "traces"
    return beside if beside.is_dir() else None


def available(traffic: str, traces: Path | None) -> bool:
    """Can it be played here? Made-up traffic always."""
    if generator_of(traffic):
        return True
    return traces is not None and (traces / RECORDED[traffic]).is_file()


@lru_cache(maxsize=2)
def _all(traffic: str, seed: int, traces: Path | None) -> Workload:
    if generator_of(traffic):
        return generate(traffic, seed=seed)
    if traces is None or traffic not in RECORDED:
        raise ConfigError(f"there is no traffic {traffic!r} here")
    return read(traces / RECORDED[traffic])


def played_by(policy: str, workload: Workload) -> Workload:
    """The traffic as a policy may see it: only session-sticky gets session ids, and it gets them always."""
    return replace(workload, names_sessions=policy == "session-sticky")


@lru_cache(maxsize=2)
def workload(traffic: str, part: int | None, seed: int, traces: Path | None) -> Workload:
    """The traffic. Made-up traffic is another for every seed, recorded traffic is the same.

    `part` 0 or 1: half of the sessions, by the hash of their names. Raises ConfigError, TraceError.
    """
    whole = _all(traffic, seed if generator_of(traffic) else 0, traces)
    if part is None:
        return whole
    ordered = sorted(whole.sessions, key=lambda session: _digest(session.name))
    return replace(whole, name=f"{whole.name}, half {part + 1}", sessions=ordered[part::2])


@lru_cache(maxsize=2)
def prepared(traffic: str, part: int | None, seed: int, traces: Path | None) -> Stream:
    """The same for cache arithmetic, where a seed permutes recorded sessions: it goes by their names."""
    made = workload(traffic, part, seed, traces)
    if seed and not generator_of(traffic):
        sessions = [replace(session, name=f"{seed} {session.name}") for session in made.sessions]
        made = replace(made, sessions=sessions)
    return prepare(made)


def _digest(name: str) -> str:
    return sha256(f"half {name}".encode()).hexdigest()


def live_tokens(requests: Sequence[Request]) -> int:
    """The most that the latest prompts of all live sessions add up to at any time, in tokens.

    A session is live from its first arrival to its last. That much a fleet has to hold to forget nothing
    that is asked for again (but what sessions share counts several times).
    """
    last_ms: dict[int, int] = {}
    for request in requests:
        last_ms[id(request.session)] = request.arrival_ms
    latest: dict[int, int] = {}
    total = most = 0
    ends = sorted((at, session) for session, at in last_ms.items())
    gone = 0
    for request in requests:
        while gone < len(ends) and ends[gone][0] < request.arrival_ms:
            total -= latest.pop(ends[gone][1], 0)
            gone += 1
        session = id(request.session)
        total += request.tokens - latest.get(session, 0)
        latest[session] = request.tokens
        most = max(most, total)
    return most
