"""What `sumibi engine` can be told: one flat record, checked before torch is imported.

Names and meanings follow `vllm serve`, so that a stack file or a script can swap the engine. The record
knows flags only: what a checkpoint or a device adds (context length, dtype, number of blocks) is
resolved by the server once it has seen them.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sumibi.core.errors import ConfigError
from sumibi.core.keys import DEFAULT_BLOCK_TOKENS
from sumibi.engine.transfer.config import KVTransferConfig
from sumibi.tiers.config import TiersConfig

TINY = "tiny"
"""`--model tiny`: the random-weight test model, made on the spot."""

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`--kv-events-config`, with vLLM's field names and defaults; `GET /kv_event_sources` answers it."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    """Bound if it holds `*` or `::` or is ipc/inproc, else connected to (vLLM's rule)."""
    replay_endpoint: str | None = None
    """Always bound. None: no replay."""
    buffer_steps: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """Batches kept for replay; the oldest go first."""
    hwm: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """Batches ZeroMQ holds for one slow subscriber before it drops (the subscriber sees a gap)."""
    max_queue_size: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """Batches waiting between the step thread and the publisher; at the limit the newest is dropped and
    counted, its sequence number is used up, so that subscribers see the gap."""
    topic: str = ""


def parse_kv_events(text: str) -> KVEventsConfig:
    """Decode the JSON of `--kv-events-config`. Raises ConfigError naming the flag and the bad field."""
    try:
        return msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.MsgspecError as cause:
        raise ConfigError(f"--kv-events-config: {cause}") from cause


def parse_kv_tiers(text: str) -> TiersConfig | None:
    """Decode the JSON of `--kv-tiers`; None if it is empty. Raises ConfigError."""
    return TiersConfig.parse(text, where="--kv-tiers") if text else None


def dev_mode_from_environment() -> bool:
    """True if SUMIBI_DEV_MODE or vLLM's VLLM_SERVER_DEV_MODE is 1."""
    return "1" in (os.environ.get("SUMIBI_DEV_MODE"), os.environ.get("VLLM_SERVER_DEV_MODE"))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One engine process. Making one checks every field; ConfigError names the flag at fault."""

    model: str
    """--model: a checkpoint directory, or `tiny`."""
    served_model_name: str = ""
    """--served-model-name: as clients name it; empty takes the directory's name."""
    host: str = "127.0.0.1"
    port: int = 8001
    """--port: 0 takes a free one (printed when ready)."""
    dtype: str = "auto"
    """--dtype: auto (the checkpoint's), float32 or bfloat16."""
    device: str = "auto"
    """--device: auto (cuda if there is one), cpu or cuda."""
    threads: int | None = None
    """--threads: torch threads; None takes OMP_NUM_THREADS, else the cores this process may use."""
    max_model_len: int | None = None
    """--max-model-len: prompt + output tokens of one request; None takes the checkpoint's."""
    max_num_seqs: int = 64
    """--max-num-seqs: sequences computed at once; more wait."""
    max_num_batched_tokens: int | None = None
    """--max-num-batched-tokens: token budget of a step; None takes 256 on a CPU, 2,048 on CUDA."""
    block_size: int = DEFAULT_BLOCK_TOKENS
    """--block-size: tokens of a KV block."""
    num_gpu_blocks_override: int | None = None
    """--num-gpu-blocks-override, --kv-blocks: KV blocks in all; None sizes the pool to the device."""
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    """--kv-events-config, decoded by `parse_kv_events`."""
    kv_tiers: TiersConfig | None = None
    """--kv-tiers, decoded by `parse_kv_tiers`; None keeps KV on the device only."""
    kv_transfer: KVTransferConfig | None = None
    """--kv-transfer-config, decoded by `parse_kv_transfer`; None: no transfers."""
    seed: int = 0
    """--seed: of requests that bring none (and of the tiny model's weights)."""
    enable_dev_mode: bool = False
    """--enable-dev-mode: routes that only an operator may call (`/reset_prefix_cache`)."""
    shutdown_grace_s: float = 30.0
    """--shutdown-grace: seconds that running requests get to finish after SIGTERM."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model is empty: name a checkpoint directory, or `tiny`")
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--device", self.device, DEVICES)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not a port (0 to 65535)")
        _at_least("--block-size", self.block_size, 1)
        _at_least("--max-num-seqs", self.max_num_seqs, 1)
        _at_least("--threads", self.threads, 1)
        _at_least("--max-model-len", self.max_model_len, 1)
        _at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _at_least("--num-gpu-blocks-override", self.num_gpu_blocks_override, 1)
        if self.kv_transfer is not None and self.kv_transfer.produces:
            self.kv_transfer.side_channel_host(self.host)
        if self.shutdown_grace_s < 0:
            raise ConfigError(f"--shutdown-grace {self.shutdown_grace_s} is negative")

    @property
    def name(self) -> str:
        """The model's name on the wire."""
        return self.served_model_name or (TINY if self.model == TINY else Path(self.model).resolve().name)


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value} is unknown: use one of {', '.join(allowed)}")


def _at_least(flag: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{flag} {value} is too small: at least {least}")
