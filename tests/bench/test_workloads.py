"""Made-up workloads have the shapes that are published (or, for agents, measured on public traces)."""

import statistics
from collections.abc import Iterable
from itertools import pairwise

import pytest

from sumibi.bench.workloads import GENERATORS, agents, generate, program
from sumibi.bench.workloads.history import History, named
from sumibi.core.errors import ConfigError
from sumibi.sim.arithmetic import bound, in_order, infinite_cache, prepare
from sumibi.sim.workload import Session, Turn, Workload


def turns_of(workload: Workload) -> Iterable[tuple[Session, Turn]]:
    return ((session, turn) for session in workload.sessions for turn in session.turns)


def part(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[int(q * len(ordered))]


def test_equal_texts_have_equal_keys():
    ours, theirs = [], []
    one = History(ours, 4).add(7, 10).add(8, 3)
    fork = one.fork().add(9, 4)
    one.add(10, 4)
    other = History(theirs, 4).add(7, 10).add(8, 3).add(9, 4)
    assert (one.tokens, len(one.blocks), len(fork.blocks)) == (17, 4, 4)
    # three full blocks in common, the fourth begins alike (one token) and ends otherwise
    assert [ours[i] for i in fork.blocks] == [theirs[i] for i in other.blocks]
    assert [ours[i] for i in one.blocks][:3] == theirs[:3]
    assert ours[one.blocks[3]] not in theirs
    # the same tokens at another place are another block
    assert len({*ours, *theirs}) == 5


@pytest.mark.parametrize("name", GENERATORS)
def test_every_workload_can_be_played(name: str):
    workload = generate(name)
    for session, turn in turns_of(workload):
        assert len(turn.blocks) == turn.prompt_tokens // workload.block_tokens
        assert turn.output_tokens >= 1
        if turn.after is not None:
            before = session.turns[turn.after]
            assert before is not turn
            assert turn.offset_ms >= before.offset_ms
    assert len({session.name for session in workload.sessions}) == len(workload.sessions)
    closed = [session.start_s is None for session in workload.sessions]
    assert all(closed) or not any(closed)
    assert (workload.users is not None) == all(closed)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_makes_one_workload(name: str):
    def shape(workload: Workload) -> list:
        return [
            (session.name, session.start_s, session.priority, session.keys[-1], turn.prompt_tokens)
            for session, turn in list(turns_of(workload))[:2_000]
        ]

    assert shape(generate(name, seed=3)) == shape(generate(name, seed=3))
    assert shape(generate(name, seed=3)) != shape(generate(name, seed=4))


@pytest.fixture(scope="module")
def many() -> Workload:
    return agents(sessions=200, seed=1)


def test_agents_are_like_recorded_ones(many: Workload):
    growth, gaps = [], []
    for session, turn in turns_of(many):
        if turn.after is not None and turn.agent == session.turns[turn.after].agent:
            gaps.append(turn.delay_s)
            grown = turn.prompt_tokens - session.turns[turn.after].prompt_tokens
            if grown > 0:
                growth.append(grown)
    outputs = [turn.output_tokens for _, turn in turns_of(many)]
    turns = [sum(not turn.agent for turn in session.turns) for session in many.sessions]
    inputs = [turn.prompt_tokens for _, turn in turns_of(many)]

    assert part(growth, 0.5) == pytest.approx(713, rel=0.1)
    assert part(growth, 0.9) == pytest.approx(3_938, rel=0.1)
    assert part(outputs, 0.5) == pytest.approx(230, rel=0.05)
    assert part(outputs, 0.9) == pytest.approx(921, rel=0.05)
    assert part(gaps, 0.5) == pytest.approx(2, rel=0.1)
    assert part(gaps, 0.9) == pytest.approx(24, rel=0.1)
    assert part(turns, 0.5) == pytest.approx(54, rel=0.2)
    assert part(turns, 0.9) == pytest.approx(157, rel=0.2)
    assert sum(inputs) > 100 * sum(outputs)
    assert statistics.median(inputs) > 50_000


def test_agents_reuse_what_recorded_ones_reuse(many: Workload):
    stream = in_order(prepare(many), 32)
    hits = infinite_cache(stream)
    uncached = [request.tokens - hit for request, hit in zip(stream.requests, hits, strict=True)]
    well = sum(hit >= 0.9 * request.tokens for request, hit in zip(stream.requests, hits, strict=True))
    # recorded: 775 tokens, 91.8 %, 0.961
    assert part(uncached, 0.5) == pytest.approx(775, rel=0.15)
    assert well / len(hits) == pytest.approx(0.918, abs=0.03)
    assert bound(stream).hit_rate == pytest.approx(0.961, abs=0.025)


def test_agents_fork_reset_and_share(many: Workload):
    breaks = pairs = 0
    for session, turn in turns_of(many):
        if not turn.agent and turn.after is not None and not session.turns[turn.after].agent:
            before = session.turns[turn.after].blocks
            pairs += 1
            breaks += turn.blocks[: len(before) - 2] != before[: len(before) - 2]
    # recorded: 2.21 %
    assert breaks / pairs == pytest.approx(0.022, abs=0.006)

    by_agent: dict[tuple[str, str], list[Turn]] = {}
    for session, turn in turns_of(many):
        if turn.agent:
            by_agent.setdefault((session.name, turn.agent), []).append(turn)
    assert part(map(len, by_agent.values()), 0.5) == pytest.approx(7, abs=1)
    assert part(map(len, by_agent.values()), 0.9) == pytest.approx(30, rel=0.25)
    # half of the fan-outs begin with their parent's prompt
    first = [min(turns, key=lambda turn: turn.offset_ms).prompt_tokens for turns in by_agent.values()]
    assert 0.3 < sum(tokens > 20_000 for tokens in first) / len(first) < 0.7

    # 12,000 tokens of tools are everybody's, 2,800 more their group's: 187 and 231 blocks
    prefixes = {tuple(session.prompt_keys(session.turns[0])[:187]) for session in many.sessions}
    groups = {tuple(session.prompt_keys(session.turns[0])[:231]) for session in many.sessions}
    assert (len(prefixes), len(groups)) == (1, 8)


def test_no_prompt_outgrows_the_context(many: Workload):
    assert max(turn.prompt_tokens for _, turn in turns_of(many)) <= 400_000
    small = generate("agents:sessions=20,context_tokens=100000")
    assert 95_000 < max(turn.prompt_tokens for _, turn in turns_of(small)) <= 100_000


def test_a_long_program():
    (session,) = program().sessions
    assert len(session.turns) == 3_000
    main = [turn for turn in session.turns if not turn.agent]
    assert len({turn.agent for turn in session.turns}) == 1 + 40
    # each turn says 512 new tokens after the answer of 256, but for those after a reset
    grown = [b.prompt_tokens - a.prompt_tokens for a, b in pairwise(main)]
    assert sum(tokens < 0 for tokens in grown) == 5
    assert {tokens for tokens in grown if tokens > 0} == {768}
    forks = [turn for turn in session.turns if turn.agent == "agent-7"]
    assert len(forks) == 8
    assert forks[0].after is not None
    parent = session.turns[forks[0].after]
    assert not parent.agent
    assert forks[0].blocks[: len(parent.blocks)] == parent.blocks


@pytest.mark.parametrize(
    ("name", "system", "prompt", "output", "groups", "prompts"),
    [
        ("w1", 8_000, 9_000, 1_000, 83, 249),
        ("w3", 16_000, 16_256, 256, 250, 1_250),
        ("w15", 6_000, 7_200, 300, 150, 750),
    ],
)
def test_groups_of_prompts(name: str, system: int, prompt: int, output: int, groups: int, prompts: int):
    workload = generate(name)
    assert {turn.prompt_tokens for _, turn in turns_of(workload)} == {prompt}
    assert {turn.output_tokens for _, turn in turns_of(workload)} == {output}
    whole = {tuple(session.prompt_keys(session.turns[0])) for session in workload.sessions}
    assert len(whole) == prompts
    assert len({keys[: system // 64] for keys in whole}) == groups
    # the warm-up is one pass (W1: 250 requests for 249 prompts)
    warm = [session for session in workload.sessions if session.stage == 0]
    assert len({session.keys[-1] for session in warm}) == prompts


def test_priorities_are_mixed():
    workload = generate("w15")
    shares = {
        priority: sum(session.priority == priority for session in workload.sessions) / len(workload.sessions)
        for priority in (100, 0, -10)
    }
    assert shares == {
        100: pytest.approx(0.2, abs=0.02),
        0: pytest.approx(0.6, abs=0.02),
        -10: pytest.approx(0.2, abs=0.02),
    }


def test_code_generation():
    workload = generate("w7:users=100")
    assert (len(workload.sessions), workload.users) == (300, 100)
    first = [session.turns[0].prompt_tokens - 4_500 for session in workload.sessions]
    assert min(first) >= 15_000
    assert max(first) <= 100_000
    assert statistics.mean(first) == pytest.approx(57_500, rel=0.05)
    turns = [len(session.turns) for session in workload.sessions]
    assert (min(turns), max(turns) <= 20) == (2, True)
    assert statistics.mean(turns) == pytest.approx(6, abs=0.6)
    one = workload.sessions[0].turns
    assert one[1].prompt_tokens - one[0].prompt_tokens == 2_300


def test_reasoning_and_shared_conversations():
    workload = generate("w8:users=50")
    assert [len(workload.sessions), workload.sessions[0].turns[0].prompt_tokens] == [200, 1_250]
    assert {turn.output_tokens for _, turn in turns_of(workload)} == {8_000}
    workload = generate("w12")
    assert len(workload.sessions) == 192
    prefix = {tuple(session.prompt_keys(session.turns[0])[:768]) for session in workload.sessions}
    assert len(prefix) == 1
    assert [turn.prompt_tokens for turn in workload.sessions[0].turns] == [
        49_152 + 256 + 512 * turn for turn in range(6)
    ]


def test_long_agents():
    workload = generate("w9:users=40")
    assert workload.requests == 800
    assert max(turn.prompt_tokens + turn.output_tokens for _, turn in turns_of(workload)) <= 262_144
    delays = [turn.delay_s for _, turn in turns_of(workload) if turn.after is not None]
    assert min(delays) >= 1
    assert max(delays) <= 100
    outputs = [turn.output_tokens for _, turn in turns_of(workload)]
    assert min(outputs) >= 50
    assert statistics.mean(outputs) == pytest.approx(425, rel=0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w99", "no generator 'w99'; there are agents, program, w1"),
        ("w7:users=0", "w7: `users` must be a positive whole number, not '0'"),
        ("agents:people=3", "agents: unknown option 'people'; it can have sessions, users"),
        ("agents:context_tokens=4096", "agents: `context_tokens` must be at least 50000, not 4096"),
        ("w1:users=3", "w1: unknown option 'users'; it has none"),
    ],
)
def test_wrong_names_and_options(text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        generate(text)
    assert message in str(caught.value)


def test_values_of_shared_texts_are_stable():
    assert named("W7 system") == named("W7 system") != named("W9 system")
