"""Workload W2: llm-d's published ladder of request rates, with its two pitfalls.

150 groups share a system prompt of 6,000 tokens each, 5 prompts a group add a question of 1,200; every answer
has 1,000 tokens. The load generator shuffles these 750 prompts once and goes through them in a circle, so
after the warm-up every prompt has been seen. A stage is a burst of `rate * seconds` requests with Poisson
gaps; the next one begins 30 s after the last answer. Rates and lengths of the stages are theirs, exactly.
"""

from array import array
from random import Random

from xxhash import xxh3_64_intdigest

from sumibi.sim.workload import Session, Turn, Workload

STAGES: tuple[tuple[int, int], ...] = (
    (15, 50),
    (3, 20),
    (10, 20),
    (15, 20),
    (20, 38),
    (22, 34),
    (25, 30),
    (30, 25),
    (35, 21),
    (40, 38),
    (43, 36),
    (46, 33),
    (49, 30),
    (52, 29),
    (55, 27),
    (57, 26),
    (60, 25),
)
"""(requests a second, seconds); the first is the warm-up."""
GROUPS, PROMPTS = 150, 5
SYSTEM_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 6_000, 1_200, 1_000
TIMEOUT_S = 300.0
"""Of a request, in their harness: what the fleet's `timeout_s` has to say."""


def ladder(
    *, seed: int = 0, block_tokens: int = 64, stages: tuple[tuple[int, int], ...] = STAGES
) -> Workload:
    """The ladder; `seed` shuffles the prompts and draws the gaps."""
    random = Random(f"ladder {seed}")
    prompts = [
        _prompt_keys(group, prompt, block_tokens) for group in range(GROUPS) for prompt in range(PROMPTS)
    ]
    random.shuffle(prompts)
    prompt_tokens = SYSTEM_TOKENS + QUESTION_TOKENS
    blocks = array("I", range(prompt_tokens // block_tokens))
    turn = Turn(
        blocks=blocks, prompt_tokens=prompt_tokens, output_tokens=OUTPUT_TOKENS, max_tokens=OUTPUT_TOKENS
    )
    sessions: list[Session] = []
    for stage, (rate, seconds) in enumerate(stages):
        # Poisson arrivals of a given number in a given time: even and independent.
        for start_s in sorted(random.random() * seconds for _ in range(rate * seconds)):
            number = len(sessions)
            keys = prompts[number % len(prompts)]
            sessions.append(Session(f"w2-{number}", keys, [turn], start_s=start_s, stage=stage))
    return Workload("W2", block_tokens, sessions)


def _prompt_keys(group: int, prompt: int, block_tokens: int) -> list[int]:
    """Keys of the full blocks: those within the system prompt are the group's, the others its own."""
    keys = []
    parent = 0
    for i in range((SYSTEM_TOKENS + QUESTION_TOKENS) // block_tokens):
        shared = (i + 1) * block_tokens <= SYSTEM_TOKENS
        name = f"w2 {group} {i}" if shared else f"w2 {group} {prompt} {i}"
        parent = xxh3_64_intdigest(name, parent)
        keys.append(parent)
    return keys
