"""Tokens in, tokens out: vLLM's `/inference/v1/generate`, and SGLang's `/generate`, which takes texts too."""

from typing import Annotated

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.prompts.dialects.fields import (
    NonEmpty,
    Positive,
    Raw,
    TokenId,
    TransferFields,
    decode_body,
    first_present,
    present,
)
from sumibi.prompts.dialects.inputs import ids_of, prompts_of
from sumibi.prompts.dialects.request import Dialect, PromptKind, PromptRequest

_SGLANG_MAX_NEW_TOKENS = 128
"""What SGLang generates at most if nothing is said."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Sampling(msgspec.Struct):
    max_tokens: Positive | None = None
    n: Positive | None = None


class _View(TransferFields, kw_only=True):
    """Unknown fields are skipped, not refused."""

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling_params: _Sampling
    model: NonEmpty | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: NonEmpty | None = None
    features: Raw = Raw()
    content_parts: Raw = Raw()


class _SGLangSampling(msgspec.Struct):
    max_new_tokens: Positive | None = _SGLANG_MAX_NEW_TOKENS
    n: Positive | None = None


class _SGLangView(TransferFields, kw_only=True):
    text: Raw = Raw()
    input_ids: Raw = Raw()
    input_embeds: Raw = Raw()
    image_data: Raw = Raw()
    video_data: Raw = Raw()
    audio_data: Raw = Raw()
    positional_embed_overrides: Raw = Raw()
    sampling_params: _SGLangSampling | list[_SGLangSampling] | None = None
    stream: bool | None = None
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    lora_path: Raw = Raw()
    session_params: Raw = Raw()
    model: NonEmpty | None = None


_view = msgspec.json.Decoder(_View)
_sglang_view = msgspec.json.Decoder(_SGLangView)


def parse_generate(body: bytes) -> PromptRequest:
    """`POST /inference/v1/generate`. Raises BadRequest naming the field and what is allowed."""
    view = decode_body(_view, body)
    return PromptRequest(
        dialect=Dialect.GENERATE,
        kind=PromptKind.TOKENS,
        model=view.model or "",
        token_ids=[view.token_ids],
        cache_salt=view.cache_salt or "",
        opaque=first_present(features=view.features, content_parts=view.content_parts),
        transfer=view.transfer,
        stream=bool(view.stream),
        include_usage=bool(view.stream_options is not None and view.stream_options.include_usage),
        n=view.sampling_params.n or 1,
        max_tokens=view.sampling_params.max_tokens,
    )


def parse_sglang(body: bytes) -> PromptRequest:
    """`POST /generate`. Raises as `parse_generate` does."""
    view = decode_body(_sglang_view, body)
    texts: list[str] = []
    token_ids: list[list[int]] = []
    if present(view.input_ids):
        token_ids = ids_of(view.input_ids, "input_ids")
    elif present(view.text):
        texts, ids = prompts_of(view.text, "text")
        if ids:
            raise BadRequest("text: a text or a list of texts is allowed", param="text")
    elif not present(view.input_embeds):
        raise BadRequest("text: one of text, input_ids and input_embeds is needed", param="text")
    sampling = view.sampling_params or _SGLangSampling()
    each = sampling if isinstance(sampling, list) else [sampling]
    limits = [one.max_new_tokens for one in each]
    salts = view.cache_salt or "", view.extra_key or ""
    one_salt = isinstance(salts[0], str) and isinstance(salts[1], str)
    return PromptRequest(
        dialect=Dialect.SGLANG,
        kind=PromptKind.TOKENS if token_ids else PromptKind.TEXT,
        model=view.model or "",
        texts=texts if texts or token_ids else [""],
        token_ids=token_ids,
        add_special_tokens=True,
        cache_salt="".join(salts) if one_salt else "",  # type: ignore[arg-type]
        opaque=_opaque(view) if one_salt else "cache_salt",
        transfer=view.transfer,
        stateful="session_params" if present(view.session_params) else "",
        stream=bool(view.stream),
        include_usage=bool(view.stream),
        n=max((one.n or 1 for one in each), default=1),
        max_tokens=None if None in limits else max((one for one in limits if one is not None), default=None),
    )


def _opaque(view: _SGLangView) -> str:
    return first_present(
        input_embeds=view.input_embeds,
        image_data=view.image_data,
        video_data=view.video_data,
        audio_data=view.audio_data,
        positional_embed_overrides=view.positional_embed_overrides,
        lora_path=view.lora_path,
        session_params=view.session_params,
    )
