"""Writes answers: pieces of choices in, bytes of one dialect out, whole or as server-sent events."""

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
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
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


class Writer(Protocol):
    """Writes one request's answer in one dialect."""

    def events(self, pieces: list[Piece]) -> bytes:
        """Server-sent events for new pieces; empty if there is nothing to tell yet."""
        ...

    def usage_event(self) -> bytes:
        """The event with the usage and no choice that ends a stream, if asked for."""
        ...

    def whole(self, pieces: list[Piece]) -> bytes:
        """The JSON body, from all pieces together, one a choice."""
        ...


_encode = msgspec.json.Encoder().encode


def error_body(error: SumibiError) -> bytes:
    """`{"error": ...}` as the OpenAI API has it; `param` names the field at fault."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    param = error.param if isinstance(error, BadRequest) else None
    return _encode(ErrorBody(ErrorDetail(str(error), kind, param, error.code)))


def event(payload: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(payload) + b"\n\n"


def writer_for(path: str, model: str, choices: Choices, tokenizer: Tokenizer) -> Writer:
    """The writer for answers to `POST path`."""
    if path == "/v1/chat/completions":
        return ChatWriter(model, choices, tokenizer)
    return CompletionWriter(model, choices, tokenizer)


class _Common:
    """What both dialects share."""

    id_kind: str

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


class CompletionWriter(_Common):
    """`/v1/completions`."""

    id_kind = "cmpl"

    def __init__(self, model: str, choices: Choices, tokenizer: Tokenizer) -> None:
        super().__init__(model, choices, tokenizer)
        self._offsets: dict[int, int] = {}

    def events(self, pieces: list[Piece]) -> bytes:
        """One event a piece."""
        out = b""
        for piece in pieces:
            if self.is_empty(piece):
                continue
            choice = self._choice(piece)
            if self.is_first(piece):
                choice.prompt_token_ids = self.prompt_token_ids(piece.choice)
            completion = self._completion([choice], self.chunk_usage())
            if piece.finish is not None:
                completion.kv_transfer_params = self.transfer_answer()
            out += event(completion)
        return out

    def usage_event(self) -> bytes:
        """See `Writer`."""
        return event(self._completion([], self.usage()))

    def whole(self, pieces: list[Piece]) -> bytes:
        """See `Writer`."""
        choices = []
        for piece in pieces:
            choice = self._choice(piece)
            choice.prompt_token_ids = self.prompt_token_ids(piece.choice)
            choice.prompt_logprobs = self.prompt_logprobs(piece.choice)
            choices.append(choice)
        completion = self._completion(choices, self.usage())
        completion.kv_transfer_params = self.transfer_answer()
        return _encode(completion)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        return CompletionChoice(
            index=piece.choice,
            text=piece.text,
            logprobs=self._logprobs(piece) if self.options.logprobs else None,
            finish_reason=piece.finish,
            stop_reason=piece.stop,
            token_ids=self.token_ids(piece),
        )

    def _logprobs(self, piece: Piece) -> CompletionLogprobs:
        offsets = []
        tokens = []
        offset = self._offsets.get(piece.choice, 0)
        for record in piece.logprobs:
            tokens.append(self.token_text(record.token))
            offsets.append(offset)
            offset += len(tokens[-1])
        self._offsets[piece.choice] = offset
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[record.logprob for record in piece.logprobs],
            tokens=tokens,
            top_logprobs=[
                {
                    self.token_text(token): value
                    for token, value in (*record.top, (record.token, record.logprob))
                }
                for record in piece.logprobs
            ],
        )


class ChatWriter(_Common):
    """`/v1/chat/completions`."""

    id_kind = "chatcmpl"

    def events(self, pieces: list[Piece]) -> bytes:
        """One event a piece, and before the first of a choice one that tells its role."""
        out = b""
        for piece in pieces:
            if self.is_first(piece):
                opening = ChatChunkChoice(index=piece.choice, delta=ChatDelta("", "assistant"))
                chunk = self._chunk([opening], self.chunk_usage())
                chunk.prompt_token_ids = self.prompt_token_ids(piece.choice)
                out += event(chunk)
            if self.is_empty(piece):
                continue
            choice = ChatChunkChoice(
                index=piece.choice,
                delta=ChatDelta(piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish,
                stop_reason=piece.stop,
                token_ids=self.token_ids(piece),
            )
            chunk = self._chunk([choice], self.chunk_usage())
            if piece.finish is not None:
                chunk.kv_transfer_params = self.transfer_answer()
            out += event(chunk)
        return out

    def usage_event(self) -> bytes:
        """See `Writer`."""
        return event(self._chunk([], self.usage()))

    def whole(self, pieces: list[Piece]) -> bytes:
        """See `Writer`."""
        choices = [
            ChatChoice(
                index=piece.choice,
                message=ChatMessage(piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish,
                stop_reason=piece.stop,
                token_ids=self.token_ids(piece),
            )
            for piece in pieces
        ]
        chat = Chat(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage(),
            prompt_logprobs=self.prompt_logprobs(0),
            prompt_token_ids=self.prompt_token_ids(0),
            kv_transfer_params=self.transfer_answer(),
        )
        return _encode(chat)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self.options.logprobs:
            return None
        return ChatLogprobs([self._logprob(record) for record in piece.logprobs])

    def _logprob(self, record: TokenLogprob) -> ChatLogprob:
        own = self._top(record.token, record.logprob)
        return ChatLogprob(own.token, own.logprob, own.bytes, [self._top(*each) for each in record.top])

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text = self.token_text(token)
        return TopLogprob(text, logprob, list(text.encode()))
