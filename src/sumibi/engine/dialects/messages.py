"""Anthropic's `/v1/messages`: what it asks beside its prompt, and its answers.

As vLLM has it: `input_tokens` are those that were not cached, and the sum with those that were is the prompt.
The model's text is one block; tool calls and thoughts are not told apart from it.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sumibi.core.errors import BadRequest, SumibiError
from sumibi.engine.choices import Piece
from sumibi.engine.dialects.writing import Common, encode, event
from sumibi.engine.fields import ChatFields, Stops, refuse_unsupported
from sumibi.engine.sequence import FinishReason
from sumibi.engine.transfer.params import TransferAnswer
from sumibi.prompts.dialects import decode_body

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's word by HTTP status; others are `api_error`."""


class _ToolChoice(msgspec.Struct):
    type: str


class _OutputConfig(msgspec.Struct):
    format: Any = None


class _Thinking(msgspec.Struct):
    type: str


class MessagesFields(ChatFields, kw_only=True):
    """Anthropic's fields; of vLLM's additions those that a chat has."""

    stop_sequences: Stops | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    thinking: _Thinking | None = None
    # Not supported.
    container: Any = None
    mcp_servers: Any = None


_UNSUPPORTED = {
    "container": (),
    "mcp_servers": ([],),
    "priority": (0,),
    "structured_outputs": (),
    "thinking": (_Thinking("disabled"), _Thinking("adaptive")),
    "tool_choice": (_ToolChoice("auto"), _ToolChoice("none")),
}
_fields = msgspec.json.Decoder(MessagesFields)


def read_messages(body: bytes) -> MessagesFields:
    """Raises BadRequest naming the field."""
    fields = decode_body(_fields, body)
    refuse_unsupported(fields, _UNSUPPORTED)
    if fields.output_config is not None and fields.output_config.format is not None:
        name = "output_config.format"
        raise BadRequest(f"{name}: not supported by this engine", param=name)
    fields.stop = fields.stop_sequences
    return fields


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Tokens of one request; the prompt's are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    cached_tokens_by_tier: dict[str, int] | UnsetType = UNSET
    """Of those read, if any were not on the device."""


class TextBlock(msgspec.Struct):
    """All that the model said."""

    text: str
    type: str = "text"


class Message(msgspec.Struct, kw_only=True):
    """A whole answer, or the beginning of a stream."""

    id: str
    type: str = "message"
    role: str = "assistant"
    content: list[TextBlock]
    model: str
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    kv_transfer_params: TransferAnswer | UnsetType = UNSET


class _ErrorDetail(msgspec.Struct):
    type: str
    message: str


class _Error(msgspec.Struct):
    error: _ErrorDetail
    type: str = "error"
    request_id: str | None = None


def messages_error(error: SumibiError) -> bytes:
    """An error in Anthropic's shape; the message names the field at fault."""
    return encode(_Error(_ErrorDetail(_ERRORS.get(error.status, "api_error"), str(error))))


class MessagesWriter(Common):
    """Answers of `/v1/messages`."""

    id_kind = "msg"

    def events(self, pieces: list[Piece]) -> bytes:
        """The message and its block begin with the first piece, and end with the last one."""
        out = b""
        for piece in pieces:
            if self.is_first(piece):
                begun = self._message([], None, None)
                out += event({"type": "message_start", "message": begun}, "message_start")
                block = {"type": "content_block_start", "index": 0, "content_block": TextBlock("")}
                out += event(block, "content_block_start")
            if piece.text:
                delta = {"type": "text_delta", "text": piece.text}
                name = "content_block_delta"
                out += event({"type": name, "index": 0, "delta": delta}, name)
            if piece.finish is not None:
                out += event({"type": "content_block_stop", "index": 0}, "content_block_stop")
                out += self._ended(piece)
        return out

    def _ended(self, piece: Piece) -> bytes:
        reason, sequence = _stop(piece)
        ended: dict[str, object] = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._usage(),
        }
        transfer = self.transfer_answer()
        if transfer is not UNSET:
            ended["kv_transfer_params"] = transfer
        return event(ended, "message_delta")

    def end(self) -> bytes:
        """See `Writer`."""
        return event({"type": "message_stop"}, "message_stop")

    def failed(self, error: SumibiError) -> bytes:
        """See `Writer`."""
        return b"event: error\ndata: " + messages_error(error) + b"\n\n"

    def whole(self, pieces: list[Piece]) -> bytes:
        """See `Writer`."""
        (piece,) = pieces
        message = self._message([TextBlock(piece.text)], *_stop(piece))
        message.kv_transfer_params = self.transfer_answer()
        return encode(message)

    def _message(self, content: list[TextBlock], reason: str | None, sequence: str | None) -> Message:
        return Message(
            id=self.id,
            content=content,
            model=self.model,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _usage(self) -> MessagesUsage:
        usage = self.usage()
        cached = usage.prompt_tokens_details
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached.cached_tokens,
            cache_read_input_tokens=cached.cached_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens_by_tier=cached.cached_tokens_by_tier,
        )


def _stop(piece: Piece) -> tuple[str | None, str | None]:
    """Why it ended in Anthropic's words, and the stop sequence if one did."""
    match piece.finish:
        case FinishReason.LENGTH:
            return "max_tokens", None
        case FinishReason.STOP if isinstance(piece.stop, str):
            return "stop_sequence", piece.stop
        case FinishReason.STOP:
            return "end_turn", None
    return None, None
