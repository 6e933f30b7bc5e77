"""What fleet is simulated: groups of equal replicas, what they can do, and what goes wrong when.

Read from small YAML files; a field that is not known, or does not fit, is refused by its name.
"""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from sumibi.core.errors import ConfigError
from sumibi.core.latency import LatencyModel
from sumibi.sim.latency import StepTimes, named

Role = Literal["both", "prefill", "decode"]


class HostTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV in the host's memory, below each replica's device. A block is in one of the two."""

    tokens: int
    gb_per_s: float = 22.7
    """Of a restore (10^9 bytes). Default: measured by llm-d for DRAM over PCIe."""
    latency_s: float = 0.0
    """Before the first byte of a restore."""


class DiskTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV on a disk of each replica's own: every computed block is written to it and stays when it is read."""

    tokens: int
    gb_per_s: float = 7.0
    """Of a read (10^9 bytes). Default: one NVMe disk (gen 4)."""
    latency_s: float = 80e-6
    """Before the first byte of a read."""


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV that all replicas share: every computed block is written to it."""

    tokens: int
    gb_per_s: float
    """Of all reads together."""
    reader_gb_per_s: float | None = None
    """Of the reads of one replica; None: no less than all together."""
    latency_s: float = 0.0

    @property
    def read_gb_per_s(self) -> float:
        """Of a read while nobody else reads."""
        return min(self.gb_per_s, self.reader_gb_per_s or self.gb_per_s)


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Over which a replica fetches a prompt's KV from the one that computed it, and gives it to others."""

    gb_per_s: float = 40.0
    """10^9 bytes a second. Default: InfiniBand NDR, as it is in practice."""
    setup_s: float = 0.001
    keep_s: float = 480.0
    """How long a prompt's KV is kept for who fetches it. Default: vLLM's with NIXL."""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal replicas."""

    name: str = "replica"
    model: str = "model"
    """That they serve."""
    count: int
    latency: str | LatencyModel
    """An entry of `sim.latency.TABLE`, or coefficients in seconds."""
    kv_tokens: int
    """Device KV of one replica."""
    chunk_tokens: int = 8192
    """Tokens of a step at most, decodes included (vLLM's --max-num-batched-tokens)."""
    max_sequences: int = 256
    """Running at once."""
    kv_bytes_per_token: int = 131_072
    """For restores and transfers."""
    host: HostTier | None = None
    disk: DiskTier | None = None
    prefetches: bool = False
    """It brings KV from its disk, or the store, to its host memory when it is told to; needs `host`."""
    link: LinkSpec | None = None
    role: Role = "both"
    """prefill: computes prompts for others. decode: generates from prompts computed elsewhere, and takes
    whole requests where that is cheaper. Pairs are made as soon as any group has a role.
    """
    revision: str = ""
    """KV is moved only between replicas of one revision."""
    ranks: int = 1
    """Data-parallel ranks of each replica: endpoints of their own, with `kv_tokens` each, that step together.
    """
    adapters: list[str] = []
    """Names that it serves beside `model`."""
    adapter_slots: int = 8
    """Adapters loaded at once."""
    adapter_load_s: float = 1.0

    def times(self) -> StepTimes:
        """Its step times. Raises ConfigError if the name is not known."""
        return named(self.latency) if isinstance(self.latency, str) else StepTimes(self.latency)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something that goes wrong with one replica, from `at_s` until `until_s` (for ever if None)."""

    at_s: float
    endpoint: str
    """`GROUP-NUMBER`, numbers from 0 in each group; `GROUP-NUMBER#RANK` if it has several ranks."""
    kind: Literal["slow", "down", "restart", "lose-events", "scrape"]
    """slow: steps take `factor` times as long. down: it takes no new requests, goes on with those it has,
    keeps its cache. restart: its process dies, with all its ranks, and is back at `until_s` with nothing.
    lose-events: its KV events do not arrive. scrape: its metrics are read every `factor` seconds.
    """
    until_s: float | None = None
    factor: float = 3.0


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet and the router's view on it."""

    name: str
    groups: list[Group]
    overhead_s: float = 0.015
    """From the router to the engine's queue and back: HTTP, tokenizing, detokenizing."""
    scrape_interval_s: float = 1.0
    kv_event_delay_s: float | None = 0.05
    """From a step's end to the router's index; None: engines publish no KV events."""
    store: Store | None = None
    kv_replay: bool = False
    """Engines can be asked for KV events that were missed."""
    timeout_s: float | None = None
    """After which a client gives up a request that is not finished."""
    detect_s: float = 2.0
    """Until the router hears that an endpoint went down."""
    faults: list[Fault] = []

    @property
    def replicas(self) -> int:
        """Of all groups."""
        return sum(group.count * group.ranks for group in self.groups)

    @property
    def kv_tokens(self) -> int:
        """Device KV of the whole fleet."""
        return sum(group.count * group.ranks * group.kv_tokens for group in self.groups)

    def endpoints(self) -> list[tuple[str, Group]]:
        """Names of all endpoints, each with its group, in order; the ranks of one engine in a row."""
        return [
            (f"{group.name}-{i}" + (f"#{rank}" if group.ranks > 1 else ""), group)
            for group in self.groups
            for i in range(group.count)
            for rank in range(group.ranks)
        ]


def parse(text: str, source: str = "fleet") -> FleetSpec:
    """A fleet from YAML. Raises ConfigError naming `source`, the field and what is wrong with it."""
    try:
        fleet = msgspec.convert(yaml.safe_load(text), FleetSpec)
    except yaml.YAMLError as cause:
        raise ConfigError(f"{source} is not YAML: {cause}") from cause
    except msgspec.ValidationError as cause:
        raise ConfigError(f"{source}: {cause}") from cause
    _check(fleet, source)
    return fleet


def load(path: Path) -> FleetSpec:
    """A fleet from a YAML file. Raises ConfigError."""
    try:
        text = path.read_text()
    except OSError as cause:
        raise ConfigError(f"cannot read the fleet file {path}: {cause.strerror}") from cause
    return parse(text, str(path))


_AT_LEAST_ONE: dict[type[msgspec.Struct], tuple[str, ...]] = {
    Group: (
        "count",
        "ranks",
        "kv_tokens",
        "chunk_tokens",
        "max_sequences",
        "kv_bytes_per_token",
        "adapter_slots",
    ),
    HostTier: ("tokens",),
    DiskTier: ("tokens",),
    Store: ("tokens",),
}
_ABOVE_ZERO: dict[type[msgspec.Struct], tuple[str, ...]] = {
    FleetSpec: ("scrape_interval_s", "timeout_s"),
    HostTier: ("gb_per_s",),
    DiskTier: ("gb_per_s",),
    Store: ("gb_per_s", "reader_gb_per_s"),
    LinkSpec: ("gb_per_s",),
    Fault: ("factor",),
}
_NOT_NEGATIVE: dict[type[msgspec.Struct], tuple[str, ...]] = {
    FleetSpec: ("overhead_s", "kv_event_delay_s", "detect_s"),
    Group: ("adapter_load_s",),
    HostTier: ("latency_s",),
    DiskTier: ("latency_s",),
    Store: ("latency_s",),
    LinkSpec: ("setup_s", "keep_s"),
    LatencyModel: LatencyModel.__struct_fields__,
    Fault: ("at_s",),
}


def _parts(fleet: FleetSpec) -> Iterator[tuple[str, msgspec.Struct]]:
    """All that has numbers, with the beginning of its fields' names."""
    yield "", fleet
    if fleet.store is not None:
        yield "store.", fleet.store
    for i, group in enumerate(fleet.groups):
        yield f"groups[{i}].", group
        for name in ("host", "disk", "link", "latency"):
            part = getattr(group, name)
            if isinstance(part, msgspec.Struct):
                yield f"groups[{i}].{name}.", part
    for i, fault in enumerate(fleet.faults):
        yield f"faults[{i}].", fault


def _check_numbers(fleet: FleetSpec, source: str) -> None:
    """Every number is finite and in its range; None, where it is allowed, is in it."""
    for at, part in _parts(fleet):
        for name in _AT_LEAST_ONE.get(type(part), ()):
            value = getattr(part, name)
            if value < 1:
                raise ConfigError(f"{source}: {at}{name} must be at least 1, not {value}")
        for name in _ABOVE_ZERO.get(type(part), ()):
            value = getattr(part, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"{source}: {at}{name} must be a number above 0, not {value}")
        for name in _NOT_NEGATIVE.get(type(part), ()):
            value = getattr(part, name)
            if value is not None and not 0 <= value < inf:
                raise ConfigError(f"{source}: {at}{name} must be 0 or more, and finite, not {value}")


def _check(fleet: FleetSpec, source: str) -> None:
    if not fleet.groups:
        raise ConfigError(f"{source}: groups: at least one is needed")
    _check_numbers(fleet, source)
    for i, group in enumerate(fleet.groups):
        if group.max_sequences > group.chunk_tokens:
            raise ConfigError(f"{source}: groups[{i}].max_sequences must not exceed chunk_tokens")
        if group.prefetches and group.host is None:
            raise ConfigError(
                f"{source}: groups[{i}].prefetches needs `host`, the memory that KV is brought up to; give it"
                " or leave `prefetches` out"
            )
        _check_speed(group.times().model, f"{source}: groups[{i}].latency")
    for i, group in enumerate(fleet.groups):
        roles = {other.role for other in fleet.groups if other.model == group.model}
        if roles == {"prefill"}:
            raise ConfigError(
                f"{source}: groups[{i}].role: nobody generates for model {group.model!r}: add a group with"
                " role decode or both, or leave `role` out"
            )
        if roles == {"decode"}:
            raise ConfigError(
                f"{source}: groups[{i}].role: nobody computes prompts for model {group.model!r}: add a group"
                " with role prefill or both, or leave `role` out"
            )
    names = [name for name, _ in fleet.endpoints()]
    if len(set(names)) < len(names):
        raise ConfigError(f"{source}: groups: every group needs a name of its own")
    _check_faults(fleet, names, source)


def _check_speed(model: LatencyModel, at: str) -> None:
    """A prefill and a step of decode each take some time."""
    for names in (("a_s", "b_s", "q_s"), ("d0_s", "d1_s", "d2_s")):
        if not any(getattr(model, name) for name in names):
            raise ConfigError(f"{at}: {', '.join(names)} must not all be 0")


def _check_faults(fleet: FleetSpec, names: list[str], source: str) -> None:
    for i, fault in enumerate(fleet.faults):
        if fault.endpoint not in names:
            raise ConfigError(f"{source}: faults[{i}].endpoint {fault.endpoint!r} is not one of {names}")
        if fault.kind == "restart" and fault.until_s is None:
            raise ConfigError(f"{source}: faults[{i}].until_s: a restart needs the time when it is back")
        if fault.until_s is not None and not fault.at_s < fault.until_s < inf:
            raise ConfigError(
                f"{source}: faults[{i}].until_s must be later than at_s ({fault.at_s:g}), and finite, not"
                f" {fault.until_s:g}"
            )
