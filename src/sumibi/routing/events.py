r"""What goes into the router (events) and what comes out (instructions).

Every event carries `t`: seconds on the shell's monotonic clock, never decreasing from one event to the
next. Shells build events from sockets or from simulated engines; the router never asks for anything
back except through instructions. All types are frozen, tagged and msgspec-encodable, so that a log of
them can be written, read and replayed.

Life of a request, as the shell tells it:

    Arrived -> Admitted -> (Dispatch) -> Dispatched -> FirstToken -> Finished
                       \-> (Refuse)

A `Dispatch` that names a `prefill` endpoint is a pair: that one computes the prompt, `endpoint` takes the KV
over and generates. Its attempt has a *leg*:

    (Dispatch) -> Dispatched(prefill endpoint) -> Prefilled -> Dispatched(endpoint) -> FirstToken -> Finished

(with connectors that run both at once the second `Dispatched` may come before `Prefilled`). `Prefilled` with
a failure ends the attempt like a `Finished` that was not answered: another `Dispatch` comes with it, or the
request is over.

`Finished` ends an attempt, whatever happened to it. If the reason allows a retry and nothing was sent to
the client yet, the router answers with another `Dispatch` (the reservation moves); otherwise the request
is over and every part of its reservation is released, exactly once. A request that was never dispatched
(turned down by the shell, or its client left while it waited for an endpoint) is ended by `Finished` too,
with attempt 0.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from sumibi.core.kvevents import EventBatch
from sumibi.core.latency import LatencyModel, LinkModel


class Grade(StrEnum):
    """How well we know an endpoint's cache. Shown per endpoint, never degrades in silence."""

    EXACT = "exact"
    """KV events arrive without a gap: the index equals the cache, up to the events' delay."""
    APPROXIMATE = "approximate"
    """Known from our own reservations and `cached_tokens` only, or events with a gap."""
    NONE = "none"
    """Nothing known (suspect endpoint, unknown prompt)."""


class PromptGrade(StrEnum):
    """How well we know a prompt's keys."""

    EXACT = "exact"
    """Rendered and tokenised as the engine does it."""
    ESTIMATED = "estimated"
    """Known prefix exact, the length of the rest estimated."""
    APPROXIMATE = "approximate"
    """Byte-chunk keys, no tokenizer: comparable among themselves only."""


class Role(StrEnum):
    """What an endpoint is for."""

    BOTH = "both"
    """Whole runs, and either half of a pair."""
    PREFILL = "prefill"
    """It computes prompts for others, and takes no whole runs."""
    DECODE = "decode"
    """It generates from prompts that were computed elsewhere, and takes whole runs (short remainders)."""


class FinishReason(StrEnum):
    """Why an attempt ended. `retriable` says whether another endpoint may take the request."""

    STOP = "stop"
    """The engine ended by itself (stop token, stop string, length, tool call)."""
    CLIENT_GONE = "client_gone"
    """The client closed its connection; the engine's side was aborted."""
    REFUSED = "refused"
    """The endpoint refused the connection: no byte of the request was processed."""
    ENGINE_GONE = "engine_gone"
    """The connection to the endpoint broke before its answer was complete."""
    ENGINE_ERROR = "engine_error"
    """The endpoint answered 5xx or 429."""
    TIMEOUT = "timeout"
    """The endpoint did not answer in time."""
    REJECTED = "rejected"
    """The endpoint answered 4xx: the request itself is at fault."""
    SHUTDOWN = "shutdown"
    """The gateway is going down and its drain time is over."""

    @property
    def retriable(self) -> bool:
        """True if another endpoint might do better with the same request."""
        return self in (self.REFUSED, self.ENGINE_GONE, self.ENGINE_ERROR, self.TIMEOUT)


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of every event; `t` is seconds on the shell's monotonic clock."""

    t: float


class Arrived(Event, frozen=True):
    """A request was read and parsed. Nothing is placed yet."""

    request: str
    """Unique id."""
    model: str
    """As the endpoints name it (a served model or an adapter)."""
    keys: Sequence[int]
    """Routing keys of the prompt's full blocks, in order (router block size of the model)."""
    prompt_tokens: int
    """Whole prompt, partial last block included; estimated if `prompt_grade` is not exact."""
    max_tokens: int | None = None
    """The client's limit on output, None if it gave none."""
    tenant: str = ""
    session: str = ""
    """Session id that the request carries; empty if none. Sessions are recognised without it, too."""
    program: str = ""
    """Whom to charge for it when requests have to wait: an agent's sessions, its sub-agents' included. Empty:
    its `session`, or else the conversation that its prompt goes on with."""
    priority: int = 0
    """Higher is more urgent: it goes first where requests wait, and to delay it costs more."""
    ttl_s: float | None = None
    """The longest that it wants to wait for its dispatch. It may only shorten what is usual."""
    prompt_grade: PromptGrade = PromptGrade.EXACT
    stream: bool = False
    only: list[str] | None = None
    """The endpoints that it may go to; None: any. Who is not among them does not exist for it."""
    followed: bool = True
    """Its answer will be seen. Else it is not held: how busy endpoints are is known too badly then."""


class Admitted(Event, frozen=True):
    """Tenancy and limits agree: choose and reserve now."""

    request: str


class Dispatched(Event, frozen=True):
    """The request's bytes left for `endpoint`."""

    request: str
    attempt: int
    endpoint: str


class Moved(Event, frozen=True):
    """A proxy that was given several endpoints to try passed over the attempt's, which could not be reached,
    and had `endpoint` answer. The attempt ends as one whose connection was refused, and the next one begins
    there: the `Dispatch` that is answered says so, and is carried out already.
    """

    request: str
    attempt: int
    endpoint: str


class Prefilled(Event, frozen=True):
    """The prefill leg of a pair is over: its part of the reservation ends."""

    request: str
    attempt: int
    failed: FinishReason | None = None
    """Why it brought nothing; None: the KV is ready to be fetched."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """As the prefill endpoint reports; `Finished` is to repeat it for the client's sake."""


class FirstToken(Event, frozen=True):
    """First byte of a generated answer arrived: the prefill part of the reservation ends."""

    request: str
    attempt: int


class Finished(Event, frozen=True):
    """An attempt is over. Usage fields are None when the engine did not report them."""

    request: str
    attempt: int
    reason: FinishReason
    answered: bool
    """True once any byte of an answer went to the client: then no retry is possible."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A place below the device that an endpoint fetches KV from."""

    name: str
    """As its KV events name the medium, in lower case (`cpu`). Of a shared one: its own name."""
    shared: bool = False
    """Several endpoints read it, those that give this name, and each writes what it computes to it."""
    tokens: int | None = None
    """Its room; None: not known, taken as endless."""
    gb_per_s: float | None = None
    """Of a read (10^9 bytes); None: usual for its kind (`lower.USUAL`), as with the next."""
    latency_s: float | None = None
    """Before the first byte."""


class EndpointUp(Event, frozen=True):
    """An endpoint is (again) ready to take requests. Repeated for a known one, it updates the fields."""

    endpoint: str
    """Canonical `http://host:port#rank`."""
    models: list[str]
    aliases: list[str] = []
    """Of `models`, the names of the first one: prompts for any of them share its cached blocks."""
    engine_block_tokens: int | None = None
    kv_tokens: int | None = None
    """Capacity of its device KV cache."""
    max_sequences: int | None = None
    """Sequences it runs at once (vLLM's --max-num-seqs)."""
    tiers: list[Tier] = []
    """Below its device. One that only its KV events tell of counts with what is usual for its kind."""
    has_events: bool = False
    has_replay: bool = False
    latency: LatencyModel | None = None
    """Where learning starts; None takes the router's default."""
    process_start_s: float | None = None
    """Wall-clock start of the engine process (`process_start_time_seconds`)."""
    role: Role = Role.BOTH
    revision: str = ""
    """Version of its deployed set: KV goes from one endpoint to another only within one."""
    kv_bytes_per_token: int | None = None
    """For transfers, like `link`, and fetches from `tiers`; None takes the router's default."""
    link: LinkModel | None = None
    prefetches: bool = False
    """It brings KV up from lower tiers to its host memory when it is told to (`Prefetch`)."""


class EndpointSuspect(Event, frozen=True):
    """Something smells of a restart: broken subscription, refused connection, ... Blocks lose trust."""

    endpoint: str
    cause: str


class EndpointDown(Event, frozen=True):
    """The endpoint takes no requests (health check failed, or it was removed for good)."""

    endpoint: str
    cause: str
    removed: bool = False
    """True: forget it altogether."""


class EngineBatch(Event, frozen=True):
    """One KV event batch, live or replayed."""

    endpoint: str
    batch: EventBatch
    digest: int
    """xxh3_64 of the payload bytes: tells whether a batch seen again is the same one."""
    replayed: bool = False


class KeysAdded(msgspec.Struct, frozen=True, tag=True):
    """Blocks now in `tier`: `keys` is a chain hanging from `parent` (None: from the empty prefix)."""

    tier: str
    parent: int | None
    keys: list[int]


class KeysCopied(msgspec.Struct, frozen=True, tag=True):
    """Blocks known from another tier are now in `tier` too."""

    tier: str
    keys: list[int]


class KeysRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks no longer in `tier`."""

    tier: str
    keys: list[int]


class TierCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is left in `tier`."""

    tier: str


Change = KeysAdded | KeysCopied | KeysRemoved | TierCleared


class Residency(Event, frozen=True):
    """What KV events meant, in routing keys: which blocks an endpoint gained and lost, in order.

    The router makes these itself from `EngineBatch`es, for the recorded log: a batch is recorded with no
    events in it (its sequence number and digest still drive the same transitions) and followed by what it
    changed. So a log holds no token ids, and a fresh router fed with it has the same index.
    """

    endpoint: str
    changes: list[Change]


class ReplayEnded(Event, frozen=True):
    """The replay asked for by `AskReplay` is over; `ok` means its end mark was seen."""

    endpoint: str
    ok: bool


class Signals(Event, frozen=True):
    """What the endpoint's /metrics said. `scraped_t` is when the scrape was sent (same clock as t)."""

    endpoint: str
    scraped_t: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """0..1, 1 = full."""
    process_start_s: float | None = None


class Tick(Event, frozen=True):
    """Time passed: deadlines, ageing. Sent at the times asked for by `WakeAt`."""


AnyEvent = (
    Arrived
    | Admitted
    | Dispatched
    | Moved
    | Prefilled
    | FirstToken
    | Finished
    | EndpointUp
    | EndpointSuspect
    | EndpointDown
    | EngineBatch
    | Residency
    | ReplayEnded
    | Signals
    | Tick
)
"""What a recorded log holds, beside the settings of the router (see `recording`)."""


class Instruction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of every instruction: what the shell must do now, in the order given."""


class Dispatch(Instruction, frozen=True):
    """Send the request to `endpoint`. The reservation is already made."""

    request: str
    attempt: int
    """1 for the first try."""
    endpoint: str
    decision: str
    """Id of the decision record."""
    prefill: str | None = None
    """The endpoint that computes the prompt first; None: `endpoint` does it all."""


class Refuse(Instruction, frozen=True):
    """Answer the client with an error; nothing is reserved any more."""

    request: str
    status: int
    reason: str
    """One of the closed list of drop reasons (`rejected-no-endpoints`, ...)."""
    message: str


class AskReplay(Instruction, frozen=True):
    """Ask the endpoint's replay socket for every batch from `from_seq` on; feed them as replayed
    `EngineBatch`es, then `ReplayEnded`. Live batches meanwhile are fed as usual.
    """

    endpoint: str
    from_seq: int


class Prefetch(Instruction, frozen=True):
    """Tell `endpoint` to bring up, to its host memory, what it has of `request`, which it answered last of a
    conversation that should go on soon. A hint: it may be dropped without harm.
    """

    endpoint: str
    request: str


class WakeAt(Instruction, frozen=True):
    """Send a `Tick` at or soon after `at` (seconds, same clock as events)."""

    at: float


class GradeChanged(Instruction, frozen=True):
    """For logs, metrics and the dashboard: what is known of an endpoint's cache changed."""

    endpoint: str
    grade: Grade
    cause: str
