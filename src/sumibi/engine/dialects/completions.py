"""`/v1/completions`: what it asks beside its prompt, and its answers."""

import msgspec
from msgspec import UnsetType

from sumibi.engine.choices import Choices, Piece
from sumibi.engine.dialects.writing import DoneWriter, encode, event
from sumibi.engine.fields import UNSUPPORTED, CompletionFields, refuse_unsupported
from sumibi.engine.wire import Completion, CompletionChoice, CompletionLogprobs, Usage
from sumibi.prompts.dialects import decode_body
from sumibi.prompts.tokenizer import Tokenizer

_fields = msgspec.json.Decoder(CompletionFields)


def read_completion(body: bytes) -> CompletionFields:
    """Raises BadRequest naming the field."""
    fields = decode_body(_fields, body)
    refuse_unsupported(fields, UNSUPPORTED)
    return fields


class CompletionWriter(DoneWriter):
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
        """See `DoneWriter`."""
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
        return encode(completion)

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
