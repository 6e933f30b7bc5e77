"""vLLM's `/inference/v1/generate`, tokens in, tokens out: what it asks beside its prompt, and its answers."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from sumibi.core.ids import new_id
from sumibi.engine.choices import Choices, Piece
from sumibi.engine.dialects.writing import DoneWriter, encode, event
from sumibi.engine.fields import UNSUPPORTED, CompletionFields, StreamOptions, refuse_unsupported
from sumibi.engine.sequence import TokenLogprob
from sumibi.engine.transfer.params import TransferAnswer
from sumibi.engine.wire import ChatLogprobs, PromptLogprobs, Usage
from sumibi.prompts.dialects import decode_body
from sumibi.prompts.tokenizer import Tokenizer

Mode = Literal["tokens", "text"]
WITHIN = "sampling_params."
"""Where most fields are."""


class GenerateFields(CompletionFields, kw_only=True):
    """`sampling_params`, and what stands beside it and concerns the answer."""

    output_mode: Mode = "tokens"
    request_id: str = ""


class _Body(msgspec.Struct, kw_only=True):
    sampling_params: GenerateFields
    output_mode: Mode | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: dict[str, Any] | None = None
    priority: int | None = None


_body = msgspec.json.Decoder(_Body)


def read_generate(body: bytes) -> GenerateFields:
    """Raises BadRequest naming the field."""
    given = decode_body(_body, body)
    refuse_unsupported(given, {"priority": (0,)})
    refuse_unsupported(given.sampling_params, UNSUPPORTED, within=WITHIN)
    return msgspec.structs.replace(
        given.sampling_params,
        output_mode=given.output_mode or "tokens",
        request_id=given.request_id or "",
        return_token_ids=given.return_token_ids,
        stream_options=given.stream_options,
        kv_transfer_params=given.kv_transfer_params,
    )


class TokenChoiceLogprob(msgspec.Struct):
    """One likely token."""

    token_id: int
    logprob: float
    rank: int | None


class TokenLogprobContent(TokenChoiceLogprob):
    """The token that was drawn; `top_logprobs` are the likely ones, itself first."""

    top_logprobs: list[TokenChoiceLogprob]


class TokenLogprobs(msgspec.Struct):
    """One entry a token."""

    content: list[TokenLogprobContent]


class GenerateChoice(msgspec.Struct, kw_only=True):
    """One choice, or what it got since the last event."""

    index: int
    token_ids: list[int]
    text: str | UnsetType = UNSET
    logprobs: TokenLogprobs | ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generated(msgspec.Struct, kw_only=True):
    """The body of an answer, and of each event of a stream."""

    request_id: str
    output_mode: Mode
    choices: list[GenerateChoice]
    model: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: TransferAnswer | UnsetType = UNSET


class GenerateWriter(DoneWriter):
    """Answers of `/inference/v1/generate`."""

    id_kind = "gen"

    def __init__(self, model: str, choices: Choices, tokenizer: Tokenizer) -> None:
        super().__init__(model, choices, tokenizer)
        fields = choices.request.fields
        assert isinstance(fields, GenerateFields)
        self._mode: Mode = fields.output_mode
        self.id = fields.request_id or new_id(self.id_kind)

    def events(self, pieces: list[Piece]) -> bytes:
        """One event a piece."""
        out = b""
        for piece in pieces:
            if not (piece.token_ids or piece.finish or piece.text):
                continue
            generated = self._generated([self._choice(piece)], self.chunk_usage())
            if self.is_first(piece):
                generated.prompt_token_ids = self.prompt_token_ids(piece.choice)
            if piece.finish is not None:
                generated.kv_transfer_params = self.transfer_answer()
            out += event(generated)
        return out

    def usage_event(self) -> bytes:
        """See `DoneWriter`."""
        return event(self._generated([], self.usage()))

    def whole(self, pieces: list[Piece]) -> bytes:
        """See `Writer`."""
        generated = self._generated([self._choice(piece) for piece in pieces], self.usage())
        generated.model, generated.created = self.model, self.created
        generated.prompt_token_ids = self.prompt_token_ids(0)
        generated.prompt_logprobs = self.prompt_logprobs(0)
        generated.kv_transfer_params = self.transfer_answer()
        return encode(generated)

    def _generated(self, choices: list[GenerateChoice], usage: Usage | UnsetType) -> Generated:
        return Generated(request_id=self.id, output_mode=self._mode, choices=choices, usage=usage)

    def _choice(self, piece: Piece) -> GenerateChoice:
        in_text = self._mode == "text"
        return GenerateChoice(
            index=piece.choice,
            token_ids=piece.token_ids,
            text=piece.text if in_text else UNSET,
            logprobs=self.logprobs(piece) if in_text else self._token_logprobs(piece),
            finish_reason=piece.finish,
            stop_reason=piece.stop,
        )

    def _token_logprobs(self, piece: Piece) -> TokenLogprobs | None:
        if not self.options.logprobs:
            return None
        return TokenLogprobs([_token_logprob(record) for record in piece.logprobs])


def _token_logprob(record: TokenLogprob) -> TokenLogprobContent:
    drawn = TokenChoiceLogprob(record.token, record.logprob, record.rank)
    rivals = [
        TokenChoiceLogprob(token, value, rank)
        for rank, (token, value) in enumerate(record.top, 1)
        if token != record.token
    ]
    return TokenLogprobContent(record.token, record.logprob, record.rank, [drawn, *rivals])
