"""How answers are written: pieces of choices in, bytes of a dialect out, whole or as server-sent events."""

import time
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from sumibi.core.errors import BadRequest, SumibiError
from sumibi.core.ids import new_id
from sumibi.engine.choices import Choices, Piece
from sumibi.engine.sequence import TokenLogprob
from sumibi.engine.transfer.params import TransferAnswer
from sumibi.engine.wire import (
    ChatLogprob,
    ChatLogprobs,
    ErrorBody,
    ErrorDetail,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TopLogprob,
    Usage,
)
from sumibi.prompts.tokenizer import Tokenizer

STREAM_END = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class Writer(Protocol):
    """Writes one request's answer in one dialect."""

    def events(self, pieces: list[Piece]) -> bytes:
        """Server-sent events for new pieces; empty if there is nothing to tell yet."""
        ...

    def end(self) -> bytes:
        """What ends a stream after the last piece."""
        ...

    def failed(self, error: SumibiError) -> bytes:
        """What ends a stream that had begun and cannot go on."""
        ...

    def whole(self, pieces: list[Piece]) -> bytes:
        """The JSON body, from all pieces together, one a choice."""
        ...


def error_body(error: SumibiError) -> bytes:
    """`{"error": ...}` as the OpenAI API has it; `param` names the field at fault."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    param = error.param if isinstance(error, BadRequest) else None
    return encode(ErrorBody(ErrorDetail(str(error), kind, param, error.code)))


def event(payload: object, name: str = "") -> bytes:
    """One server-sent event; with a `name` for dialects that name theirs."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + encode(payload) + b"\n\n"


class Common:
    """What the answers of all dialects need."""

    id_kind: str
    """The letters before an answer's id."""

    def __init__(self, model: str, choices: Choices, tokenizer: Tokenizer) -> None:
        self.id = new_id(self.id_kind)
        self.created = int(time.time())
        self.model = model
        self.choices = choices
        self.options = choices.request.answer
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def usage(self) -> Usage:
        """Usage so far."""
        prompt, output = self.choices.prompt_tokens(), self.choices.output_tokens
        by_source = self.choices.cached_by_source()
        tiers = by_source if by_source.keys() - {"device"} else UNSET
        details = PromptTokensDetails(self.choices.cached_tokens(), tiers)
        return Usage(prompt, prompt + output, output, details)

    def chunk_usage(self) -> Usage | UnsetType:
        """For each event, if the client wants it there."""
        return self.usage() if self.options.continuous_usage else UNSET

    def is_first(self, piece: Piece) -> bool:
        """Whether this is the first piece of its choice to be written. Remembers that it was."""
        first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        return first

    def is_empty(self, piece: Piece) -> bool:
        """Nothing to tell: its text is not certain yet, and it brings nothing else that was asked for."""
        tokens = piece.token_ids and (self.options.return_token_ids or self.options.logprobs)
        return not (piece.text or piece.finish or tokens)

    def token_ids(self, piece: Piece) -> list[int] | UnsetType:
        """The piece's tokens, if asked for."""
        return piece.token_ids if self.options.return_token_ids else UNSET

    def transfer_answer(self) -> TransferAnswer | UnsetType:
        """For a whole answer, or the event with the finish reason."""
        return self.choices.transfer_answer() or UNSET

    def prompt_token_ids(self, choice: int) -> list[int] | UnsetType:
        """The prompt's tokens, if asked for."""
        if not self.options.return_token_ids:
            return UNSET
        return self.choices.request.jobs[choice // self.options.n].token_ids

    def prompt_logprobs(self, choice: int) -> PromptLogprobs | UnsetType:
        """The list for the prompt of `choice`, if asked for."""
        prompt = choice // self.options.n
        top = self.choices.request.jobs[prompt].params.prompt_logprobs
        if top is None:
            return UNSET
        return [None, *(self._prompt_logprob(record) for record in self.choices.report(prompt).logprobs)]

    def _prompt_logprob(self, record: TokenLogprob) -> dict[str, PromptLogprob]:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(record.top, 1)}
        ranked[record.token] = (record.logprob, record.rank)
        return {
            str(token): PromptLogprob(value, rank, self.token_text(token))
            for token, (value, rank) in ranked.items()
        }

    def token_text(self, token: int) -> str:
        """The text of one token by itself; bytes that are no whole character show as U+FFFD."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def logprobs(self, piece: Piece) -> ChatLogprobs | None:
        """Of the piece's tokens as chats have them, if asked for."""
        if not self.options.logprobs:
            return None
        return ChatLogprobs([self._logprob(record) for record in piece.logprobs])

    def _logprob(self, record: TokenLogprob) -> ChatLogprob:
        own = self._rival(record.token, record.logprob)
        return ChatLogprob(own.token, own.logprob, own.bytes, [self._rival(*each) for each in record.top])

    def _rival(self, token: int, logprob: float) -> TopLogprob:
        text = self.token_text(token)
        return TopLogprob(text, logprob, list(text.encode()))


class DoneWriter(Common):
    """Of dialects whose streams end with the usage, if that is asked for, and a mark."""

    def usage_event(self) -> bytes:
        """The event with the usage and no choice that ends a stream, if asked for."""
        raise NotImplementedError

    def end(self) -> bytes:
        """See `Writer`."""
        return (self.usage_event() if self.options.include_usage else b"") + STREAM_END

    def failed(self, error: SumibiError) -> bytes:
        """See `Writer`."""
        return b"data: " + error_body(error) + b"\n\n" + STREAM_END
