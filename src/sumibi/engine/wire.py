"""The JSON of answers: the OpenAI API's, with vLLM's additions. Structs are the schema.

Fields that an answer has only on request are UNSET by default, and so left out; those that clients expect
to be there are null.
"""

import msgspec
from msgspec import UNSET, UnsetType

from sumibi.engine.transfer.params import TransferAnswer


class PromptTokensDetails(msgspec.Struct):
    """What the prompt's tokens cost."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int] | UnsetType = UNSET
    """The same by where they were (device, host, disk, store), if any were not on the device."""


class TierInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One tier below the device, as `/kv_event_sources` tells it."""

    name: str
    """The medium of its KV events, in lower case."""
    shared: bool = False
    """Engines that give this name read and write the same store."""
    tokens: int | None = None
    gb_per_s: float | None = None
    """10^9 bytes a second of a load, as measured here; None: not measured yet, like the next."""
    latency_s: float | None = None


class Usage(msgspec.Struct):
    """Token counts of one request, all choices together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    """One token at one place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token, null for the first; keys are token ids."""


class CompletionLogprobs(msgspec.Struct):
    """Lists with one entry a token; offsets are characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice, or what it got since the last event."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The body of an answer, and of each event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    kv_transfer_params: TransferAnswer | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """One likely token; `bytes` is its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """The chosen token, and the likely ones, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry a token."""

    content: list[ChatLogprob]


class ChatMessage(msgspec.Struct):
    """What the model said."""

    content: str
    role: str = "assistant"


class ChatDelta(msgspec.Struct):
    """What it said since the last event."""

    content: str
    role: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a whole answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice in an event."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Chat(msgspec.Struct, kw_only=True):
    """The body of an answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: TransferAnswer | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """The body of an event."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: TransferAnswer | UnsetType = UNSET


class ErrorDetail(msgspec.Struct):
    """What went wrong: `type` says whose fault it was, `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


class ModelCard(msgspec.Struct, kw_only=True):
    """One entry of `/v1/models`."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "sumibi"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct):
    """The body of `/v1/models`."""

    data: list[ModelCard]
    object: str = "list"


class Tokenized(msgspec.Struct, kw_only=True):
    """The body of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class RenderedSampling(msgspec.Struct, kw_only=True):
    """How a rendered request would be sampled."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float


class Rendered(msgspec.Struct, kw_only=True):
    """The body of `/v1/chat/completions/render`: the request in vLLM's token-level form."""

    request_id: str
    token_ids: list[int]
    sampling_params: RenderedSampling
    model: str
    stream: bool
    cache_salt: str | None
    priority: int = 0
