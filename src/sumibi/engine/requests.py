"""What a request asks of the engine, whatever its dialect: checked field by field, and made into jobs.

The prompt's own fields are read by `sumibi.prompts` (the gateway reads them with the same code), what comes
after the prompt by `sumibi.engine.dialects`.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from sumibi.core.errors import BadRequest, UnknownModel
from sumibi.engine.asked import AnswerOptions, Request
from sumibi.engine.dialects import COUNT_TOKENS, SPOKEN, Spoken
from sumibi.engine.fields import ChatFields, CompletionFields, Fields
from sumibi.engine.loop import Job
from sumibi.engine.sequence import SamplingParams
from sumibi.engine.text import TextOptions
from sumibi.engine.transfer.config import KVTransferConfig
from sumibi.engine.transfer.params import KeepRequest, PullRequest, check_length, read_params
from sumibi.prompts.dialects import Dialect, PromptKind, PromptRequest, parse_request, settled
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

MAX_CHOICES = 128
"""Choices of one request: prompts times `n`."""
_GREEDY_BELOW = 1e-5
"""Temperatures under this are 0, as in vLLM: dividing by them would overflow."""


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
        """A request of one of the paths of `SPOKEN`. Raises BadRequest naming the field, UnknownModel."""
        spoken = SPOKEN[path]
        prompt = parse_request(path, body)
        prompts = self.tokenize(prompt, at_most=self.model.max_tokens)
        fields = spoken.read(body)
        self._check_sizes(prompt, prompts, fields, spoken)
        params = self._params(prompt, fields, spoken)
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
        return Request(jobs, _text_options(fields), _answer_options(prompt, fields, params, spoken), fields)

    def count(self, body: bytes) -> int:
        """Tokens of the prompt of a `count_tokens` request. Raises as `read` does."""
        (token_ids,) = self.tokenize(parse_request(COUNT_TOKENS, body))
        return len(token_ids)

    def tokenize(self, request: PromptRequest, *, at_most: int | None = None) -> list[list[int]]:
        """Token ids of each prompt of a request, in order. Raises BadRequest, UnknownModel.

        A text that surely has more tokens than `at_most` is refused without tokenising it.
        """
        if request.model not in (self.model.name, ""):
            raise UnknownModel(
                f"model: {request.model!r} is not served here, {self.model.name!r} is", param="model"
            )
        if request.stateful:
            raise BadRequest(
                f"{request.stateful}: no response is remembered here; send the whole conversation as input",
                param=request.stateful,
            )
        if request.opaque:
            raise BadRequest(f"{request.opaque}: not supported", param=request.opaque)
        request = settled(request, self._template)
        field = _prompt_field(request)
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
            field = _prompt_field(request)
            raise BadRequest(f"{field}: this model has no chat template", param=field)
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
        self, prompt: PromptRequest, prompts: list[list[int]], fields: Fields, spoken: Spoken
    ) -> None:
        field = _prompt_field(prompt)
        limit = self.model.max_tokens
        longest = max(map(len, prompts))
        if longest >= limit:
            raise _too_long(field, limit, str(longest))
        if len(prompts) * prompt.n > MAX_CHOICES:
            name = f"{spoken.within}n"
            raise BadRequest(f"{name}: at most {MAX_CHOICES} choices a request", param=name)
        if prompt.max_tokens is None or (prompt.dialect is Dialect.COMPLETIONS and fields.max_tokens is None):
            return  # no limit of the client's own: the context is one
        if longest + prompt.max_tokens > limit:
            raise BadRequest(
                f"{spoken.limit}: this model's context is {limit} tokens; {longest} of the prompt and "
                f"{prompt.max_tokens} of output are more",
                param=spoken.limit,
            )

    def _params(self, prompt: PromptRequest, fields: Fields, spoken: Spoken) -> SamplingParams:
        stop_ids = fields.stop_token_ids or []
        self._check_ids(stop_ids, f"{spoken.within}stop_token_ids")
        temperature = _or(fields.temperature, 1.0)
        seed = self._seeds.getrandbits(64) if fields.seed is None else fields.seed
        max_tokens = _or(prompt.max_tokens, self.model.max_tokens)
        min_tokens = fields.min_tokens or 0
        if min_tokens > max_tokens:
            name = f"{spoken.within}min_tokens"
            raise BadRequest(f"{name}: at most {spoken.limit} ({max_tokens})", param=name)
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
            logit_bias=self._logit_bias(fields.logit_bias or {}, f"{spoken.within}logit_bias"),
            stop_token_ids=frozenset(stop_ids)
            | (frozenset() if fields.ignore_eos else self.model.eos_token_ids),
            logprobs=_logprobs(fields),
            prompt_logprobs=fields.prompt_logprobs,
        )

    def _logit_bias(self, given: dict[str, float], name: str) -> dict[int, float]:
        try:
            bias = {int(token): value for token, value in given.items()}
        except ValueError as cause:
            raise BadRequest(f"{name}: keys are token ids", param=name) from cause
        self._check_ids(list(bias), name)
        return bias


def _too_long(field: str, limit: int, tokens: str) -> BadRequest:
    return BadRequest(
        f"{field}: this model's context is {limit} tokens, output included; the prompt has {tokens}",
        param=field,
    )


def _prompt_field(request: PromptRequest) -> str:
    """Where the request has its prompt."""
    return "token_ids" if request.dialect is Dialect.GENERATE else request.conversion.field


def _check_one(transfer: KeepRequest | PullRequest, prompts: int, choices: int) -> None:
    if prompts > 1:
        raise BadRequest("kv_transfer_params: only with a single prompt", param="kv_transfer_params")
    if choices > 1 and isinstance(transfer, KeepRequest):
        field = "kv_transfer_params.do_remote_decode"
        raise BadRequest(f"{field}: only with n 1, it is {choices}", param=field)


def _or(value: float | int | None, default: Any) -> Any:
    return default if value is None else value


def _logprobs(fields: Fields) -> int | None:
    if isinstance(fields, CompletionFields):
        return fields.logprobs
    assert isinstance(fields, ChatFields)
    if not fields.logprobs:
        if fields.top_logprobs:
            raise BadRequest("top_logprobs: needs logprobs true", param="top_logprobs")
        return None
    return fields.top_logprobs or 0


def _text_options(fields: Fields) -> TextOptions:
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return TextOptions(
        stops=tuple(stops),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        min_tokens=fields.min_tokens or 0,
    )


def _answer_options(
    prompt: PromptRequest, fields: Fields, params: SamplingParams, spoken: Spoken
) -> AnswerOptions:
    options = fields.stream_options
    if options is not None and not prompt.stream:
        raise BadRequest("stream_options: only with stream true", param="stream_options")
    if prompt.stream and fields.prompt_logprobs is not None:
        name = f"{spoken.within}prompt_logprobs"
        raise BadRequest(f"{name}: not with stream true", param=name)
    return AnswerOptions(
        stream=prompt.stream,
        include_usage=prompt.include_usage,
        continuous_usage=bool(options is not None and options.continuous_usage_stats),
        return_token_ids=bool(fields.return_token_ids),
        logprobs=params.logprobs is not None,
        n=prompt.n,
    )
