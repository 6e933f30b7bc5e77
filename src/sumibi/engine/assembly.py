"""Puts an engine together from its options: model, blocks, scheduler, events, loop, HTTP door.

What the options leave open is decided here, from the checkpoint and the device, and logged.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.engine import tiny
from sumibi.engine.app import Door, EngineSources
from sumibi.engine.batch import SequenceStep, StepBatch
from sumibi.engine.blocks import BlockPool
from sumibi.engine.checkpoint import ModelConfig, read_config
from sumibi.engine.fetch import ensure_model
from sumibi.engine.kvtiers import TierLink
from sumibi.engine.loop import Engine
from sumibi.engine.metrics import EngineMetrics
from sumibi.engine.model import DTYPES, KV_LAYOUT, Model
from sumibi.engine.options import TINY, EngineOptions, KVEventsConfig
from sumibi.engine.publisher import NullPublisher, ZmqPublisher
from sumibi.engine.requests import RequestReader, ServedModel
from sumibi.engine.scheduler import Scheduler
from sumibi.engine.transfer.connector import Transfers
from sumibi.engine.wire import TierInfo
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer
from sumibi.tiers import BlockTiers, Tier

log = logging.getLogger(__name__)

_CPU_KV_BYTES = 512 * 1024 * 1024
"""Memory of the KV cache on a CPU, unless `--kv-blocks` says otherwise."""
_CPU_KV_TOKENS = 32 * 1024
"""Nor more tokens than this, however small they are."""
_CUDA_KV_SHARE = 0.8
"""Share of a GPU's free memory that the KV cache takes, when the weights are still to be loaded."""
_CPU_STEP_TOKENS = 256
"""Step budget on a CPU: a quarter of a second a core for the default model. Larger steps are no faster
there, and hold up decodes for longer."""
_CUDA_STEP_TOKENS = 2048
_DIGEST_BYTES = 1 << 20
_WEIGHT_VERSION = "default"
"""vLLM's name for the weights that an engine starts with."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What options, checkpoint and device come to."""

    dtype: str
    device: str
    threads: int
    num_blocks: int
    max_tokens: int
    step_tokens: int


def assemble(options: EngineOptions, *, on_failure: Callable[[], None]) -> tuple[Door, ZmqPublisher | None]:
    """Load everything: the door, and the publisher if there are KV events; neither is started.

    Raises ConfigError, ModelError, EnvironmentProblem. `on_failure` is called in the event loop's thread
    when a step has failed.
    """
    directory = tiny.make_directory() if options.model == TINY else ensure_model(options.model)
    config = read_config(directory)
    weight_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    sizes = resolve(options, config, weight_bytes=weight_bytes)
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, tokenizer)
    served = ServedModel(
        name=options.name,
        root=str(directory.resolve()),
        max_tokens=sizes.max_tokens,
        vocabulary=config.vocab,
        eos_token_ids=frozenset(config.eos_token_ids),
    )
    reader = RequestReader(served, tokenizer, template, seed=options.seed, transfer=options.kv_transfer)
    pool = BlockPool(sizes.num_blocks, options.block_size)
    publisher, sources = _publisher(options)
    try:
        model = _load(options, directory, config, sizes)
        link = _tiers(options, sizes, directory, model, pool)
    except BaseException:
        if publisher is not None:
            publisher.stop()
        raise
    scheduler = Scheduler(
        pool,
        max_sequences=options.max_num_seqs,
        step_tokens=sizes.step_tokens,
        max_tokens=sizes.max_tokens,
        source=link,
        sink=link,
    )
    metrics = EngineMetrics(
        options.name,
        scheduler,
        dropped_batches=lambda: publisher.dropped if publisher else 0,
        tiers=link,
    )
    events = publisher or NullPublisher()
    engine = Engine(
        model,
        scheduler,
        metrics=metrics,
        events=events,
        namespace=_namespace(options, sizes),
        on_failure=on_failure,
    )
    if options.kv_transfer is not None:
        try:
            engine.transfers = Transfers(
                options.kv_transfer,
                host=options.host,
                model=options.name,
                namespace=f"{_namespace(options, sizes)};{_bytes_namespace(options, sizes, directory)}",
                memory=model,
                scheduler=scheduler,
                post=engine.post,
                fail=engine.fail_request,
            )
        except BaseException:
            if publisher is not None:
                publisher.stop()
            raise
    if link is not None:
        link.start(scheduler, events, engine.post)
    told = EngineSources(sources, _tier_infos(options, model, link), model.kv_bytes_per_token)
    return Door(engine, reader, metrics, told, options.enable_dev_mode, link), publisher


def resolve(options: EngineOptions, config: ModelConfig, *, weight_bytes: int = 0) -> Sizes:
    """Decide what the options leave open. Raises ConfigError naming the flags that do not go together.

    `weight_bytes` are still to be loaded; they count where the KV cache takes what is free on a device.
    """
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here")
    dtype = config.dtype if options.dtype == "auto" else options.dtype
    if dtype not in DTYPES:
        log.warning("the checkpoint's %s is computed in bfloat16", dtype)
        dtype = "bfloat16"
    context = options.max_model_len or config.max_positions
    if context > config.max_positions:
        raise ConfigError(f"--max-model-len {context}: the model's positions end at {config.max_positions}")
    num_blocks = options.num_gpu_blocks_override
    if num_blocks is None:
        tokens = _tokens_for_memory(config, dtype, device, weight_bytes)
        # More than all sequences together can fill would be of no use.
        useful = options.max_num_seqs * -(-context // options.block_size)
        num_blocks = max(1, min(tokens // options.block_size, useful))
    elif device == "cpu":
        _check_memory(
            num_blocks * options.block_size * _token_bytes(config, dtype) + weight_bytes, num_blocks
        )
    room = num_blocks * options.block_size
    if room < context and options.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {context}: the KV cache holds {room} tokens "
            f"({num_blocks} blocks of {options.block_size}); raise --kv-blocks or lower --max-model-len"
        )
    if room < context:
        log.warning("the KV cache holds %d tokens: the context is cut from %d to that", room, context)
    step_tokens = options.max_num_batched_tokens
    if step_tokens is None:
        step_tokens = max(_CUDA_STEP_TOKENS if device == "cuda" else _CPU_STEP_TOKENS, options.max_num_seqs)
    if step_tokens < options.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {step_tokens} is less than --max-num-seqs {options.max_num_seqs}: "
            "a step must hold one token of each sequence"
        )
    return Sizes(
        dtype=dtype,
        device=device,
        threads=options.threads or _default_threads(),
        num_blocks=num_blocks,
        max_tokens=min(context, room),
        step_tokens=step_tokens,
    )


def _token_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of one token's KV, all layers."""
    token_bytes: int = 2 * config.layers * config.kv_heads * config.head_dim * DTYPES[dtype].itemsize
    return token_bytes


def _check_memory(needed_bytes: int, num_blocks: int) -> None:
    """Raise EnvironmentProblem if the blocks, once all are in use, would not fit into this machine.

    What the machine has in all, not what is free now: other processes may leave, and pages that are not
    used yet take no memory.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > machine_bytes:
        raise EnvironmentProblem(
            f"--kv-blocks {num_blocks}: with the weights that is {needed_bytes / 1e9:.1f} GB, and this "
            f"machine has {machine_bytes / 1e9:.1f} GB; ask for fewer"
        )


def _tokens_for_memory(config: ModelConfig, dtype: str, device: str, weight_bytes: int) -> int:
    """Tokens whose KV may be held."""
    token_bytes = _token_bytes(config, dtype)
    if device == "cuda":
        free_bytes: int = torch.cuda.mem_get_info()[0]
        return int(_CUDA_KV_SHARE * (free_bytes - weight_bytes) / token_bytes)
    return min(_CPU_KV_BYTES // token_bytes, _CPU_KV_TOKENS)


def _default_threads() -> int:
    """What OMP_NUM_THREADS says, else the cores that this process may run on."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else len(os.sched_getaffinity(0))


def _load(options: EngineOptions, directory: Path, config: ModelConfig, sizes: Sizes) -> Model:
    make = partial(Model.load, directory)
    if options.model == TINY:
        make = partial(Model.random, config, seed=options.seed)
    model = make(
        dtype=sizes.dtype,
        device=sizes.device,
        block_tokens=options.block_size,
        num_blocks=sizes.num_blocks,
        threads=sizes.threads,
    )
    _warm_up(model, sizes)
    return model


def _warm_up(model: Model, sizes: Sizes) -> None:
    """Compute a block and a decode, so that the first request does not pay for what torch sets up once.

    A longer prefill would not warm anything more up. What this leaves in the blocks is overwritten before it
    is ever read: no block is known to hold anything.
    """
    count = min(model.block_tokens, sizes.max_tokens)
    table = list(range(-(-count // model.block_tokens)))
    model.forward(StepBatch([SequenceStep([0] * count, 0, table, [count - 1])]))
    model.forward(StepBatch([SequenceStep([0], count - 1, table, [0])]))


def _namespace(options: EngineOptions, sizes: Sizes) -> str:
    """Everything beside tokens and salt that makes KV differ (see `core.content`)."""
    parts = [f"model={options.name}", f"weights={_WEIGHT_VERSION}", f"dtype={sizes.dtype}"]
    return ";".join([*parts, f"block={options.block_size}"])


def _tiers(
    options: EngineOptions, sizes: Sizes, directory: Path, model: Model, pool: BlockPool
) -> TierLink | None:
    """The link to the tiers, if there are any."""
    if options.kv_tiers is None:
        return None
    namespace = _bytes_namespace(options, sizes, directory)
    tiers = BlockTiers(options.kv_tiers, block_bytes=model.block_bytes, namespace=namespace)
    store = options.kv_tiers.store
    return TierLink(tiers, model, pool, store=None if store is None else store.name(namespace))


def _bytes_namespace(options: EngineOptions, sizes: Sizes, directory: Path) -> str:
    """Everything that makes the bytes of a block differ beside its content id, for files and for peers.

    It goes by what the weights are, not by the name that they are served under: files outlive the process,
    and a peer may have another revision under the same name.
    """
    parts = [f"weights={_weights_digest(options, directory)}", f"version={_WEIGHT_VERSION}", "adapter="]
    parts += [f"dtype={sizes.dtype}", f"layout={KV_LAYOUT}", f"block={options.block_size}"]
    return "sumibi-engine;" + ";".join(parts)


def _weights_digest(options: EngineOptions, directory: Path) -> str:
    """Tells two checkpoints apart by their configuration, and size and both ends of each weight file."""
    digest = blake2b((directory / "config.json").read_bytes(), digest_size=16)
    if options.model == TINY:
        digest.update(f"seed={options.seed}".encode())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            digest.update(file.read(_DIGEST_BYTES))
            file.seek(max(0, size - _DIGEST_BYTES))
            digest.update(file.read(_DIGEST_BYTES))
    return digest.hexdigest()


def _tier_infos(options: EngineOptions, model: Model, link: TierLink | None) -> dict[Tier, TierInfo]:
    """What the engine says of its tiers, in the words of its KV events."""
    config = options.kv_tiers
    if config is None or link is None:
        return {}
    limits = {
        Tier.HOST: config.host_bytes,
        Tier.DISK: config.disk.bytes if config.disk else 0,
        Tier.STORE: config.store.bytes if config.store else 0,
    }
    return {
        tier: TierInfo(
            name=link.media[tier].lower(),
            shared=tier is Tier.STORE,
            tokens=limit // model.kv_bytes_per_token,
        )
        for tier, limit in limits.items()
        if limit
    }


def _publisher(options: EngineOptions) -> tuple[ZmqPublisher | None, KVEventsConfig]:
    """The publisher, if one is wanted, and its configuration with the ports that were bound."""
    config = options.kv_events
    if not config.enable_kv_cache_events or config.publisher != "zmq":
        return None, config
    publisher = ZmqPublisher(config, host=options.host)
    bound = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    return publisher, msgspec.structs.replace(config, **bound)
