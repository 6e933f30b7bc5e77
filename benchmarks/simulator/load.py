"""What is asked of the live stack: conversations like those of the demonstration's last phase, at once.

Users play one conversation after another: a long context of its own, then questions, each after a pause.
Together they need a little more than both engines' caches hold. Earlier answers are fixed texts and answers
have a fixed length, so a run asks the same whatever the model says. The pauses leave engines idle half of
the time even on a slow machine: at the edge of overload a small error of speed is a large one of queues.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException
from random import Random

from sumibi.core.errors import SumibiError
from sumibi.demo.client import ask
from sumibi.demo.script import Message
from sumibi.demo.texts import Texts

USERS = 6
TURNS = 8
CONTEXT_TOKENS = 900
QUESTION_TOKENS = 60
ANSWER_TOKENS = 16
KV_BLOCKS = 110
"""Of an engine: 3,520 tokens. Six conversations in their middle take about 7,500."""
PAUSE_S = 7.0
"""Mean of a user's pause before a question; from 0 to twice that, evenly."""
SESSION_LIMIT = 12
"""Conversations prepared for each user: more than fit into the time."""
LATEST_S = 60.0
"""How long after the end an answer may come."""


@dataclass(slots=True)
class Played:
    """What clients saw."""

    requests: int = 0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def conversations(texts: Texts, user: int) -> list[list[list[Message]]]:
    """A user's conversations, each as the messages of every turn."""
    return [_conversation(texts, f"{user}/{number}") for number in range(SESSION_LIMIT)]


def _conversation(texts: Texts, name: str) -> list[list[Message]]:
    history = [{"role": "system", "content": texts.of(CONTEXT_TOKENS, f"context {name}")}]
    turns = []
    for turn in range(TURNS):
        history.append({"role": "user", "content": texts.of(QUESTION_TOKENS, f"question {name} {turn}")})
        turns.append(list(history))
        history.append({"role": "assistant", "content": texts.of(ANSWER_TOKENS, f"answer {name} {turn}")})
    return turns


def play(
    url: str, model: str, texts: Texts, lasts_s: float, seed: int, report: Callable[[str], None]
) -> Played:
    """Ask for `lasts_s`; what is under way then is waited for."""
    until = time.monotonic() + lasts_s
    played = Played()
    users = [
        threading.Thread(
            target=_user,
            args=(url, model, conversations(texts, number), until, Random(f"{seed}/{number}"), played),
            daemon=True,
        )
        for number in range(USERS)
    ]
    for user in users:
        user.start()
    while (left_s := until - time.monotonic()) > -LATEST_S and any(user.is_alive() for user in users):
        report(f"{played.requests} requests answered, {max(0.0, left_s):.0f} s to go")
        for user in users:
            user.join(10.0 / USERS)
    if any(user.is_alive() for user in users):
        played.failures.append(f"requests were not answered {LATEST_S:.0f} s after the end")
    return played


def _user(
    url: str, model: str, prepared: list[list[list[Message]]], until: float, draw: Random, played: Played
) -> None:
    # Each begins in the middle of the first: else all would be new, and full, at the same times.
    first, *others = prepared
    for turns in (first[draw.randrange(TURNS) :], *others):
        for messages in turns:
            pause_s = draw.uniform(0.0, 2 * PAUSE_S)
            if time.monotonic() + pause_s > until:
                return
            time.sleep(pause_s)
            try:
                ask(url, model, messages, ANSWER_TOKENS)
            except (OSError, ValueError, HTTPException, SumibiError) as cause:
                played.failures.append(str(cause))
                return
            with played.lock:
                played.requests += 1
