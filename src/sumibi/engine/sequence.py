"""One sequence: a prompt and its growing continuation, with what scheduler and sampler keep about it.

A request with `n` choices is `n` sequences. Plain data: who may run is the scheduler's business, which
token comes next the sampler's, text the server's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sumibi.core.content import content_id
from sumibi.engine.transfer.tickets import Ticket


class FinishReason(StrEnum):
    """Why a sequence ended, in the words of the OpenAI API (and vLLM's `abort`)."""

    STOP = "stop"
    """A stop token or stop string, the model's end of sequence among them."""
    LENGTH = "length"
    """`max_tokens`, or the model's context is full."""
    ABORT = "abort"
    """Ended from outside: the client left, or the engine stops."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Defaults are the OpenAI API's; limits are checked where requests are parsed."""

    max_tokens: int
    min_tokens: int = 0
    """Stop tokens cannot be chosen before this many."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Only the k most likely tokens; 0 is all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability."""
    min_p: float = 0.0
    """Only tokens at least this likely, relative to the most likely one."""
    seed: int = 0
    """0 to 2^64 - 1."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence, the model's own among them unless they are to be ignored."""
    logprobs: int | None = None
    """Alternatives to report with each token; 0 is the chosen token alone, None nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Their KV is then computed anew, whatever is cached."""

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything but temperature and truncation changes the distribution."""
        return bool(
            self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.min_tokens
        )

    @property
    def truncates(self) -> bool:
        """Whether the least likely tokens are cut off by count or by probability."""
        return self.top_k > 0 or self.top_p < 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token under the model's own distribution (no temperature, no bias)."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their log-probabilities, best first."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Created once, changed by the scheduler only."""

    number: int
    """Order of arrival in this engine."""
    prompt_tokens: int
    """Length of the prompt within `tokens`."""
    tokens: list[int]
    """Prompt and output so far."""
    params: SamplingParams
    content_ids: list[bytes]
    """Ids of the full blocks of `tokens` that were needed so far: at least those of the prompt."""
    root: bytes
    """Content id of the empty prefix (`core.content.content_root`)."""
    salt: str = ""
    request_id: str = ""
    """The client's name for the request (`X-Request-Id`); empty: it gave none."""
    attempt: int = 1
    """Above 1: the request was sent before, and failed elsewhere or was given up here."""
    cached_limit: int | None = None
    """The most cached prompt tokens that the answer may tell: what an earlier attempt found."""
    index: int = 0
    """Which of the request's choices."""
    siblings: list["Sequence"] = field(default_factory=list)
    """The request's other choices, until the prompt they share is computed."""
    table: list[int] = field(default_factory=list)
    """Physical blocks; empty while waiting."""
    computed: int = 0
    """Tokens whose KV lies in `table`."""
    filled: int = 0
    """Leading blocks of `table` whose content the pool knows."""
    overtaken_tokens: int = 0
    """Tokens prefilled for sequences that arrived later, while this one's prefill was not over."""
    cached_tokens: int | None = None
    """Prompt tokens that need not be computed, found when it was first admitted; None before."""
    cached_by_source: dict[str, int] = field(default_factory=dict)
    """The same by where they were found: "device", or what a load said."""
    offered_tokens: int = 0
    """Leading tokens that were on the device or on offer from outside when it was last looked."""
    transfer: Ticket | None = None
    """If its KV goes to another engine, or comes from one."""
    may_load: bool = True
    """False once a load took too long: then what is missing is computed."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of prompt tokens 1, 2, ... as far as they are computed, if wanted."""
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The stop token that ended it."""
    arrived_s: float = 0.0
    started_s: float | None = None
    """When it was first part of a step; these three are the engine loop's clock, for metrics."""
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_tokens - 1

    def extend_content_ids(self, blocks: int, block_tokens: int) -> None:
        """Make `content_ids` cover the first `blocks` blocks, all of which must be full."""
        for index in range(len(self.content_ids), blocks):
            parent = self.content_ids[-1] if index else self.root
            tokens = self.tokens[index * block_tokens : (index + 1) * block_tokens]
            self.content_ids.append(content_id(parent, tokens))
