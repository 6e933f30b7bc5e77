"""The demonstration's script and its judgement, without engines."""

from collections import OrderedDict
from itertools import pairwise

import pytest

from sumibi.demo.claims import Pressure, StepResult, judge
from sumibi.demo.report import print_tables
from sumibi.demo.run import counting
from sumibi.demo.script import PRESSURE_KV_BLOCKS, SEED, Step, prefix_phases, pressure_phase
from sumibi.demo.texts import Texts

BLOCK = 32


def words(text: str) -> int:
    """Stands for a tokenizer: four tokens for three words, as with English."""
    return len(text.split()) * 4 // 3


@pytest.fixture
def texts() -> Texts:
    return Texts(words, SEED)


def tokens(step: Step) -> int:
    return sum(words(message["content"]) + 4 for message in step.messages)


def test_a_text_has_the_wanted_length_and_is_the_same_every_time(texts):
    for wanted in (20, 100, 1500):
        assert abs(words(texts.of(wanted, "x")) - wanted) <= 16
    assert texts.of(100, "x") == Texts(words, SEED).of(100, "x")


def test_texts_of_different_names_differ_from_the_start(texts):
    assert texts.of(100, "x")[:20] != texts.of(100, "y")[:20]


def test_every_later_turn_of_a_conversation_begins_with_the_one_before(texts):
    last: dict[str, list] = {}
    for step in pressure_phase(texts):
        name = step.label.split(",")[0]
        before = last.get(name, [])
        assert step.messages[: len(before)] == before
        assert (step.turn == 1) == (not before)
        last[name] = step.messages
    assert len(last) == 8


def test_pressure_has_the_stated_sizes(texts):
    steps = pressure_phase(texts)
    assert len(steps) == 48
    assert all(1200 <= tokens(s) <= 1400 for s in steps if s.turn == 1)
    grown = [tokens(s) for s in steps if s.label.startswith("conversation 1,")]
    assert all(80 <= b - a <= 125 for a, b in pairwise(grown))


def test_forks_of_the_agent_share_its_history_and_do_not_return_to_it(texts):
    agent = [s for s in prefix_phases(texts) if s.phase == 6]
    assert len(agent) == 12 + 2 * 2
    fork = next(s for s in agent if s.label == "fork after 4, turn 1")
    after = next(s for s in agent if s.label == "agent turn 5")
    assert after.messages == fork.messages[: len(after.messages)]


class Replica:
    """Brute force: an LRU cache of (conversation, block number), counted in tokens."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[tuple[str, int], None] = OrderedDict()

    def serve(self, conversation: str, prompt_tokens: int) -> int:
        wanted = [(conversation, i) for i in range(prompt_tokens // BLOCK)]
        found = 0
        while found < len(wanted) and wanted[found] in self.blocks:
            found += 1
        for block in reversed(wanted):  # the beginning of a prompt is used last, so it goes last
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > PRESSURE_KV_BLOCKS:
            self.blocks.popitem(last=False)
        return found * BLOCK


def hit_rate(steps: list[Step], place) -> float:
    replicas = [Replica(), Replica()]
    cached = sum(
        replicas[place(number, step)].serve(step.label.split(",")[0], tokens(step))
        for number, step in enumerate(steps)
    )
    return cached / sum(map(tokens, steps))


def test_by_arithmetic_affinity_finds_more_than_twice_what_turns_find(texts):
    steps = pressure_phase(texts)
    affine = hit_rate(steps, lambda number, step: int(step.label.split()[1][:-1]) % 2)
    turns = hit_rate(steps, lambda number, step: number % 2)
    assert affine > 0.75
    assert affine / turns > 2.2


def result(phase: int, policy: str = "cost", endpoint: str = "a", cached: int = 0, ttft: float = 1.0, **more):
    fields = {"step": "x", "prompt_tokens": 100, "turn": 2} | more
    return StepResult(
        phase=phase, policy=policy, endpoint=endpoint, cached_tokens=cached, ttft_s=ttft, **fields
    )


def good_run() -> list[StepResult]:
    return [
        result(1),
        result(2, cached=96, ttft=0.05),
        result(3, cached=96, ttft=0.06),
        result(4, endpoint="b"),
        result(5, endpoint="b", cached=96, ttft=0.1),
        result(6, step="agent turn 1"),
        result(6, step="agent turn 2", cached=96),
        result(7, "cost", cached=80, ttft=0.3),
        result(7, "round-robin", cached=40, ttft=1.0),
    ]


def test_a_good_run_holds_every_claim():
    assert [claim.name for claim in judge(good_run()) if not claim.held] == []


@pytest.mark.parametrize(
    ("index", "worse", "claim"),
    [
        (2, result(3, cached=96, ttft=0.11), "warm TTFT"),
        (1, result(2, cached=96, ttft=0.05, endpoint="b"), "phases 2 and 3"),
        (3, result(4, endpoint="a"), "phase 4"),
        (4, result(5, endpoint="a", ttft=0.1), "phase 5"),
        (6, result(6, step="agent turn 2", cached=80), "phase 6"),
        (7, result(7, "cost", cached=79, ttft=0.3), "phase 7: token hit rate"),
        (7, result(7, "cost", cached=80, ttft=0.31), "phase 7: median TTFT"),
    ],
)
def test_each_claim_fails_when_what_it_says_is_not_so(index, worse, claim):
    run = good_run()
    run[index] = worse
    assert any(one.name.startswith(claim) and not one.held for one in judge(run))


def test_each_step_is_reported_with_how_many_there_are():
    said: list[str] = []
    report = counting(lambda who, what, done: said.append(f"{who}: {what}"), 2)
    report("phase 1", "A, cold", None)
    report("phase 2", "A again", None)
    assert said == ["phase 1: step 1 of 2: A, cold", "phase 2: step 2 of 2: A again"]


def test_the_tables_say_by_how_much_the_median_ttft_fell(capsys):
    print_tables(good_run(), [])
    assert "-70 %" in capsys.readouterr().out


def test_the_hit_rate_counts_tokens_and_the_ttft_only_later_turns():
    steps = [result(7, cached=0, ttft=9.0, turn=1), result(7, cached=300, ttft=0.2, prompt_tokens=300)]
    assert Pressure.of(steps, "cost") == Pressure(hit_rate=0.75, later_ttft_s=0.2)
