"""What the scheduler's side and the worker's side tell each other, once a step. All of it can be pickled."""

from dataclasses import dataclass, field

from sumibi.tiers.words import Tier


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a device block down once this step has filled it."""

    content_id: bytes
    parent: bytes | None
    block: int


@dataclass(frozen=True, slots=True)
class Load:
    """Fill device blocks of a request that waits for them."""

    request_id: str
    content_ids: list[bytes]
    blocks: list[int]


@dataclass(slots=True)
class Orders:
    """To the worker, with each step."""

    generation: bytes = b""
    """Changes when everything that was stored before is void."""
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    idle: bool = False
    """The step computes nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """A block came to a tier, or left it."""

    stored: bool
    content_id: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class Hello:
    """Who the worker is: what the store must be asked under."""

    namespace: str
    block_bytes: int


@dataclass(slots=True)
class Report:
    """From the worker, after each step."""

    generation: bytes = b""
    hello: Hello | None = None
    """In the first report of a life."""
    changes: list[Change] = field(default_factory=list)
    missing: list[bytes] = field(default_factory=list)
    """Blocks that a load did not find, or found broken."""
    writing: int = 0
    """Blocks that wait to be written to a slower tier."""
