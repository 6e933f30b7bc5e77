"""What fleet is simulated: groups of equal replicas, what they can do, and what goes wrong when.

Read from small YAML files; a field that is not known, or does not fit, is refused by its name.
"""

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


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV that all replicas share: every computed block is written to it."""

    tokens: int
    gb_per_s: float
    """Of all reads together."""
    latency_s: float = 0.0


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


def _check(fleet: FleetSpec, source: str) -> None:
    if not fleet.groups:
        raise ConfigError(f"{source}: groups: at least one is needed")
    for i, group in enumerate(fleet.groups):
        for name in ("count", "ranks", "kv_tokens", "chunk_tokens", "max_sequences", "kv_bytes_per_token"):
            if getattr(group, name) < 1:
                raise ConfigError(f"{source}: groups[{i}].{name} must be at least 1")
        if group.max_sequences > group.chunk_tokens:
            raise ConfigError(f"{source}: groups[{i}].max_sequences must not exceed chunk_tokens")
        group.times()
    for i, group in enumerate(fleet.groups):
        served = [other for other in fleet.groups if other.model == group.model and other.role != "prefill"]
        if not served:
            raise ConfigError(f"{source}: groups[{i}].role: nobody generates for model {group.model!r}")
    names = [name for name, _ in fleet.endpoints()]
    if len(set(names)) < len(names):
        raise ConfigError(f"{source}: groups: every group needs a name of its own")
    for i, fault in enumerate(fleet.faults):
        if fault.endpoint not in names:
            raise ConfigError(f"{source}: faults[{i}].endpoint {fault.endpoint!r} is not one of {names}")
        if fault.kind == "restart" and fault.until_s is None:
            raise ConfigError(f"{source}: faults[{i}].until_s: a restart needs the time when it is back")
