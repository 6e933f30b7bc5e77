"""What a request asks of the engine: the OpenAI fields and vLLM's additions, checked one by one.

The prompt's own fields are read by `sumibi.prompts` (the gateway reads them with the same code); here it
is what comes after the prompt. A field that would change the answer and that this engine does not have
is refused by name (`_UNSUPPORTED`), never ignored. Fields that do not concern the answer (`user`,
`metadata`, ...) and unknown ones are skipped, as vLLM does.
"""

import random
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from sumibi.core.errors import BadRequest, UnknownModel
from sumibi.engine.loop import Job
from sumibi.engine.sequence import SamplingParams
from sumibi.engine.text import TextOptions
from sumibi.engine.transfer.config import KVTransferConfig
from sumibi.engine.transfer.params import KeepRequest, PullRequest, check_length, read_params
from sumibi.prompts.dialects import PromptKind, PromptRequest, decode_body, parse_request
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

MAX_CHOICES = 128
"""Choices of one request: prompts times `n`."""
MAX_LOGPROBS = 20
MAX_STOPS = 16
_GREEDY_BELOW = 1e-5
"""Temperatures under this are 0, as in vLLM: dividing by them would overflow."""

Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Logprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Stop = Annotated[str, msgspec.Meta(min_length=1)]
Stops = Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of this engine: its names and what it can take."""

    name: str
    root: str
    """Its checkpoint directory, as vLLM tells it: a gateway on the same machine reads the tokenizer there."""
    max_tokens: int
    """Prompt and output of one sequence."""
    vocabulary: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the answer is to look."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    logprobs: bool
    """Whether tokens are reported with their log-probabilities."""
    n: int
    """Choices a prompt."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, ready for the engine."""

    jobs: list[Job]
    text: TextOptions
    answer: AnswerOptions


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str


class _Fields(msgspec.Struct, kw_only=True):
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
    stream_options: _StreamOptions | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # Not supported, see _UNSUPPORTED.
    allowed_token_ids: Any = None
    bad_words: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    priority: Any = None
    response_format: _ResponseFormat | None = None
    return_tokens_as_token_ids: Any = None
    structured_outputs: Any = None
    use_beam_search: Any = None


class _ChatFields(_Fields, kw_only=True):
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    # Not supported.
    audio: Any = None
    echo: Any = None
    function_call: Any = None
    tool_choice: Any = None


class _CompletionFields(_Fields, kw_only=True):
    logprobs: Logprobs | None = None
    # Not supported.
    best_of: Any = None
    echo: Any = None
    prompt_embeds: Any = None
    suffix: Any = None


_UNSUPPORTED: dict[str, tuple[object, ...]] = {
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
    "response_format": (_ResponseFormat("text"),),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "use_beam_search": (False,),
}
"""Fields that this engine does not have, with the values that ask for nothing (null always does).
`tools` are shown to the model through its chat template; what it answers is text, never parsed into calls."""

_chat_fields = msgspec.json.Decoder(_ChatFields)
_completion_fields = msgspec.json.Decoder(_CompletionFields)


class RequestReader:
    """Reads requests for one served model."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        seed: int,
        transfer: KVTransferConfig | None = None,
    ) -> None:
        """`seed` starts the seeds of requests that bring none; `transfer` says what they may ask for."""
        self._transfer = transfer
        self.model = model
        self.tokenizer = tokenizer
        self._template = template
        self._seeds = random.Random(seed)

    def read(self, path: str, body: bytes) -> Request:
        """A completion or chat request. Raises BadRequest naming the field, UnknownModel."""
        prompt = parse_request(path, body)
        prompts = self.tokenize(prompt, at_most=self.model.max_tokens)
        fields: _ChatFields | _CompletionFields
        if prompt.kind is PromptKind.CHAT:
            fields = decode_body(_chat_fields, body)
        else:
            fields = decode_body(_completion_fields, body)
        _refuse_unsupported(fields)
        self._check_sizes(prompt, prompts, fields)
        params = self._params(prompt, fields)
        transfer = read_params(fields.kv_transfer_params, self._transfer)
        if transfer is not None:
            _check_one(transfer, len(prompts), prompt.n)
            if isinstance(transfer, PullRequest):
                check_length(transfer, len(prompts[0]))
        jobs = []
        for token_ids in prompts:
            room = self.model.max_tokens - len(token_ids)
            limit = min(params.max_tokens, room)
            limited = replace(params, max_tokens=limit)
            jobs.append(Job(token_ids, limited, prompt.n, prompt.cache_salt, transfer))
        return Request(jobs, _text_options(fields), _answer_options(prompt, fields, params))

    def tokenize(self, request: PromptRequest, *, at_most: int | None = None) -> list[list[int]]:
        """Token ids of each prompt of a request, in order. Raises BadRequest, UnknownModel.

        A text that surely has more tokens than `at_most` is refused without tokenising it.
        """
        if request.model != self.model.name:
            raise UnknownModel(
                f"model: {request.model!r} is not served here, {self.model.name!r} is", param="model"
            )
        if request.opaque:
            raise BadRequest(f"{request.opaque}: not supported", param=request.opaque)
        field = "messages" if request.kind is PromptKind.CHAT else "prompt"
        prompts = request.token_ids
        if request.kind is not PromptKind.TOKENS:
            texts = [self._render(request)] if request.kind is PromptKind.CHAT else request.texts
            for text in texts:
                least = self.tokenizer.least_tokens(text)
                if at_most is not None and least > at_most:
                    raise _too_long(field, at_most, f"at least {least}")
            special = request.add_special_tokens
            prompts = [self.tokenizer.encode(text, add_special_tokens=special) for text in texts]
        if [] in prompts:
            raise BadRequest(f"{field}: it is empty, at least one token is needed", param=field)
        for token_ids in prompts:
            self._check_ids(token_ids, field)
        return prompts

    def _render(self, request: PromptRequest) -> str:
        if self._template is None:
            raise BadRequest("messages: this model has no chat template", param="messages")
        return self._template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.template_arguments,
        )

    def _check_ids(self, token_ids: list[int], field: str) -> None:
        # An id beyond the vocabulary would not fail one request: it would fail the step of all.
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.model.vocabulary:
            raise BadRequest(
                f"{field}: token ids are 0 to {self.model.vocabulary - 1} for this model", param=field
            )

    def _check_sizes(
        self, prompt: PromptRequest, prompts: list[list[int]], fields: "_ChatFields | _CompletionFields"
    ) -> None:
        field = "messages" if prompt.kind is PromptKind.CHAT else "prompt"
        limit = self.model.max_tokens
        longest = max(map(len, prompts))
        if longest >= limit:
            raise _too_long(field, limit, str(longest))
        if len(prompts) * prompt.n > MAX_CHOICES:
            raise BadRequest(f"n: at most {MAX_CHOICES} choices a request", param="n")
        if prompt.max_tokens is None or (prompt.kind is not PromptKind.CHAT and fields.max_tokens is None):
            return  # no limit of the client's own: the context is one
        if longest + prompt.max_tokens > limit:
            raise BadRequest(
                f"max_tokens: this model's context is {limit} tokens; {longest} of the prompt and "
                f"{prompt.max_tokens} of output are more",
                param="max_tokens",
            )

    def _params(self, prompt: PromptRequest, fields: "_ChatFields | _CompletionFields") -> SamplingParams:
        stop_ids = fields.stop_token_ids or []
        self._check_ids(stop_ids, "stop_token_ids")
        temperature = _or(fields.temperature, 1.0)
        seed = self._seeds.getrandbits(64) if fields.seed is None else fields.seed
        max_tokens = _or(prompt.max_tokens, self.model.max_tokens)
        min_tokens = fields.min_tokens or 0
        if min_tokens > max_tokens:
            raise BadRequest(f"min_tokens: at most max_tokens ({max_tokens})", param="min_tokens")
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_k=min(max(0, fields.top_k or 0), self.model.vocabulary),
            top_p=_or(fields.top_p, 1.0),
            min_p=fields.min_p or 0.0,
            seed=seed % (1 << 64),
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            repetition_penalty=_or(fields.repetition_penalty, 1.0),
            logit_bias=self._logit_bias(fields.logit_bias or {}),
            stop_token_ids=frozenset(stop_ids)
            | (frozenset() if fields.ignore_eos else self.model.eos_token_ids),
            logprobs=_logprobs(fields),
            prompt_logprobs=fields.prompt_logprobs,
        )

    def _logit_bias(self, given: dict[str, float]) -> dict[int, float]:
        try:
            bias = {int(token): value for token, value in given.items()}
        except ValueError as cause:
            raise BadRequest("logit_bias: keys are token ids", param="logit_bias") from cause
        self._check_ids(list(bias), "logit_bias")
        return bias


def _too_long(field: str, limit: int, tokens: str) -> BadRequest:
    return BadRequest(
        f"{field}: this model's context is {limit} tokens, output included; the prompt has {tokens}",
        param=field,
    )


def _refuse_unsupported(fields: "_ChatFields | _CompletionFields") -> None:
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(fields, name, None)
        if value is not None and value not in harmless:
            raise BadRequest(f"{name}: not supported by this engine", param=name)


def _check_one(transfer: KeepRequest | PullRequest, prompts: int, choices: int) -> None:
    if prompts > 1:
        raise BadRequest("kv_transfer_params: only with a single prompt", param="kv_transfer_params")
    if choices > 1 and isinstance(transfer, KeepRequest):
        field = "kv_transfer_params.do_remote_decode"
        raise BadRequest(f"{field}: only with n 1, it is {choices}", param=field)


def _or(value: float | int | None, default: Any) -> Any:
    return default if value is None else value


def _logprobs(fields: "_ChatFields | _CompletionFields") -> int | None:
    if isinstance(fields, _CompletionFields):
        return fields.logprobs
    if not fields.logprobs:
        if fields.top_logprobs:
            raise BadRequest("top_logprobs: needs logprobs true", param="top_logprobs")
        return None
    return fields.top_logprobs or 0


def _text_options(fields: "_ChatFields | _CompletionFields") -> TextOptions:
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return TextOptions(
        stops=tuple(stops),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        min_tokens=fields.min_tokens or 0,
    )


def _answer_options(
    prompt: PromptRequest, fields: "_ChatFields | _CompletionFields", params: SamplingParams
) -> AnswerOptions:
    options = fields.stream_options
    if options is not None and not prompt.stream:
        raise BadRequest("stream_options: only with stream true", param="stream_options")
    if prompt.stream and fields.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: not with stream true", param="prompt_logprobs")
    return AnswerOptions(
        stream=prompt.stream,
        include_usage=prompt.include_usage,
        continuous_usage=bool(options is not None and options.continuous_usage_stats),
        return_token_ids=bool(fields.return_token_ids),
        logprobs=params.logprobs is not None,
        n=prompt.n,
    )
