"""The one configuration model: `stack.yaml`, checked at start, every mistake named.

A stack file says what runs; the supervisor (`sumibi.local`) and the command line read it, no part looks
into YAML by itself. Nothing has to be written: every key has a default, and `Stack()` is the stack that
`sumibi up` starts. Unknown keys are errors, because a typo that is ignored is a setting that never
takes effect.

Errors carry the file, the line, the key's path, the nearest known key and what is allowed.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from sumibi.core.errors import ConfigError
from sumibi.core.keys import DEFAULT_BLOCK_TOKENS
from sumibi.core.storage import (
    STORE_TIMEOUT_MOST_S,
    STORE_TIMEOUT_S,
    check_directory,
    parse_bytes,
    said,
    size_text,
    store_directory,
)

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_FILE = Path("stack.yaml")
"""Read by `sumibi up` if it lies in the current directory and no --stack is given."""

Policy = Literal[
    "cost",
    "round-robin",
    "random",
    "least-loaded",
    "session-sticky",
    "sglang-cache-aware",
    "llmd-weighted",
    "llmd-precise",
    "llmd-sticky-until-saturated",
    "dynamo-kv",
    "dynamo-kv-agentic",
]
Role = Literal["both", "prefill", "decode"]
KeyPath = tuple[str, ...]
ANY_KEY = "*"
_Read = TypeVar("_Read")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_SAID = "said"
"""Type of an error whose text names the value itself, in the words that the engine has for it."""
_MISSING = "missing_beside"
"""Type of an error that a key is not there, though others beside it are."""


def _in_its_words(read: Callable[[str], _Read]) -> _Read:
    """What `read` gives, told what to call the key: a ConfigError of it is reported under the key's path."""
    try:
        return read("")
    except (ConfigError, RuntimeError) as cause:  # the latter: no such user's home directory
        raise PydanticCustomError(_SAID, "{problem}", {"problem": str(cause).removeprefix(": ")}) from cause


def _size(value: Any, least: int) -> Any:
    """A size, as text in its shortest form, so that equal ones look alike."""
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise PydanticCustomError("size", "not a size; write bytes, or like 512MiB or 20GiB")
    return size_text(_in_its_words(lambda where: parse_bytes(value, where, least=least)))


def _disk_path(path: str) -> str:
    def read(where: str) -> None:
        check_directory(_absolute(said(path, where, "a directory")), where)

    if path:
        _in_its_words(read)
    return path


def _store_url(url: str) -> str:
    def read(where: str) -> None:
        directory = store_directory(url, where)
        if directory is not None:
            check_directory(_absolute(directory), where)

    if url:
        _in_its_words(read)
    return url


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()


Size = Annotated[str, BeforeValidator(lambda value: _size(value, 1))]
SizeOrNone = Annotated[str, BeforeValidator(lambda value: _size(value, 0))]


class DiskTier(_Part):
    """KV on a local disk."""

    path: Annotated[str, AfterValidator(_disk_path)] = Field(
        default="", description="a directory; each replica takes one of its own in it; empty: no such tier"
    )
    bytes: Size = Field(default="10GiB", description="most that a replica keeps there")

    @model_validator(mode="after")
    def _said_where(self) -> "DiskTier":
        _want(self, "path", "disk")
        return self

    def absolute(self) -> "DiskTier":
        """The same, told so that it means the same in every directory."""
        return self.model_copy(update={"path": str(_absolute(self.path))}) if self.path else self


class StoreTier(_Part):
    """KV that all replicas share."""

    url: Annotated[str, AfterValidator(_store_url)] = Field(
        default="", description="a directory that others read too, or s3://bucket/prefix; empty: no such tier"
    )
    bytes: Size = Field(default="100GiB", description="most that all keep there")
    timeout_s: float = Field(
        default=STORE_TIMEOUT_S,
        gt=0,
        le=STORE_TIMEOUT_MOST_S,
        description="longest that one look-up or load may wait for it, seconds",
    )

    @model_validator(mode="after")
    def _said_where(self) -> "StoreTier":
        _want(self, "url", "store")
        return self

    def absolute(self) -> "StoreTier":
        """The same, told so that it means the same in every directory."""
        directory = store_directory(self.url) if self.url else None
        return self if directory is None else self.model_copy(update={"url": str(_absolute(directory))})


def _want(tier: _Part, place: str, name: str) -> None:
    """What is said of a tier says where it lies, or nothing else."""
    others = [key for key in type(tier).model_fields if key in tier.model_fields_set and key != place]
    meant = [key for key in others if getattr(tier, key) != type(tier).model_fields[key].default]
    if getattr(tier, place) or not others:
        return
    problem = f"without it there is no such tier: say it, or leave {name} out"
    if place not in tier.model_fields_set:
        raise _wrong(place, None, problem, _MISSING)
    if meant:
        raise _wrong(place, getattr(tier, place), problem)


class Tiers(_Part):
    """KV below the device."""

    host_bytes: SizeOrNone = Field(
        default="0", description="host memory of a replica for KV, like 2GiB; 0: none"
    )
    disk: DiskTier = Field(default_factory=DiskTier, description="KV on a local disk")
    store: StoreTier = Field(default_factory=StoreTier, description="KV that all replicas share")

    def absolute(self) -> "Tiers":
        """The same, told so that it means the same in every directory."""
        said_of: dict[str, Any] = {
            name: getattr(self, name).absolute()
            for name in ("disk", "store")
            if name in self.model_fields_set
        }
        return self.model_copy(update=said_of)

    def config(self, replica: int) -> dict[str, Any] | None:
        """What `sumibi engine --kv-tiers` is told; None: no tier."""
        told: dict[str, Any] = {}
        if self.host_bytes != "0":
            told["host_bytes"] = self.host_bytes
        if self.disk.path:
            path = str(Path(self.disk.absolute().path) / f"engine-{replica}")
            told["disk"] = {"path": path, "bytes": self.disk.bytes}
        if self.store.url:
            told["store"] = self.store.absolute().model_dump()
        return told or None


class Engines(_Part):
    """The embedded engine's replicas: alike but for their roles, one process each."""

    count: int = Field(default=2, ge=0, le=64, description="replicas that do whole runs")
    prefill: int = Field(default=0, ge=0, le=64, description="replicas that only compute prompts")
    decode: int = Field(
        default=0, ge=0, le=64, description="replicas that go on from prompts computed on others"
    )
    connector: Literal["stream", "nixlv2"] = Field(
        default="stream", description="how KV goes from one to another, if there is prefill or decode"
    )
    cores_each: int = Field(default=1, ge=1, description="CPU cores pinned to a replica")
    secret_file: str = Field(
        default="",
        description="a file with the secret that replicas want from one another; empty: that of the"
        " environment, if there is one",
    )
    first_port: int = Field(
        default=8001,
        ge=1,
        le=65535,
        description="the first replica's port; the others follow, then the ports of their side channels",
    )
    kv_blocks: int = Field(default=512, ge=2, description="KV blocks of a replica")
    block_tokens: int = Field(default=DEFAULT_BLOCK_TOKENS, ge=1, le=1024, description="tokens of a KV block")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: the checkpoint's"
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="tokens of prompt + output of one request; null: the checkpoint's"
    )
    tiers: Tiers = Field(default_factory=Tiers, description="KV below the device")

    @model_validator(mode="after")
    def _somebody_decodes(self) -> "Engines":
        if self.prefill and not self.decode and not self.count:
            raise _wrong(
                "prefill",
                self.prefill,
                "its prompts go on at replicas that generate: set engines.decode, or engines.count, to 1 or"
                " more",
            )
        if not self.count and not self.decode:
            raise _wrong(
                "count", self.count, "no replica would answer: set it, or engines.decode, to 1 or more"
            )
        return self

    def absolute(self) -> "Engines":
        """The same, told so that it means the same in every directory."""
        changed: dict[str, Any] = {}
        if self.secret_file:
            changed["secret_file"] = str(_absolute(self.secret_file))
        if "tiers" in self.model_fields_set:
            changed["tiers"] = self.tiers.absolute()
        return self.model_copy(update=changed)

    @property
    def roles(self) -> list[Role]:
        """Of each replica in order; those that have side channels come first."""
        counts: dict[Role, int] = {"both": self.count, "prefill": self.prefill, "decode": self.decode}
        return [role for role, count in counts.items() for _ in range(count)]


def _wrong(key: str, value: object, problem: str, kind: str = "beside_others") -> ValidationError:
    """A value that is wrong beside others, reported like one that is wrong by itself."""
    error = PydanticCustomError(kind, "{problem}", {"problem": problem})
    return ValidationError.from_exception_data("Engines", [{"type": error, "loc": (key,), "input": value}])


class Band(_Part):
    """How much may wait in the queue of one priority, and how long; the rest is refused (429)."""

    max_requests: int = Field(default=5_000, ge=0, lt=10**18, description="requests that may wait")
    max_bytes: int = Field(
        default=1_000_000_000,
        ge=0,
        lt=10**18,
        description="bytes of their bodies, estimated at 4 a token",
    )
    ttl_s: float | None = Field(
        default=300.0, gt=0, allow_inf_nan=False, description="longest wait, seconds; null: no limit"
    )


class Gateway(_Part):
    """The door for clients, and the admin door beside it."""

    host: str = Field(default="127.0.0.1", description="address of the clients' door")
    port: int = Field(default=8000, ge=1, le=65535, description="OpenAI-compatible door")
    admin_port: int = Field(
        default=8080, ge=1, le=65535, description="admin door, on 127.0.0.1, needs the admin key"
    )
    policy: Policy = Field(default="cost", description="how a replica is chosen")
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="at `sumibi down`: time for running requests to finish; what is left ends with an error",
    )
    objectives: dict[str, int] = Field(
        default_factory=dict,
        description="priorities by the word in a request's `x-llm-d-inference-objective`; others have 0",
    )
    hold_above_s: float | None = Field(
        default=1.0,
        ge=0.01,
        allow_inf_nan=False,
        description="a request whose pick cannot begin within this time waits in the gateway; null: none",
    )
    other_bands: Band = Field(
        default_factory=Band, description="the queue of each priority that has none of its own in `bands`"
    )
    bands: dict[int, Band] = Field(
        default_factory=dict,
        description="queues by priority; what one does not say is as in `other_bands`",
    )

    def band(self, priority: int) -> Band:
        """The queue of a priority, with what it takes over from `other_bands`."""
        own = self.bands.get(priority, self.other_bands)
        return self.other_bands.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


class Stack(_Part):
    """Everything `sumibi up` needs to know."""

    model: str = Field(
        default=DEFAULT_MODEL,
        min_length=1,
        description="a known model's name, a checkpoint directory, or `tiny`",
    )
    engines: Engines = Field(default_factory=Engines)
    gateway: Gateway = Field(default_factory=Gateway)

    @model_validator(mode="after")
    def _ports_differ(self) -> "Stack":
        taken = {self.gateway.port: "gateway.port"}
        others = [(self.gateway.admin_port, "gateway.admin_port")]
        others += [(port, "engines.first_port") for port in (*self.engine_ports, *self.side_ports)]
        for port, key in others:
            if port in taken:
                raise ValueError(f"{key} and {taken[port]} both take port {port}")
            if port > 65535:
                raise ValueError(f"{key} leads to port {port}: 65535 is the last")
            taken[port] = key
        return self

    @property
    def engine_ports(self) -> list[int]:
        """The replicas' HTTP ports, in order."""
        return list(range(self.engines.first_port, self.engines.first_port + len(self.engines.roles)))

    @property
    def side_ports(self) -> list[int]:
        """Where the first replicas hand KV over, behind the HTTP ports; none if all do whole runs."""
        engines = self.engines
        first = engines.first_port + len(engines.roles)
        pools = engines.prefill or engines.decode
        return list(range(first, first + engines.count + engines.prefill)) if pools else []


POLICIES: tuple[str, ...] = get_args(Policy)


def load_stack(file: Path | None = None, overrides: Mapping[KeyPath, Any] | None = None) -> Stack:
    """The stack of `file` (None: defaults only) with `overrides` from the command line laid on top.

    Example: `load_stack(Path("stack.yaml"), {("gateway", "port"): 9000})`. Raises ConfigError that names
    every key at fault, one a line.
    """
    data, lines = ({}, {}) if file is None else _read(file)
    overrides = overrides or {}
    for path, value in overrides.items():
        _put(data, path, value)
    try:
        return Stack.model_validate(data)
    except ValidationError as cause:
        wrong = [_explain(error, file, lines, overrides) for error in cause.errors()]
        raise ConfigError("\n".join(wrong)) from cause


def _read(file: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The file's mapping, and the line (from 1) of every key in it."""
    try:
        root = yaml.compose(text := file.read_text(), Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read the stack file {file}: {cause}") from cause
    except yaml.YAMLError as cause:
        raise ConfigError(f"{file} is not YAML: {cause}") from cause
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must be a mapping of keys (`model:`, `engines:`, `gateway:`)")
    return data, dict(_lines(root))


def _lines(node: yaml.Node | None, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _lines(value, here)


def _put(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    for name in path[:-1]:
        inner = data.setdefault(name, {})
        if not isinstance(inner, dict):
            return  # wrong type in the file: validation says so
        data = inner
    data[path[-1]] = value


def _explain(
    error: ErrorDetails, file: Path | None, lines: Mapping[KeyPath, int], overrides: Mapping[KeyPath, Any]
) -> str:
    path = tuple(str(part) for part in error["loc"])
    is_key = path[-1:] == ("[key]",)  # not its value is wrong but the key itself, one of the user's
    path = path[: len(path) - is_key]
    where = "command line" if path in overrides or file is None else str(file)
    above = (path[:length] for length in range(len(path), 0, -1))  # a key that is missing has no line
    line = next((lines[part] for part in above if part in lines), None)
    if where == str(file) and line is not None:
        where = f"{file}, line {line}"
    name = ".".join(path)
    # pydantic begins with a capital; what follows may hold names and units.
    problem = error["msg"][:1].lower() + error["msg"][1:]
    if not path:
        return f"{file or 'command line'}: {error['msg'].removeprefix('Value error, ')}"
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key {name!r}{_suggest(path)}"
    if error["type"] in ("model_type", "model_attributes_type"):
        keys = ", ".join(known[-1] for known, _ in _known_keys(Stack) if _same(known[:-1], path))
        return f"{where}: {name} is {error['input']!r}: it must be a mapping ({keys})"
    if is_key:
        return f"{where}: {'.'.join(path[:-1])} has the key {path[-1]!r}: {problem}"
    if error["type"] == _SAID:
        return f"{where}: {name}: {error['msg']}"
    if error["type"] == _MISSING:
        return f"{where}: {name} is missing: {problem}"
    return f"{where}: {name} is {error['input']!r}: {problem}"


def _suggest(path: KeyPath) -> str:
    """The nearest known key of this level, else of the model, else the keys known at this level."""
    level = dict(_known_keys(Stack))
    siblings = [known[-1] for known in level if _same(known[:-1], path[:-1])]
    near = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    near += [key for key in siblings if _one_in_other(key, path[-1])]
    if near:
        return f"; did you mean {'.'.join((*path[:-1], near[0]))!r}?"
    elsewhere = [known for known in level if known[-1] == path[-1]]
    if elsewhere:
        nearest = max(elsewhere, key=lambda known: _shared(known, path))
        return f"; did you mean {'.'.join(nearest)!r}?"
    return f"; known here: {', '.join(siblings)}"


def _shared(known: KeyPath, path: KeyPath) -> int:
    """How many parts they begin with alike."""
    alike = (k in (ANY_KEY, p) for k, p in zip(known, path, strict=False))
    return sum(takewhile(bool, alike))


def _one_in_other(known: str, key: str) -> bool:
    """Whether all words of one are the other's, like `host` and `host_bytes`."""
    words, wanted = set(known.split("_")), set(key.split("_"))
    return words <= wanted or wanted <= words


def _known_keys(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every key of the model with its description, `*` for one that the user makes up;
    docs/stack-file.md is checked against it.
    """
    for name, field in model.model_fields.items():
        here = (*path, name)
        yield here, field.description or ""
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _known_keys(field.annotation, here)
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _known_keys(inner, (*here, ANY_KEY))


def _same(known: KeyPath, path: KeyPath) -> bool:
    return len(known) == len(path) and all(k in (ANY_KEY, p) for k, p in zip(known, path, strict=True))


def known_keys() -> dict[str, str]:
    """Dotted path -> description of every key that a stack file may hold."""
    return {".".join(path): text for path, text in _known_keys(Stack)}
