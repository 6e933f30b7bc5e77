"""What 64 caches hold, and prompts for them: the same for every contestant, from a seed.

A million blocks of 64 tokens. Agents share long system prompts and tool descriptions, which some endpoints
or all have; each conversation goes on from one of them at its home, and a part of it is left where it lived
before; some have lost their end to eviction; programs fork conversations. A few hot chains are on all
endpoints, on each to another length: the slow case of matching. Standard library only.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

SEED = 20_263
ENDPOINTS = 64
BLOCKS = 1_000_000
BLOCK_TOKENS = 64
PROMPT_TOKENS = 100_000
PROMPT_BLOCKS = -(-PROMPT_TOKENS // BLOCK_TOKENS)
"""1,563, the last one not full."""
MATCH_BLOCKS = 1_000
STORED_AT_ONCE = 16
AGENTS = 16
HOT_CHAINS = 8


@dataclass(slots=True)
class Content:
    """Chains of block keys from the root, and which endpoint has how much of which."""

    prefixes: list[list[int]] = field(default_factory=list)
    sessions: list[list[int]] = field(default_factory=list)
    """Conversations, their prefix included."""
    hot: list[list[int]] = field(default_factory=list)
    held: list[tuple[int, list[int], int]] = field(default_factory=list)
    """(endpoint, chain, how many blocks of it are there), in order of time."""


def make(blocks: int = BLOCKS) -> Content:
    """Caches that hold `blocks` different blocks together."""
    rng = random.Random(SEED)
    content = Content()
    for agent in range(AGENTS):
        prefix = _keys(rng, rng.randrange(150, 400))
        content.prefixes.append(prefix)
        homes = (
            range(ENDPOINTS) if agent < AGENTS // 4 else rng.sample(range(ENDPOINTS), rng.randrange(8, 48))
        )
        content.held += [(endpoint, prefix, len(prefix)) for endpoint in homes]
    for _ in range(HOT_CHAINS):
        chain = _keys(rng, PROMPT_BLOCKS)
        content.hot.append(chain)
        ends = [PROMPT_BLOCKS, *rng.sample(range(1, PROMPT_BLOCKS), ENDPOINTS - 1)]
        content.held += [(endpoint, chain, end) for endpoint, end in enumerate(ends)]
    left = blocks - sum(map(len, content.prefixes)) - HOT_CHAINS * PROMPT_BLOCKS
    kept = []
    """Of each session, the blocks that an endpoint has."""
    while left > 0:
        if kept and rng.random() < 0.2:
            parent = rng.randrange(max(0, len(kept) - 20), len(kept))
            above = content.sessions[parent][: rng.randrange(kept[parent] // 2, kept[parent])]
            own = min(left, rng.randrange(100, 600))
        else:
            above = rng.choice(content.prefixes)
            own = min(left, rng.randrange(400, 2600))
        lost = rng.randrange(1, 1000) if rng.random() < 0.1 else 0
        session = above + _keys(rng, own + lost)
        home, former = rng.sample(range(ENDPOINTS), 2)
        kept.append(len(above) + own)
        if rng.random() < 0.3:
            content.held.append((former, session, rng.randrange(len(above), kept[-1])))
        content.held.append((home, session, kept[-1]))
        content.sessions.append(session)
        left -= own
    return content


def prompts(content: Content, seed: int, count: int, blocks: int) -> list[list[int]]:
    """Keys of prompts with so many blocks: next turns, forks, hot chains, new conversations."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        kind = rng.random()
        if kind < 0.1:
            known = rng.choice(content.prefixes)
        elif kind < 0.2:
            known = rng.choice(content.hot)[: rng.randrange(blocks // 2, blocks)]
        else:
            known = rng.choice(content.sessions)
            if len(known) < blocks * 3 // 4:
                continue
            known = known[: blocks - rng.randrange(10, blocks // 4)]
        known = known[:blocks]
        found.append(known + _keys(rng, blocks - len(known)))
    return found


def hot_prompts(content: Content, blocks: int) -> list[list[int]]:
    """Prompts that every endpoint has to another length."""
    return [chain[:blocks] for chain in content.hot]


def stored(content: Content) -> Iterator[tuple[int, int | None, list[int]]]:
    """(endpoint, parent, keys) of every event that made the caches what they are."""
    for endpoint, chain, end in content.held:
        for start in range(0, end, STORED_AT_ONCE):
            parent = chain[start - 1] if start else None
            yield endpoint, parent, chain[start : min(start + STORED_AT_ONCE, end)]


def _keys(rng: random.Random, blocks: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(blocks)]
