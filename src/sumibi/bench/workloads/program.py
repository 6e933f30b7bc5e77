"""One agent that goes on for thousands of turns, with sub-agents that fork from it and resets."""

from random import Random

from sumibi.bench.workloads.history import Writer, named
from sumibi.sim.workload import Session, Workload


def program(
    *,
    turns: int = 3_000,
    forks: int = 40,
    resets: int = 5,
    seed: int = 0,
    block_tokens: int = 64,
    preamble_tokens: int = 15_000,
    new_tokens: int = 512,
    output_tokens: int = 256,
    fork_turns: int = 8,
    summary_tokens: int = 6_000,
) -> Workload:
    """A program of `turns` turns, its forks' included, all of which add the same number of tokens.

    Forks (sub-agents of `fork_turns` turns that begin with all that was said) are at random turns; resets
    (the history is replaced by a summary) cut the program into equal parts.
    """
    random = Random(f"program {seed}")
    main_turns = max(turns - forks * fork_turns, 1)
    forked = set(random.sample(range(main_turns), min(forks, main_turns)))
    reset = {main_turns * (i + 1) // (resets + 1) for i in range(resets)}
    session = Session(name=f"program-{seed}", keys=[], turns=[])
    writer = Writer(session, block_tokens, session.name)
    history = writer.history().add(named(f"program {seed}"), preamble_tokens)
    preamble = history.fork()
    after: int | None = None
    agents = 0
    for number in range(main_turns):
        if number in reset:
            history = preamble.fork().add(writer.fresh(), summary_tokens)
        history.add(writer.fresh(), new_tokens)
        after = writer.ask(history, output_tokens, after=after, delay_s=2.0 if number else 0.0)
        if number in forked:
            agents += 1
            branch, previous = history.fork(), after
            for _ in range(fork_turns):
                branch.add(writer.fresh(), new_tokens)
                previous = writer.ask(
                    branch, output_tokens, after=previous, delay_s=2.0, agent=f"agent-{agents}"
                )
    return Workload("program", block_tokens, [session], users=1)
