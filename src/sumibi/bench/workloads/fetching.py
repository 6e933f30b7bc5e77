"""Workloads with which llm-d measures the fetching of KV from peers: closed loops, all KV a session's own.

As in `chats`: users are connections of a load client, which begin within seconds.
"""

from random import Random

from sumibi.bench.workloads.history import Writer, lognormal_by_mean, named
from sumibi.sim.workload import Session, Workload

BLOCK_TOKENS = 64


def documents(*, users: int = 128, sessions: int = 192, seed: int = 0) -> Workload:
    """W12 as it was run: each conversation has a document of its own, 49,152 tokens, and asks 6 questions of
    256 tokens, answered with 256.

    Source: llm-d, guide "P2P KV cache sharing" (Aug 2026), document Q&A.
    """
    workload = Workload("W12 documents", BLOCK_TOKENS, users=users, start_spread_s=10.0, pause_s=0.0)
    for _, writer in _sessions(workload, sessions, seed):
        history = writer.history().add(writer.fresh(), 49_152)
        after = None
        for _ in range(6):
            history.add(writer.fresh(), 256)
            after = writer.ask(history, 256, after=after, max_tokens=256)
    return workload


def coding(*, users: int = 24, sessions: int = 24, seed: int = 0) -> Workload:
    """Coding sessions that llm-d ran on six GPUs: system prompts of 10 k to 100 k tokens of their own, 4 to
    40 turns of 1,500 in and 425 out, tools that take 1 to 20 s; prompts of 61.9 k on average.

    Source: llm-d, "P2P cache sharing" (Aug 2026), agentic P/D result. Not published is how these spread in
    their ranges: turns and tools evenly here, system prompts as the larger profile's (W9), with a mean that
    gives prompts of about the published one (60 k over many sessions).
    """
    workload = Workload("W12 coding", BLOCK_TOKENS, users=users, start_spread_s=10.0, pause_s=0.0)
    for random, writer in _sessions(workload, sessions, seed):
        history = writer.history().add(named("W12 coding system"), 3_000)
        system = lognormal_by_mean(random, SYSTEM_TOKENS, 1.46 * SYSTEM_TOKENS, 10_000, 100_000)
        history.add(writer.fresh(), round(system))
        after = None
        for _ in range(random.randint(4, 40)):
            history.add(writer.fresh(), 1_500)
            delay_s = 0.0 if after is None else random.uniform(1.0, 20.0)
            after = writer.ask(history, 425, after=after, delay_s=delay_s, max_tokens=425)
    return workload


SYSTEM_TOKENS = 34_000
"""Mean of `coding`'s system prompts before they are cut to their range."""


def _sessions(workload: Workload, number: int, seed: int) -> list[tuple[Random, Writer]]:
    made = []
    for i in range(number):
        name = f"{workload.name.lower()}-{seed}-{i}"
        session = Session(name=name, keys=[], turns=[])
        workload.sessions.append(session)
        made.append((Random(name), Writer(session, BLOCK_TOKENS, name)))
    return made
