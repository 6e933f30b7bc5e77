"""`--kv-transfer-config`: vLLM's flag and field names, and what of them this engine understands."""

from typing import Annotated, Literal, get_args, get_type_hints

import msgspec

from sumibi.core.errors import ConfigError

_WILDCARDS = ("", "0.0.0.0", "::", "*")

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class TransferExtra(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`kv_connector_extra_config`."""

    host: str | None = None
    """Where the side channel listens, and what peers are told; None is the engine's `--host`."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Of the side channel; 0 takes a free one (`GET /kv_transfer` tells it)."""
    secret_file: str | None = None
    """A file whose content peers must know, too; None is the environment's SUMIBI_KV_TRANSFER_SECRET, if
    there is one."""
    kv_lease_duration: Seconds = 30.0
    """Seconds that a finished prompt's blocks are kept for a peer that gives no sign of life."""
    kv_transfer_timeout: Seconds = 30.0
    """Longest that a request waits for its blocks, the prefill that may still run included."""
    transports: Annotated[tuple[Literal["shm", "tcp"], ...], msgspec.Meta(min_length=1)] = ("shm", "tcp")
    """What the decode side may ask for; "tcp" is always possible."""


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The flag's JSON."""

    kv_connector: Literal["NixlConnector", "NixlPullConnector", "stream"]
    """Which protocol the gateway is told to use; the engine answers both."""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose blocks do not come. vLLM's default is "fail"."""
    kv_buffer_device: Literal["cpu"] | None = None
    """Understood for the sake of vLLM's command lines: blocks pass through host memory in any case."""
    kv_connector_extra_config: TransferExtra = msgspec.field(default_factory=TransferExtra)

    @property
    def produces(self) -> bool:
        """Whether requests may ask for their blocks to be kept."""
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        """Whether requests may bring blocks with them."""
        return self.kv_role != "kv_producer"

    def side_channel_host(self, engine_host: str) -> str:
        """Where to listen. Raises ConfigError for an address that no peer could be told."""
        host = self.kv_connector_extra_config.host
        if host is None:
            host = engine_host
        if host in _WILDCARDS:
            raise ConfigError(
                f"--kv-transfer-config: kv_connector_extra_config.host is {host!r}, which peers "
                "cannot connect to; name this machine's address"
            )
        return host


def parse_kv_transfer(text: str) -> KVTransferConfig:
    """Decode the JSON of `--kv-transfer-config`. Raises ConfigError naming the flag and the bad field."""
    try:
        return msgspec.json.decode(text, type=KVTransferConfig)
    except msgspec.MsgspecError as cause:
        raise ConfigError(f"--kv-transfer-config {text}: {cause}{_words(str(cause))}") from cause


def _words(problem: str) -> str:
    """The words that the field takes which msgspec names at the end of its message; nothing for others."""
    field = problem.partition("`$")[2].strip("`").rpartition(".")[2].partition("[")[0]
    kind = (get_type_hints(KVTransferConfig) | get_type_hints(TransferExtra)).get(field)
    words = [word for part in (kind, *get_args(kind)) for word in get_args(part) if isinstance(word, str)]
    return f"; it takes {', '.join(words)}" if words else ""
