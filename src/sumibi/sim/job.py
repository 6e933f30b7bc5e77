"""One request inside a simulated engine."""

from collections.abc import Sequence
from enum import Enum

from sumibi.core.prefixcache import Segment
from sumibi.sim.tiers import Link


class State(Enum):
    """Where a job is."""

    WAITING = "waiting"
    FETCHING = "fetching"
    """Admitted; KV or an adapter is on its way."""
    PREFILL = "prefill"
    DECODE = "decode"
    HELD = "held"
    """Over, its KV kept until somebody has fetched it."""
    OVER = "over"


class Job:
    """What an engine knows of a request."""

    __slots__ = (
        "adapter",
        "cached_tokens",
        "computed",
        "end_step",
        "fetched",
        "generated",
        "held",
        "imported",
        "keep",
        "keys",
        "lower_tokens",
        "output_tokens",
        "owner",
        "place",
        "prompt_tokens",
        "source",
        "state",
        "target",
        "token_s",
    )

    def __init__(
        self,
        owner: object,
        keys: Sequence[int],
        prompt_tokens: int,
        output_tokens: int,
        *,
        adapter: str = "",
        keep: bool = False,
        imported: bool = False,
        source: Link | None = None,
    ) -> None:
        self.owner = owner
        """The caller's."""
        self.keys = keys
        """Routing keys of the prompt's full blocks."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.adapter = adapter
        """That it needs; empty: none."""
        self.keep = keep
        """Its KV is wanted elsewhere: keep it until `Replica.release`."""
        self.imported = imported
        """Its prompt was computed elsewhere: what is missing here comes over the link."""
        self.source = source
        """The far end of that link, if it is to be occupied too; None once all has come."""
        self.cached_tokens: int | None = None
        """Of the prompt, found in a cache of this engine when it was first admitted."""
        self.lower_tokens = 0
        """Of these, below the device."""
        self.computed = 0
        """Tokens whose KV is on the device, of `target`."""
        self.fetched = 0
        """Tokens that will be on the device when what is on its way has come."""
        self.target = prompt_tokens
        """Tokens to compute before the next one is generated: more than the prompt after a preemption."""
        self.generated = 0
        self.end_step = 0
        self.held: Segment | None = None
        """Its blocks in the prefix cache."""
        self.place = 0
        """Order of admission."""
        self.state = State.WAITING
        self.token_s = 0.0
        """When it was preempted, if it has generated nothing since."""

    @property
    def over(self) -> bool:
        """Nothing of it is left in the engine."""
        return self.state is State.OVER
