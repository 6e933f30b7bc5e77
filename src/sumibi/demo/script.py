"""What the demonstration sends: seven phases, fixed by a seed, the same for every policy.

Earlier answers in a conversation are fixed texts, not what the model said, so both policies see equal
prompts and a run can be repeated. Sizes are those of an agent at work: a long system prompt, short
questions, tool outputs of a hundred tokens or so.
"""

import random
from dataclasses import dataclass, field

from sumibi.demo.texts import Texts

SEED = 9
"""Of texts and of phase 7's order. How many prefixes strict turns find by luck depends on the order
(docs/demo.md): this one is among those in which they find few."""
SYSTEM_TOKENS = 1500
CONVERSATIONS = 8
TURNS = 6
CONTEXT_TOKENS = 1200
TURN_TOKENS = 100
PRESSURE_KV_BLOCKS = 225
"""Phase 7: 225 blocks of 32 tokens a replica = 7,200 tokens; two hold about what all conversations need."""
AGENT_TURNS = 12
FORK_AFTER = (4, 8)
FORK_TURNS = 2

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """One request. `busy_first`: keep the replica of prompt A decoding while it is sent."""

    phase: int
    label: str
    messages: list[Message] = field(repr=False)
    turn: int = 1
    """1 for the first request with this prefix."""
    busy_first: bool = False


def prefix_phases(texts: Texts) -> list[Step]:
    """Phases 1 to 6: prefixes computed once and found again."""
    a, b = (_system(texts.of(SYSTEM_TOKENS, f"system {name}")) for name in "AB")
    first, second = (_user(texts.of(20, f"question {n}")) for n in (1, 2))
    return [
        Step(1, "A, cold", [a, first]),
        Step(2, "A, same question", [a, first], turn=2),
        Step(3, "A, another question", [a, second], turn=3),
        Step(4, "B, cold, A's replica busy", [b, first], busy_first=True),
        Step(5, "B, another question", [b, second], turn=2),
        *_agent(texts),
    ]


def busy_request(texts: Texts) -> list[Message]:
    """What keeps A's replica busy in phase 4: prompt A again, answered at length."""
    return [_system(texts.of(SYSTEM_TOKENS, "system A")), _user("Tell everything about charcoal.")]


def _agent(texts: Texts) -> list[Step]:
    """A 12-turn conversation with tool outputs; two sub-conversations fork from it and end."""
    history = [_system(texts.of(600, "agent")), _user(texts.of(60, "task"))]
    steps = []
    for turn in range(1, AGENT_TURNS + 1):
        steps.append(Step(6, f"agent turn {turn}", list(history), turn=turn))
        history += [_assistant(texts, f"agent {turn}"), _tool(texts, f"tool {turn}")]
        if turn in FORK_AFTER:
            fork = [*history, _user(texts.of(40, f"subtask {turn}"))]
            for inner in range(1, FORK_TURNS + 1):
                name = f"fork after {turn}, turn {inner}"
                steps.append(Step(6, name, list(fork), turn=turn + inner))
                fork += [_assistant(texts, name), _tool(texts, name)]
    return steps


def pressure_phase(texts: Texts) -> list[Step]:
    """Phase 7: eight conversations of six turns, interleaved in one random order."""
    order = [conversation for conversation in range(CONVERSATIONS) for _ in range(TURNS)]
    random.Random(SEED).shuffle(order)
    histories = [[_system(texts.of(CONTEXT_TOKENS, f"context {n}"))] for n in range(CONVERSATIONS)]
    turns = [0] * CONVERSATIONS
    steps = []
    for conversation in order:
        turns[conversation] += 1
        turn, history = turns[conversation], histories[conversation]
        name = f"conversation {conversation + 1}, turn {turn}"
        # A turn adds about TURN_TOKENS: the answer before it, the question, the template's marks.
        history.append(_user(texts.of(TURN_TOKENS - 40, name)))
        steps.append(Step(7, name, list(history), turn=turn))
        history.append(_assistant(texts, name))
    return steps


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(texts: Texts, name: str) -> Message:
    return {"role": "assistant", "content": texts.of(24, f"answer {name}")}


def _tool(texts: Texts, name: str) -> Message:
    return {"role": "tool", "content": texts.of(TURN_TOKENS, f"output {name}")}
