"""The choices of one request while they grow: tokens in, pieces of an answer out.

Between the engine (tokens) and the wire (JSON): text, stop strings, counts. A stop string ends a choice
here, and the engine is told to stop it.
"""

from collections import Counter
from dataclasses import dataclass, field

from sumibi.engine.asked import Request
from sumibi.engine.loop import Generation, PromptReport, Token
from sumibi.engine.sequence import FinishReason, TokenLogprob
from sumibi.engine.text import ChoiceText
from sumibi.engine.transfer.params import TransferAnswer
from sumibi.prompts.tokenizer import Tokenizer


@dataclass(slots=True)
class Piece:
    """What one choice got since the last time."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: int | str | None = None
    """The stop string or stop token that ended it; None for the model's own end of sequence."""

    def extend(self, later: "Piece") -> None:
        """Add what the same choice got next."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish, self.stop = later.finish, later.stop


class Choices:
    """All choices of a request."""

    def __init__(
        self, request: Request, generation: Generation, tokenizer: Tokenizer, eos: frozenset[int]
    ) -> None:
        self.request = request
        self._generation = generation
        self._eos = eos
        self._texts = [
            ChoiceText(tokenizer, job.token_ids, request.text) for job in request.jobs for _ in range(job.n)
        ]
        self.output_tokens = 0
        """Of all choices so far."""

    @property
    def done(self) -> bool:
        """Whether every choice has its last piece."""
        return self._generation.done

    async def take(self) -> list[Piece]:
        """The next pieces, at most one a choice. Raises EngineUnavailable."""
        pieces: dict[int, Piece] = {}
        for token in await self._generation.take():
            piece = pieces.setdefault(token.choice, Piece(token.choice))
            if piece.finish is None:  # else a stop string came earlier in this very batch
                self._absorb(token, piece)
        return list(pieces.values())

    def report(self, prompt: int) -> PromptReport:
        """About one of the prompts, once a piece of it was taken."""
        return self._generation.report(prompt)

    def prompt_tokens(self) -> int:
        """Of all prompts; a prompt counts once, whatever its number of choices."""
        return sum(len(job.token_ids) for job in self.request.jobs)

    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache, as far as the prompts have begun."""
        return sum(self.report(prompt).cached_tokens for prompt in range(len(self.request.jobs)))

    def cached_by_source(self) -> dict[str, int]:
        """The same by where they were: "device", "host", ..."""
        total: Counter[str] = Counter()
        for prompt in range(len(self.request.jobs)):
            total.update(self.report(prompt).cached_by_source)
        return dict(total)

    def transfer_answer(self) -> TransferAnswer | None:
        """What another engine needs to get the prompt's KV from here, once everything was taken."""
        return self._generation.transfer_answer

    def _absorb(self, token: Token, piece: Piece) -> None:
        text = self._texts[token.choice]
        if token.token is not None:
            self.output_tokens += 1
            piece.token_ids.append(token.token)
            if token.logprob is not None:
                piece.logprobs.append(token.logprob)
            # A stop token is part of the output, but not of its text, unless that is asked for.
            if token.stop_token is None or self.request.text.include_stop:
                piece.text += text.push(token.token)
        if token.finish is not None and text.stop is None:
            piece.text += text.finish()
        if text.stop is not None:
            piece.finish, piece.stop = FinishReason.STOP, text.stop
            if token.finish is None:
                self._generation.drop(token.choice)
        elif token.finish is not None:
            piece.finish = token.finish
            piece.stop = token.stop_token if token.stop_token not in self._eos else None
