"""One request as the engine takes it: what to compute, and how the answer is to look."""

from dataclasses import dataclass

from sumibi.engine.fields import Fields
from sumibi.engine.loop import Job
from sumibi.engine.text import TextOptions


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the answer is to look."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    logprobs: bool
    """Whether tokens are reported with their log-probabilities."""
    n: int
    """Choices a prompt."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, ready for the engine."""

    jobs: list[Job]
    text: TextOptions
    answer: AnswerOptions
    fields: Fields
    """Its dialect's own, which some answers repeat or heed."""
