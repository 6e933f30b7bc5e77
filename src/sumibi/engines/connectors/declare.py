"""What a connector's declaration is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec


class Order(Enum):
    """When the decode half leaves."""

    SERIAL = "serial"
    """After the prefill half's answer."""
    CONCURRENT = "concurrent"
    """Together with the prefill half: the engines find each other."""


class Slot(Enum):
    """What a template leaves open, by its name in `Values`."""

    HOST = "host"
    PORT = "port"
    ROOM = "room"
    TRANSFER_ID = "transfer_id"
    RETURNED = "returned"


@dataclass(frozen=True, slots=True)
class Values:
    """What fills the slots of one pair's templates."""

    host: str
    """Of the prefill engine, as decode engines reach it."""
    port: int
    """Of the prefill engine's side channel."""
    room: int
    """0 .. 2**63 - 1, unique to the pair."""
    transfer_id: str
    """Unique to the pair."""
    returned: msgspec.Raw | None = None
    """What the prefill engine answered (`Connector.takes`), byte for byte."""


@dataclass(frozen=True, slots=True)
class Connector:
    """One protocol between a prefill and a decode engine."""

    name: str
    order: Order
    prefill: Mapping[str, Any]
    """Top-level fields of the prefill half's request; a `Slot` stands for a value."""
    decode: Mapping[str, Any]
    """Those of the decode half's."""
    apis: frozenset[str]
    """Dialects in which its engines take these fields: `chat`, `completions`, `responses`, `messages`
    (Anthropic's), `generate` (vLLM's), `sglang` (SGLang's own). What is asked in another runs whole."""
    one_token: bool
    """The prefill half generates one token and does not stream; False: it gets the client's limits."""
    takes: str | None = None
    """The answer's top-level field that the decode half needs; None: it needs nothing of the answer."""
    returned: type[msgspec.Struct] | None = None
    """What has to be in that field. Decode engines do not check it: what is missing there would park the
    request for good, or end the engine.
    """
    port: int | None = None
    """Usual port of a prefill engine's side channel; None: the templates have no use for one."""


def fill(template: Any, values: Values) -> Any:
    """`template` with its slots filled; mappings all the way down."""
    if isinstance(template, Slot):
        return getattr(values, template.value)
    if isinstance(template, Mapping):
        return {name: fill(inner, values) for name, inner in template.items()}
    return template
