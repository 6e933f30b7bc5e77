"""Multi-turn workloads that llm-d publishes, each played by a number of users at once (closed loops).

Users are connections of a load client here: they begin within seconds, and make no pause between sessions.
"""

from collections.abc import Iterator
from random import Random

from sumibi.bench.workloads.history import Writer, bounded, geometric, lognormal_by_mean, named
from sumibi.sim.workload import Session, Workload

BLOCK_TOKENS = 64


def w7(*, users: int = 60, sessions: int | None = None, seed: int = 0) -> Workload:
    """Code generation: shared system 3,000 + 15-100k tokens of the session's own (uniform, mean 57.5k), 2-20
    turns (mean 6), 1,500 in and 800 out a turn; 10-100 users. `sessions`: three a user.
    """
    workload = _workload("W7", users)
    for random, writer in _sessions(workload, sessions or 3 * users, seed):
        history = writer.history().add(named("W7 system"), 3_000)
        history.add(writer.fresh(), random.randint(15_000, 100_000))
        after = None
        for _ in range(geometric(random, 6, 2, 20)):
            history.add(writer.fresh(), 1_500)
            after = writer.ask(history, 800, after=after, max_tokens=800)
    return workload


def w8(*, users: int = 200, sessions: int | None = None, seed: int = 0) -> Workload:
    """Reasoning: system 250, 1,000 in, 8,000 out; 50-450 users. `sessions`, of one turn: four a user."""
    workload = _workload("W8", users)
    for _, writer in _sessions(workload, sessions or 4 * users, seed):
        history = writer.history().add(named("W8 system"), 250).add(writer.fresh(), 1_000)
        writer.ask(history, 8_000, max_tokens=8_000)
    return workload


def w9(*, users: int = 40, requests_per_user: int = 20, seed: int = 0) -> Workload:
    """Agents of llm-d's TPU guide: shared system 3,000; a lognormal one of the session's own, 10-990k (mean
    160k, deviation 233.6k); 1-3,000 turns (mean 540); in 100-10k (mean 1,500, deviation 1,200), out 50-10k
    (425, 825), tools 1-100 s (15, 55); at most 262,144 tokens; 20 requests a user in all.

    Of a session as many turns are written as fit a user's requests; the user goes on with another.
    """
    workload = _workload("W9", users)
    left = users * requests_per_user
    for random, writer in _sessions(workload, left, seed):
        history = writer.history().add(named("W9 system"), 3_000)
        history.add(writer.fresh(), _own_system(random))
        turns = min(geometric(random, 540, 1, 3_000), requests_per_user, left)
        after = None
        for _ in range(turns):
            input_tokens = round(lognormal_by_mean(random, 1_500, 1_200, 100, 10_000))
            output_tokens = round(lognormal_by_mean(random, 425, 825, 50, 10_000))
            if history.tokens + input_tokens + output_tokens > 262_144:
                break
            history.add(writer.fresh(), input_tokens)
            delay_s = 0.0 if after is None else lognormal_by_mean(random, 15, 55, 1, 100)
            after = writer.ask(history, output_tokens, after=after, delay_s=delay_s, max_tokens=output_tokens)
            left -= 1
        if left <= 0:
            break
    workload.sessions = [session for session in workload.sessions if session.turns]
    return workload


def w12(*, users: int = 128, sessions: int = 192, seed: int = 0) -> Workload:
    """Conversations behind one long system prompt: 49,152 tokens, 6 turns of 256 in and 256 out."""
    workload = _workload("W12", users)
    for _, writer in _sessions(workload, sessions, seed):
        history = writer.history().add(named("W12 system"), 49_152)
        after = None
        for _ in range(6):
            history.add(writer.fresh(), 256)
            after = writer.ask(history, 256, after=after, max_tokens=256)
    return workload


def _workload(name: str, users: int) -> Workload:
    return Workload(name, BLOCK_TOKENS, users=users, start_spread_s=10.0, pause_s=0.0)


def _own_system(random: Random) -> int:
    """Drawn anew while it leaves no room for a turn in the longest context."""
    while True:
        tokens = lognormal_by_mean(random, 160_000, 233_600, 10_000, 990_000)
        if tokens <= 262_144 - 3_000 - 2 * 10_000:
            return bounded(tokens, 10_000, 990_000)


def _sessions(workload: Workload, number: int, seed: int) -> Iterator[tuple[Random, Writer]]:
    for i in range(number):
        name = f"{workload.name.lower()}-{seed}-{i}"
        session = Session(name=name, keys=[], turns=[])
        workload.sessions.append(session)
        yield Random(name), Writer(session, BLOCK_TOKENS, name)
