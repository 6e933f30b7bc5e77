"""Programs recognised from keys, and what they are charged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_lab import BLOCK, REPEATABLE, Lab, keys_of, prompt

from sumibi.routing import sessions
from sumibi.routing.events import FinishReason
from sumibi.routing.fairness import HALF_LIFE_S, Attained
from sumibi.routing.sessions import Programs


class Talks:
    """`Programs` told of prompts, all of which are known afterwards."""

    def __init__(self, **limits):
        self.programs = Programs(**limits)
        self.seen = set()

    def ask(self, *parts):
        """The program of a prompt of these parts (name, blocks)."""
        token_ids = [token for name, blocks in parts for token in prompt(name, round(blocks * BLOCK))]
        keys = keys_of(token_ids)
        known = next((i for i, key in enumerate(keys) if key not in self.seen), len(keys))
        self.seen.update(keys)
        return self.programs.recognise(keys, known)


SYSTEM = ("system", 20)


def test_the_turns_of_a_conversation_are_one_program_and_two_conversations_are_two():
    talks = Talks()
    one, two = [SYSTEM, ("hello", 2)], [SYSTEM, ("good day", 2)]
    programs = []
    for turn in range(5):
        programs.append((talks.ask(*one), talks.ask(*two)))
        one.append((f"one {turn}", 1.5))
        two.append((f"two {turn}", 3))
    assert len(set(programs)) == 1
    assert programs[0][0] != programs[0][1]


def test_sub_agents_that_start_with_what_their_parent_knew_are_its_program():
    talks = Talks()
    parent = [SYSTEM, ("task", 5)]
    program = talks.ask(*parent)
    parent.append(("plan", 2))
    assert talks.ask(*parent) == program
    children = [[*parent, (f"child {i}", 2)] for i in range(50)]
    for turn in range(3):
        assert {talks.ask(*child) for child in children} == {program}
        for i, child in enumerate(children):
            child.append((f"{i} {turn}", 2))
    assert talks.ask(*parent, ("went on", 4)) == program


class Plainly:
    """The same rule, by a look at every block."""

    def __init__(self, most):
        self.most, self.tips, self.made = most, {}, 0

    def recognise(self, keys, known):
        at = max((i for i in range(known) if keys[i] in self.tips), default=None)
        if at is not None:
            found = self.tips[keys[at]] = self.tips.pop(keys[at])  # the youngest now
            shared = found["turn"] == 1 and (found["used"] or at == len(keys) - 1)
            found["used"] = True
            if not shared:
                if at < len(keys) - 1:
                    self.remember(keys[-1], found["program"], found["turn"] + 1)
                return found["program"]
        self.made += 1
        if keys[-1] not in self.tips:
            self.remember(keys[-1], self.made, 1)
        return self.made

    def remember(self, key, program, turn):
        self.tips[key] = {"program": program, "turn": turn, "used": False}
        if len(self.tips) > self.most:
            del self.tips[next(iter(self.tips))]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 9)), max_size=60))
@settings(REPEATABLE, max_examples=150)
def test_stretches_without_a_tip_are_passed_over_and_none_is_missed(prompts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "STRETCH", 4)
        programs, plainly, asked, seen = Programs(most_tips=7), Plainly(7), [[]], set()
        for number, (which, kept, new) in enumerate(prompts):
            # It goes on from a part of some prompt before, or from the whole of it.
            keys = asked[which % len(asked)][:kept] + [number * 100 + i for i in range(new)]
            known = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
            assert programs.recognise(keys, known) == f"~{plainly.recognise(keys, known)}"
            asked.append(keys)
            seen.update(keys)
        assert list(programs._tips) == list(plainly.tips)
        assert sum(programs._marks.values()) == len(programs)
        assert all(programs._marks.values())


def test_users_who_share_a_system_prompt_are_not_one_program():
    """Their own first words fill no block, so all of them say the same as far as keys go."""
    talks = Talks()
    users = [talks.ask(SYSTEM, (f"user {i}", 0.5)) for i in range(20)]
    assert len(set(users)) == 20
    later = [talks.ask(SYSTEM, (f"user {i}", 0.5), (f"more {i}", 5)) for i in range(20)]
    assert len(set(later)) == 20  # one of them may be taken for the one that came first
    assert len(set(users) & set(later)) <= 1
    # From the second turn on each is known.
    again = [talks.ask(SYSTEM, (f"user {i}", 0.5), (f"more {i}", 5), (f"and more {i}", 5)) for i in range(20)]
    assert again == later


def test_a_prompt_that_is_sent_again_in_a_later_turn_is_the_same_program():
    talks = Talks()
    program = talks.ask(SYSTEM, ("task", 5))
    assert talks.ask(SYSTEM, ("task", 5), ("plan", 2)) == program
    assert talks.ask(SYSTEM, ("task", 5), ("plan", 2)) == program


def test_prompts_without_a_full_block_are_everybody_s_own():
    talks = Talks()
    assert talks.ask(("hi", 0.5)) != talks.ask(("hi", 0.5))


def test_memory_is_bounded_and_the_conversation_asked_last_is_the_last_to_be_forgotten():
    talks = Talks(most_tips=4)
    kept = [SYSTEM, ("kept", 2)]
    program = talks.ask(*kept)
    for i in range(30):
        talks.ask((f"other {i}", 3))
        if i % 2:
            kept.append((f"turn {i}", 1))
            assert talks.ask(*kept) == program
        assert len(talks.programs) <= 4


@REPEATABLE
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=30))
def test_whatever_is_asked_strangers_are_never_one_program(turns):
    """Conversations that share nothing, in any order: each is one program from its first turn on."""
    talks, said, programs = Talks(), {}, {}
    for number, (who, blocks) in enumerate(turns):
        parts = said.setdefault(who, [])
        parts.append((f"{who} {number}", blocks))
        assert talks.ask(*parts) == programs.setdefault(who, f"~{len(programs) + 1}")


# --- what they had ---


def test_a_lead_is_what_was_charged_and_ages_by_a_second_a_second():
    attained = Attained()
    attained.charge("p", 1000, 8.0, 100.0)
    assert attained.lead_s("p", 100.0) == 8.0
    assert attained.lead_s("p", 103.0) == 5.0
    attained.charge("p", 1000, 8.0, 103.0)
    assert attained.lead_s("p", 103.0) == 13.0
    assert attained.lead_s("p", 200.0) == 0.0
    attained.charge("p", 1000, 8.0, 300.0)
    assert attained.lead_s("p", 300.0) == 8.0  # what it did not use before is no credit
    assert attained.lead_s("q", 300.0) == 0.0


def test_tokens_fade_by_half_and_corrections_count_as_of_when_they_were_charged():
    attained = Attained()
    attained.charge("p", 1000, 8.0, 0.0)
    assert attained.tokens("p", HALF_LIFE_S) == pytest.approx(500)
    attained.correct("p", -600, -4.8, 0.0, HALF_LIFE_S / 10)
    assert attained.tokens("p", HALF_LIFE_S) == pytest.approx(200)
    assert attained.lead_s("p", HALF_LIFE_S / 10) == 0.0


@pytest.mark.parametrize(("tokens", "index"), [([5, 5, 5, 5], 1.0), ([8, 0, 0, 0], 1.0), ([9, 3], 0.8)])
def test_jain_s_index(tokens, index):
    attained = Attained()
    for i, one in enumerate(tokens):
        attained.charge(str(i), one, 0.0, 0.0)
    assert attained.jain(0.0) == pytest.approx(index)


def test_programs_without_a_charge_for_long_are_forgotten():
    attained = Attained()
    for i in range(100):
        attained.charge(f"{i}", 10, 1.0, i * HALF_LIFE_S)
    assert len(attained) <= 6
    attained.charge("far ahead", 10, 1e6, 1e5)
    for i in range(10):
        attained.charge(f"new {i}", 10, 1.0, 2e5 + i)
    assert attained.lead_s("far ahead", 2e5 + 10) == pytest.approx(9e5 - 10)


def test_programs_are_bounded():
    attained = Attained(most_programs=3)
    for i in range(100):
        attained.charge(str(i), 10, 1.0, float(i))
    assert len(attained) == 3
    assert attained.tokens("99", 99.0) == 10


@pytest.mark.parametrize(("cached", "left"), [(None, 1000), (600, 400), (0, 1000), (1000, 0)])
def test_what_the_engine_had_cached_is_not_charged(cached, left):
    lab = Lab(hold_above_s=1.0)
    lab.up("a")
    lab.ask("r", [], prompt_tokens=1000, keys=[], program="p")
    lab.first("r")
    lab.finish("r", cached_tokens=cached, prompt_tokens=1000)
    (flow,) = lab.router._gate._flows.values()
    assert flow.attained.tokens("p", lab.t) == pytest.approx(left)


def test_a_second_attempt_is_not_charged_twice():
    lab = Lab(hold_above_s=1.0)
    lab.up("a", "b")
    lab.ask("r", [], prompt_tokens=1000, keys=[], program="p")
    lab.finish("r", FinishReason.REFUSED, answered=False)
    (flow,) = lab.router._gate._flows.values()
    assert flow.attained.tokens("p", lab.t) == pytest.approx(1000)
