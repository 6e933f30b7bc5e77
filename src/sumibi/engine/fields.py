"""Fields of a request that come after its prompt: OpenAI's, and vLLM's additions.

A field that would change the answer and that this engine does not have is refused by name (`UNSUPPORTED`),
never ignored. Fields that do not concern the answer (`user`, `metadata`, ...) and unknown ones are skipped,
as vLLM does. Other dialects bring their own and are read into these (`sumibi.engine.dialects`).
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from sumibi.core.errors import BadRequest

MAX_LOGPROBS = 20
MAX_STOPS = 16

Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Logprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Stop = Annotated[str, msgspec.Meta(min_length=1)]
Stops = Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`: only text is had."""

    type: str


class Fields(msgspec.Struct, kw_only=True):
    """Fields of both APIs. None is "not given" throughout: clients send null for defaults."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """-1, as 0, is all."""
    min_p: Unit | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    logit_bias: dict[str, Bias] | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: Count | None = None
    max_tokens: int | None = None
    """Its range is checked with the prompt; here it matters whether it was given."""
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Logprobs | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # Not supported, see UNSUPPORTED.
    allowed_token_ids: Any = None
    bad_words: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    priority: Any = None
    response_format: ResponseFormat | None = None
    return_tokens_as_token_ids: Any = None
    structured_outputs: Any = None
    use_beam_search: Any = None


class ChatFields(Fields, kw_only=True):
    """Of a chat."""

    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    # Not supported.
    audio: Any = None
    echo: Any = None
    function_call: Any = None
    tool_choice: Any = None


class CompletionFields(Fields, kw_only=True):
    """Of a plain completion."""

    logprobs: Logprobs | None = None
    # Not supported.
    best_of: Any = None
    echo: Any = None
    prompt_embeds: Any = None
    suffix: Any = None


UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "priority": (0,),
    "prompt_embeds": (),
    "response_format": (ResponseFormat("text"),),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "use_beam_search": (False,),
}
"""Fields that this engine does not have, with the values that ask for nothing (null always does).
`tools` are shown to the model through its chat template; what it answers is text, never parsed into calls."""


def refuse_unsupported(
    fields: msgspec.Struct, unsupported: Mapping[str, tuple[object, ...]], *, within: str = ""
) -> None:
    """Raises BadRequest for the first field that asks for what is not here; `within` goes before its name."""
    for name, harmless in unsupported.items():
        value = getattr(fields, name, None)
        if value is not None and value not in harmless:
            raise BadRequest(f"{within}{name}: not supported by this engine", param=f"{within}{name}")
