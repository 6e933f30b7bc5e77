"""Coding agents, made up to look like recorded ones, for whoever has no trace at hand.

Every prompt is tools and system prompt (all sessions), instructions of a group (a repository), the session's
task, and a history that each turn makes longer by an answer and a tool's result. Now and then a turn
goes back to an earlier point (the user edits, the agent prunes), a long history is replaced by a summary, or
sub-agents are started: some with the parent's whole prompt, some with one of their own.

The numbers are those of public agent traces: kv-cache-tester's 120 sessions (growth of a turn 713 / 3,938
tokens at p50 / p90, answers 230 / 921, turns 54 / 157, 2.2 % of turns break their prefix, tools and system
prompt 14.8k) and llm-d's newer release (gap between turns 2 / 24 s, requests of a sub-agent group 7 / 51).
"""

from dataclasses import dataclass, replace
from random import Random

from sumibi.bench.workloads.history import History, Writer, bounded, lognormal, named
from sumibi.core.errors import ConfigError
from sumibi.sim.workload import Session, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """What the agents of a workload are like. Pairs are (median, 90th percentile) of a lognormal."""

    block_tokens: int = 64
    tool_tokens: int = 12_000
    """Tools and system prompt of all sessions."""
    groups: int = 8
    group_tokens: int = 2_800
    """Instructions of a group."""
    task_tokens: tuple[float, float] = (300, 2_500)
    turns: tuple[float, float] = (54, 157)
    """Of the main thread."""
    input_tokens: tuple[float, float] = (300, 3_300)
    """Added by a tool or the user."""
    output_tokens: tuple[float, float] = (230, 921)
    gap_s: tuple[float, float] = (2, 24)
    """Tool or think time."""
    longest_gap_s: float = 600.0
    resets: float = 0.022
    """Part of turns that go back to an earlier point."""
    context_tokens: int = 400_000
    """A history that would be longer is replaced by a summary; a sub-agent ends."""
    summary_tokens: tuple[float, float] = (5_000, 9_000)
    fan_outs: float = 0.01
    """Part of main turns that start sub-agents."""
    fan_out: int = 6
    """At most so many at once."""
    forks: float = 0.5
    """Part of fan-outs whose sub-agents begin with the parent's prompt."""
    agent_turns: tuple[float, float] = (7, 30)
    """Of one sub-agent."""
    agent_tool_tokens: int = 9_000
    """Tools and system prompt of sub-agents that do not."""


def agents(
    *,
    sessions: int = 64,
    users: int = 32,
    context_tokens: int | None = None,
    seed: int = 0,
    shape: AgentShape | None = None,
) -> Workload:
    """A closed loop of `sessions` coding sessions. Equal arguments give equal workloads.

    `context_tokens` replaces the shape's: no prompt is longer.
    """
    shape = shape or AgentShape()
    if context_tokens is not None:
        if context_tokens < 50_000:
            raise ConfigError(f"agents: `context_tokens` must be at least 50000, not {context_tokens}")
        shape = replace(shape, context_tokens=context_tokens)
    workload = Workload("agents", shape.block_tokens, users=users, names_sessions=True)
    for number in range(sessions):
        random = Random(f"agents {seed} {number}")
        session = Session(name=f"agents-{seed}-{number}", keys=[], turns=[])
        _Author(shape, Writer(session, shape.block_tokens, session.name), random, seed).write()
        workload.sessions.append(session)
    return workload


class _Author:
    """Writes one session."""

    def __init__(self, shape: AgentShape, writer: Writer, random: Random, seed: int) -> None:
        self.shape = shape
        self.writer = writer
        self.random = random
        self.seed = seed
        self.agents = 0

    def write(self) -> None:
        shape, random, writer = self.shape, self.random, self.writer
        history = writer.history().add(named(f"agents {self.seed} tools"), shape.tool_tokens)
        group = random.randrange(shape.groups)
        history.add(named(f"agents {self.seed} group {group}"), shape.group_tokens)
        preamble = history.fork()
        history.add(writer.fresh(), self.tokens(shape.task_tokens))
        points = [history.fork()]
        after: int | None = None
        for number in range(bounded(lognormal(random, *shape.turns), 2, 3_000)):
            delay_s = self.gap_s() if number else 0.0
            after = writer.ask(history, self.tokens(shape.output_tokens), after=after, delay_s=delay_s)
            if random.random() < shape.fan_outs:
                after = self.fan_out(history, after)
                history.add(writer.fresh(), self.tokens(shape.input_tokens))
            if random.random() < shape.resets:
                history = random.choice(points).fork()
            else:
                points.append(history.fork())
                del points[:-20]
            history.add(writer.fresh(), self.tokens(shape.input_tokens))
            if history.tokens > shape.context_tokens:
                history = preamble.fork().add(writer.fresh(), self.tokens(shape.summary_tokens))
                points = [history.fork()]

    def fan_out(self, parent: History, after: int) -> int:
        """Several sub-agents at once; the turn that the parent waits for: the last of the longest."""
        shape, random, writer = self.shape, self.random, self.writer
        forked = random.random() < shape.forks
        longest, last = 0, after
        for _ in range(random.randint(1, shape.fan_out)):
            self.agents += 1
            name = f"agent-{self.agents}"
            if forked:
                history = parent.fork()
            else:
                text = named(f"agents {self.seed} sub-agent tools")
                history = writer.history().add(text, shape.agent_tool_tokens)
            previous = after
            turn = 0
            for turn in range(bounded(lognormal(random, *shape.agent_turns), 1, 100)):
                history.add(writer.fresh(), self.tokens(shape.input_tokens))
                if history.tokens > shape.context_tokens:
                    break
                delay_s = self.gap_s() if turn else 0.0
                output_tokens = self.tokens(shape.output_tokens)
                previous = writer.ask(history, output_tokens, after=previous, delay_s=delay_s, agent=name)
            if turn >= longest:
                longest, last = turn, previous
        return last

    def tokens(self, shape: tuple[float, float]) -> int:
        return bounded(lognormal(self.random, *shape), 1, 60_000)

    def gap_s(self) -> float:
        return min(lognormal(self.random, *self.shape.gap_s), self.shape.longest_gap_s)
