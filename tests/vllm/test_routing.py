"""Conversations of agents over two real engines: where their cache is, is where they go."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm_harness import MODEL, GatewayThread, words

AGENTS, TURNS = 7, 5
GROWTH_WORDS = 200
"""Each turn: some 200 tokens. At the end all agents have some 8,000 tokens: more than one engine's 6,400, and
well within both.
"""


def play(gateway: GatewayThread, name: str) -> tuple[int, int]:
    """Play every agent's turns, two requests at a time; (cached, prompt) tokens as engines told."""
    chance = random.Random(6)
    histories: list[list[dict[str, str]]] = [
        [{"role": "system", "content": words([name, agent, "system", *range(30)])}] for agent in range(AGENTS)
    ]
    cached = prompt = 0

    def ask(agent: int, turn: int) -> Any:
        said = words([name, agent, turn, *range(GROWTH_WORDS)])
        histories[agent].append({"role": "user", "content": said})
        body = {"model": MODEL, "messages": histories[agent], "max_tokens": 8, "temperature": 0}
        answer = gateway.ask("/v1/chat/completions", body)
        text = answer["choices"][0]["message"]["content"]
        histories[agent].append({"role": "assistant", "content": text or "."})
        return answer["usage"]

    with ThreadPoolExecutor(2) as pool:
        for turn in range(TURNS):
            order = chance.sample(range(AGENTS), AGENTS)
            for usage in pool.map(ask, order, [turn] * AGENTS):
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                prompt += usage["prompt_tokens"]
    return cached, prompt


def test_agents_find_their_cache_where_round_robin_does_not(engines, start_gateway, record_property):
    rates: dict[str, float] = {}
    for policy in ("round-robin", "cost"):
        for engine in engines:
            engine.reset_cache()
        gateway = start_gateway(*engines, policy=policy)
        cached, prompt = play(gateway, "routing")
        rates[policy] = cached / prompt
        record_property(f"hit_rate_{policy}", rates[policy])
        gateway.check_empty()
        gateway.close()
    # A turn's prompt but its last 200 tokens could be cached: two thirds over these turns.
    assert rates["cost"] > 0.55, rates
    assert rates["cost"] > 1.5 * rates["round-robin"], rates
