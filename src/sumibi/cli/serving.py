"""Verbs that are one process in the foreground: `serve` (the gateway) and `engine`.

Heavy imports are inside the verbs (see the package).
"""

from pathlib import Path
from typing import Annotated

import typer

from sumibi.cli.words import (
    ApiKeys,
    Bands,
    HoldAbove,
    KvEvents,
    MaxNumSeqs,
    Objectives,
    Policy,
    Record,
    Tokenizer,
    UsageLog,
)


def serve(
    engine: Annotated[
        list[str],
        typer.Option(
            help="An engine's URL; repeat it, or separate several by commas. For prefill and decode apart"
            " what it is for follows: URL,role=prefill|decode|both,connector=nixlv2|sglang|stream and, if"
            " wanted, revision=NAME, link_gb_s=N (10^9 bytes a second), kv_port=N (of its side channel).",
            metavar="URL",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the OpenAI-compatible door.")] = 8000,
    tokenizer: Tokenizer = None,
    policy: Policy = "cost",
    objective: Objectives = None,
    hold_above: HoldAbove = None,
    band: Bands = None,
    max_num_seqs: MaxNumSeqs = None,
    kv_events: KvEvents = None,
    admin_host: Annotated[str, typer.Option(help="Address of the admin door.")] = "127.0.0.1",
    admin_port: Annotated[int, typer.Option(help="Port of the admin door; 0 for none.")] = 8080,
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="The admin key, better given as the variable than on a command line that others can see.",
            envvar="SUMIBI_ADMIN_KEY",
            metavar="KEY",
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the admin key. [default: a generated one in the state directory]", metavar="FILE"
        ),
    ] = None,
    api_keys: ApiKeys = None,
    usage_log: UsageLog = None,
    record: Record = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            help="After SIGTERM: time for running requests to finish; what is left ends with an error event"
            " or a 503. A second SIGTERM cuts it short.",
            metavar="SECONDS",
            min=0,
            max=86_400,
        ),
    ] = 30.0,
) -> None:
    """Put the gateway in front of engines that already run (vLLM's HTTP API), with no stack file.

    \b
    Example:
      sumibi serve --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000 --tokenizer ./my-model
    Then use http://127.0.0.1:8000/v1 as you would use one of the engines.
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi.gateway.options import GatewayOptions, Timeouts, engine_options
    from sumibi.gateway.queues import bands_of, hold_above_of
    from sumibi.gateway.terms import objectives_of

    bands, other_bands = bands_of(band or ())
    options = GatewayOptions(
        engines=engine_options(engine, kv_events or ()),
        host=host,
        port=port,
        tokenizer=tokenizer,
        policy=policy,
        objectives=objectives_of(objective or ()),
        bands=bands,
        other_bands=other_bands,
        hold_above_s=hold_above_of(hold_above),
        max_sequences=max_num_seqs,
        admin_host=admin_host,
        admin_port=admin_port or None,
        admin_key=admin_key,
        admin_key_file=admin_key_file,
        api_keys=api_keys,
        usage_log=usage_log,
        record=record,
        timeouts=Timeouts(drain_s=drain_timeout),
    )
    from sumibi.gateway.main import main as run_gateway

    raise typer.Exit(run_gateway(options))


def sidecar(
    decode: Annotated[
        str, typer.Option(help="The decode engine beside it.", metavar="URL")
    ] = "http://127.0.0.1:8200",
    connector: Annotated[
        str, typer.Option(help="How KV is handed over: nixlv2, sglang or stream.")
    ] = "nixlv2",
    allow_prefiller: Annotated[
        list[str] | None,
        typer.Option(
            help="A prefill engine that requests may name in x-prefiller-host-port; others get 403."
            " A name stands for every address that it has. Repeat it.",
            metavar="HOST:PORT",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    kv_port: Annotated[
        int | None,
        typer.Option(
            help="Of the prefill engines' side channels; nixlv2 needs none."
            " [default: what they say at /kv_transfer, else 5600 (stream), 8998 (sglang)]"
        ),
    ] = None,
) -> None:
    """Run prefill and decode apart beside a decode engine, for gateways that only route.

    \b
    Example:
      sumibi sidecar --decode http://127.0.0.1:8200 --allow-prefiller 10.0.0.1:8000
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi.gateway.sidecar import main as run_sidecar
    from sumibi.gateway.sidecar import sidecar_options

    options = sidecar_options(decode, connector, allow_prefiller or (), host=host, port=port, kv_port=kv_port)
    raise typer.Exit(run_sidecar(options))


def engine(
    model: Annotated[
        str, typer.Option(help="Checkpoint directory, the built-in model's name, or `tiny` (random weights).")
    ],
    served_model_name: Annotated[
        str, typer.Option(help="As clients name it. [default: the directory's name]")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one and prints it.")] = 8001,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto (cuda if there is one), cpu or cuda.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. [default: OMP_NUM_THREADS, else the cores allowed]")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt + output of one request. [default: the checkpoint's]"),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences computed at once; more wait.")] = 64,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Token budget of a step. [default: 256 on a CPU, 2,048 on CUDA]"),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 32,
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-gpu-blocks-override",
            "--kv-blocks",
            help="KV blocks in all (on a CPU too). [default: sized to the device]",
        ),
    ] = None,
    kv_events_config: Annotated[
        str, typer.Option(help="Where to publish KV events: JSON, with vLLM's fields.", metavar="JSON")
    ] = "{}",
    kv_tiers: Annotated[
        str,
        typer.Option(
            help="Keep KV below the device: JSON with host_bytes, disk {path, bytes}, store {url, bytes,"
            " timeout_s} (docs/kv-tiers.md).",
            metavar="JSON",
        ),
    ] = "",
    kv_transfer_config: Annotated[
        str,
        typer.Option(
            help="Prefill and decode apart: JSON, with vLLM's fields (docs/prefill-decode.md).",
            metavar="JSON",
        ),
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of requests that bring none.")] = 0,
    enable_dev_mode: Annotated[
        bool, typer.Option("--enable-dev-mode", help="Routes for operators: /reset_prefix_cache.")
    ] = False,
    shutdown_grace: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish after SIGTERM.")
    ] = 30.0,
) -> None:
    """Run one embedded engine in the foreground. Flags follow `vllm serve`.

    \b
    Examples:
      sumibi engine --model tiny --port 8001
      sumibi engine --model smollm2-135m-instruct --kv-blocks 1024 --threads 4
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi.engine.options import (
        EngineOptions,
        dev_mode_from_environment,
        parse_kv_events,
        parse_kv_tiers,
    )
    from sumibi.engine.transfer.config import parse_kv_transfer

    options = EngineOptions(
        model=model,
        served_model_name=served_model_name,
        host=host,
        port=port,
        dtype=dtype,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_gpu_blocks_override=kv_blocks,
        kv_events=parse_kv_events(kv_events_config),
        kv_tiers=parse_kv_tiers(kv_tiers),
        kv_transfer=parse_kv_transfer(kv_transfer_config) if kv_transfer_config else None,
        seed=seed,
        enable_dev_mode=enable_dev_mode or dev_mode_from_environment(),
        shutdown_grace_s=shutdown_grace,
    )
    from sumibi.engine.server import main as run_engine

    raise typer.Exit(run_engine(options))
