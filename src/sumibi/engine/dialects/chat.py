"""`/v1/chat/completions`: what it asks beside its prompt, and its answers."""

import msgspec
from msgspec import UnsetType

from sumibi.engine.choices import Piece
from sumibi.engine.dialects.writing import DoneWriter, encode, event
from sumibi.engine.fields import UNSUPPORTED, ChatFields, refuse_unsupported
from sumibi.engine.wire import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    Usage,
)
from sumibi.prompts.dialects import decode_body

_fields = msgspec.json.Decoder(ChatFields)


def read_chat(body: bytes) -> ChatFields:
    """Raises BadRequest naming the field."""
    fields = decode_body(_fields, body)
    refuse_unsupported(fields, UNSUPPORTED)
    return fields


class ChatWriter(DoneWriter):
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
                logprobs=self.logprobs(piece),
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
        """See `DoneWriter`."""
        return event(self._chunk([], self.usage()))

    def whole(self, pieces: list[Piece]) -> bytes:
        """See `Writer`."""
        choices = [
            ChatChoice(
                index=piece.choice,
                message=ChatMessage(piece.text),
                logprobs=self.logprobs(piece),
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
        return encode(chat)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)
