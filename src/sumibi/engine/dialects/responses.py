"""OpenAI's `/v1/responses`, without memory: what it asks beside its prompt, and its answers.

Nothing is stored, whatever `store` says, and the answer says so. The model's text is one message; tool calls
and reasoning are not told apart from it.
"""

from typing import Annotated, Any

import msgspec

from sumibi.core.errors import BadRequest, SumibiError
from sumibi.core.ids import new_id
from sumibi.engine.choices import Choices, Piece
from sumibi.engine.dialects.writing import Common, encode, event
from sumibi.engine.fields import UNSUPPORTED, ChatFields, Logprobs, refuse_unsupported
from sumibi.engine.sequence import FinishReason
from sumibi.engine.wire import ChatLogprob, PromptTokensDetails
from sumibi.prompts.dialects import decode_body
from sumibi.prompts.tokenizer import Tokenizer

_LOGPROBS = "message.output_text.logprobs"
_HARMLESS_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")
_OUTPUT_TOOLS = ("function", "custom", "namespace")
"""Tools that the client runs; others the server would have to."""
_STATUS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "failed",
}
_ABORTED = {"code": "server_error", "message": "the engine ended this response before it was done"}


class _Text(msgspec.Struct):
    format: Any = None
    verbosity: Any = None


class _Tool(msgspec.Struct):
    type: Any = None


class ResponsesFields(ChatFields, kw_only=True):
    """Fields of responses; of vLLM's additions those that a chat has."""

    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    tools: list[msgspec.Raw] | None = None
    top_logprobs: Logprobs | None = None
    truncation: str | None = None


_UNSUPPORTED = UNSUPPORTED | {"truncation": ("disabled",)}
_fields = msgspec.json.Decoder(ResponsesFields)
_tool = msgspec.json.Decoder(_Tool)


def read_responses(body: bytes) -> ResponsesFields:
    """Raises BadRequest naming the field."""
    fields = decode_body(_fields, body)
    refuse_unsupported(fields, _UNSUPPORTED)
    if fields.text is not None:
        _refuse_format(fields.text)
    for at, raw in enumerate(fields.tools or []):
        kind = decode_body(_tool, bytes(raw)).type
        if kind not in _OUTPUT_TOOLS:
            name = f"tools[{at}].type"
            allowed = ", ".join(_OUTPUT_TOOLS)
            raise BadRequest(f"{name}: {kind!r} is not had here; allowed are {allowed}", param=name)
    for at, word in enumerate(fields.include or []):
        if word not in _HARMLESS_INCLUDES:
            name = f"include[{at}]"
            raise BadRequest(f"{name}: {word!r} is not had here", param=name)
    fields.logprobs = _LOGPROBS in (fields.include or [])
    if not fields.logprobs:
        fields.top_logprobs = None
    return fields


def _refuse_format(text: _Text) -> None:
    if text.format is not None and text.format != {"type": "text"}:
        raise BadRequest("text.format: not supported by this engine", param="text.format")
    if text.verbosity not in (None, "medium"):
        raise BadRequest("text.verbosity: not supported by this engine", param="text.verbosity")


class _OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class _InputTokensDetails(PromptTokensDetails, kw_only=True):
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of one request."""

    input_tokens: int
    input_tokens_details: _InputTokensDetails
    output_tokens: int
    output_tokens_details: _OutputTokensDetails
    total_tokens: int


class OutputText(msgspec.Struct, kw_only=True):
    """The one part of the one message."""

    text: str
    type: str = "output_text"
    annotations: list[None] = []
    logprobs: list[ChatLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True):
    """The one item of the output."""

    id: str
    type: str = "message"
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ResponsesWriter(Common):
    """Answers of `/v1/responses`."""

    id_kind = "resp"

    def __init__(self, model: str, choices: Choices, tokenizer: Tokenizer) -> None:
        super().__init__(model, choices, tokenizer)
        fields = choices.request.fields
        assert isinstance(fields, ResponsesFields)
        self._fields = fields
        self._message_id = new_id("msg")
        self._events = 0
        self._said = OutputText(text="")
        """So far, in a stream."""
        self._finish: FinishReason | None = None

    def events(self, pieces: list[Piece]) -> bytes:
        """Response, item and part begin with the first piece, and the last one ends part and item."""
        out = b""
        for piece in pieces:
            if self.is_first(piece):
                out += self._begin()
            if self.is_empty(piece):
                continue
            logprobs = self._logprobs(piece)
            if piece.text or logprobs:
                delta = {"delta": piece.text, "logprobs": logprobs}
                out += self._event("response.output_text.delta", **self._part(), **delta)
            self._said.text += piece.text
            self._said.logprobs.extend(logprobs)
            self._finish = piece.finish
        return out

    def end(self) -> bytes:
        """See `Writer`."""
        said, message = self._said, self._message(self._said)
        done = {"text": said.text, "logprobs": said.logprobs}
        out = self._event("response.output_text.done", **self._part(), **done)
        out += self._event("response.content_part.done", **self._part(), part=said)
        out += self._event("response.output_item.done", output_index=0, item=message)
        response = self._response(self._status(), [message])
        return out + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: SumibiError) -> bytes:
        """See `Writer`."""
        # `error` is what OpenAI's client raises on; the others are the documented fields.
        detail = {"code": error.code, "message": str(error), "param": None}
        return self._event("error", **detail, error={"type": "server_error", **detail})

    def whole(self, pieces: list[Piece]) -> bytes:
        """See `Writer`."""
        (piece,) = pieces
        self._finish = piece.finish
        said = OutputText(text=piece.text, logprobs=self._logprobs(piece))
        return encode(self._response(self._status(), [self._message(said)]))

    def _begin(self) -> bytes:
        response = self._response("in_progress", [])
        item = OutputMessage(id=self._message_id, status="in_progress", content=[])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._part(), part=OutputText(text=""))
        )

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._events = self._events, self._events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _part(self) -> dict[str, object]:
        """Where in the response the one part is."""
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _logprobs(self, piece: Piece) -> list[ChatLogprob]:
        found = self.logprobs(piece)
        return found.content if found is not None else []

    def _status(self) -> str:
        """Of the response when it has ended."""
        return _STATUS[self._finish or FinishReason.ABORT]

    def _message(self, said: OutputText) -> OutputMessage:
        status = "completed" if self._finish is FinishReason.STOP else "incomplete"
        return OutputMessage(id=self._message_id, status=status, content=[said])

    def _response(self, status: str, output: list[OutputMessage]) -> dict[str, object]:
        fields = self._fields
        params = self.choices.request.jobs[0].params
        incomplete = {"reason": "max_output_tokens"} if self._finish is FinishReason.LENGTH else None
        response: dict[str, object] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": _ABORTED if status == "failed" else None,
            "incomplete_details": incomplete,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
        }
        if output and (transfer := self.choices.transfer_answer()) is not None:
            response["kv_transfer_params"] = transfer
        return response

    def _usage(self) -> ResponseUsage:
        usage = self.usage()
        cached = usage.prompt_tokens_details
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=_InputTokensDetails(
                cached_tokens=cached.cached_tokens, cached_tokens_by_tier=cached.cached_tokens_by_tier
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=_OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )
