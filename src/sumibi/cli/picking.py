"""The verb `epp`: the endpoint picker for Envoy and the Gateway API.

Flags and ports are those of the Gateway API inference extension's own picker, where it has them.
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


def epp(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="An engine's URL, with an IP address; repeat it, or separate several by commas. What may"
            " follow the URL is that of `sumibi serve`.",
            metavar="URL",
        ),
    ] = None,
    endpoints_file: Annotated[
        Path | None,
        typer.Option(
            help="In place of --engine: a YAML or JSON file with endpoints: [{name, address, port, labels}],"
            " read again when it changes.",
            metavar="FILE",
        ),
    ] = None,
    pool_name: Annotated[
        str,
        typer.Option(
            help="In place of --engine: the ready pods that this InferencePool selects, at its target ports.",
            metavar="NAME",
        ),
    ] = "",
    pool_namespace: Annotated[
        str, typer.Option(help="Of pool and pods. [default: its own]", metavar="NAMESPACE")
    ] = "",
    pool_group: Annotated[
        str, typer.Option(help="API group of InferencePool (v1).", metavar="GROUP")
    ] = "inference.networking.k8s.io",
    endpoint_selector: Annotated[
        str,
        typer.Option(
            help="In place of --engine, without an InferencePool: the ready pods with these labels, for"
            " example app=vllm,tier=prod.",
            metavar="LABELS",
        ),
    ] = "",
    endpoint_target_ports: Annotated[
        list[str] | None,
        typer.Option(help="Ports of the selected pods; separate several by commas.", metavar="PORTS"),
    ] = None,
    kv_events_port: Annotated[
        int | None,
        typer.Option(
            help="Where endpoints of a pool, selector or file publish KV events, if they do not say (vLLM:"
            " the port of `endpoint` in its --kv-events-config).",
            min=1,
            max=65535,
        ),
    ] = None,
    kv_replay_port: Annotated[
        int | None,
        typer.Option(help="The same of `replay_endpoint`.", min=1, max=65535),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "0.0.0.0",
    grpc_port: Annotated[int, typer.Option(help="Port of external processing.")] = 9002,
    grpc_health_port: Annotated[int, typer.Option(help="Port of the gRPC health service.")] = 9003,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics (HTTP).")] = 9090,
    secure_serving: Annotated[bool, typer.Option(help="TLS on the port of external processing.")] = True,
    cert_path: Annotated[
        Path | None,
        typer.Option(
            help="Directory with tls.crt and tls.key, read again when they change. [default: a self-signed"
            " certificate, made at start]",
            metavar="DIR",
        ),
    ] = None,
    response_phase: Annotated[
        str,
        typer.Option(
            help="Look at answers: `auto`, if Envoy shows them, for exact ends and usage; `off`, never:"
            " cheaper, and ends are estimated.",
            metavar="auto|off",
        ),
    ] = "auto",
    fallbacks: Annotated[
        int, typer.Option(help="Endpoints named to Envoy beside the first, for its retries.", min=0, max=8)
    ] = 2,
    disable_endpoint_subset_filter: Annotated[
        bool, typer.Option("--disable-endpoint-subset-filter", help="Pay no heed to subset hints.")
    ] = False,
    max_body_bytes: Annotated[int, typer.Option(help="Longer request bodies get 413.", min=1)] = 16
    * 1024
    * 1024,
    refresh_metrics_interval: Annotated[
        float,
        typer.Option(
            help="Between two reads of an engine's /metrics and health.", metavar="SECONDS", min=0.05
        ),
    ] = 1.0,
    tokenizer: Tokenizer = None,
    policy: Policy = "cost",
    objective: Objectives = None,
    hold_above: HoldAbove = None,
    band: Bands = None,
    max_num_seqs: MaxNumSeqs = None,
    kv_events: KvEvents = None,
    api_keys: ApiKeys = None,
    usage_log: UsageLog = None,
    record: Record = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            help="After SIGTERM: how long requests are still served while health says NOT_SERVING; what is"
            " left then gets a 503. A second SIGTERM cuts it short.",
            metavar="SECONDS",
            min=0,
            max=86_400,
        ),
    ] = 30.0,
) -> None:
    """Pick endpoints for Envoy (external processing, FULL_DUPLEX_STREAMED), as an InferencePool's picker.

    \b
    Example:
      sumibi epp --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000 --tokenizer ./my-model
    docs/epp.md has an Envoy configuration to go with it.
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi.gateway.epp.endpoints import EventPorts
    from sumibi.gateway.epp.options import EppOptions, response_phase_of
    from sumibi.gateway.epp.pods import selection_of
    from sumibi.gateway.options import GatewayOptions, Timeouts, engine_options
    from sumibi.gateway.queues import bands_of, hold_above_of
    from sumibi.gateway.terms import objectives_of

    bands, other_bands = bands_of(band or ())
    options = EppOptions(
        gateway=GatewayOptions(
            engines=engine_options(engine, kv_events or ()) if engine else (),
            host=host,
            tokenizer=tokenizer,
            policy=policy,
            objectives=objectives_of(objective or ()),
            bands=bands,
            other_bands=other_bands,
            hold_above_s=hold_above_of(hold_above),
            max_sequences=max_num_seqs,
            admin_port=None,
            api_keys=api_keys,
            usage_log=usage_log,
            record=record,
            max_body_bytes=max_body_bytes,
            scrape_interval_s=refresh_metrics_interval,
            timeouts=Timeouts(drain_s=drain_timeout),
        ),
        grpc_port=grpc_port,
        health_port=grpc_health_port,
        metrics_port=metrics_port,
        secure=secure_serving,
        cert_path=cert_path,
        response_phase=response_phase_of(response_phase),
        fallbacks=fallbacks,
        subset_filter=not disable_endpoint_subset_filter,
        endpoints_file=endpoints_file,
        pool_name=pool_name,
        selection=(
            selection_of(endpoint_selector, endpoint_target_ports or ()) if endpoint_selector else None
        ),
        namespace=pool_namespace,
        pool_group=pool_group,
        event_ports=EventPorts(kv_events_port, kv_replay_port),
    )
    try:
        from sumibi.gateway.epp.main import main as run_picker
    except ModuleNotFoundError as missing:
        from sumibi.core.errors import EnvironmentProblem

        raise EnvironmentProblem(f"{missing.name} is missing: pip install 'sumibi[epp]'") from missing

    raise typer.Exit(run_picker(options))
