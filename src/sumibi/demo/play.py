"""Plays the script against a running stack, one request after the other.

Sequential on purpose: what is measured is the placement, not how a CPU core is shared. The one
exception is phase 4, where A's replica is kept decoding while B arrives.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sumibi.admin import Admin
from sumibi.demo.claims import StepResult
from sumibi.demo.client import Stream, ask
from sumibi.demo.script import Message, Step
from sumibi.local.updown import Report

ANSWER_TOKENS = 8
BUSY_TOKENS = 400
"""More than the busy replica can decode while B's prompt is computed elsewhere."""


@dataclass(frozen=True, slots=True)
class Door:
    """A running stack: where to ask, and where to look up what became of a request."""

    url: str
    model: str
    admin: Admin


def play(
    door: Door, steps: Iterable[Step], policy: str, busy: list[Message], report: Report
) -> Iterator[StepResult]:
    """Send every step and yield what it cost. `busy` is what occupies a replica where a step asks for it."""
    for step in steps:
        if step.busy_first:
            with _busy(door, busy):
                answer = ask(door.url, door.model, step.messages, ANSWER_TOKENS)
        else:
            answer = ask(door.url, door.model, step.messages, ANSWER_TOKENS)
        result = StepResult(
            phase=step.phase,
            step=step.label,
            policy=policy,
            endpoint=door.admin.endpoint_of(answer.request_id),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            ttft_s=answer.ttft_s,
            turn=step.turn,
        )
        report(f"phase {step.phase}", _line(result), None)
        yield result


@contextmanager
def _busy(door: Door, messages: list[Message]) -> Iterator[None]:
    """Keep a long answer running inside the block; it is cancelled at its end."""
    stream = Stream(door.url, door.model, messages, BUSY_TOKENS)
    try:
        stream.wait_first_token()
        yield
    finally:
        stream.close()


def _line(result: StepResult) -> str:
    return (
        f"{result.policy}: {result.step}: {result.cached_tokens} of {result.prompt_tokens} tokens cached,"
        f" first token after {result.ttft_s:.3f} s"
    )
