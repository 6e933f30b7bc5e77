"""Words that several verbs understand, with their help."""

from pathlib import Path
from typing import Annotated

import typer

Tokenizer = Annotated[
    Path | None,
    typer.Option(
        help="Directory with the model's tokenizer.json and chat template. Without it an engine is"
        " asked to render and tokenise, which costs a round trip a request.",
        metavar="DIR",
    ),
]

Policy = Annotated[str, typer.Option(help="How an engine is chosen; docs/policies.md lists the names.")]

Objectives = Annotated[
    list[str] | None,
    typer.Option(
        help="Priority of requests whose x-llm-d-inference-objective header has this word: NAME=PRIORITY,"
        " higher is more urgent, others have 0. Repeat it for several.",
        metavar="OBJECTIVE",
    ),
]

HoldAbove = Annotated[
    str | None,
    typer.Option(
        help="A request whose pick cannot begin with it within this time waits in the gateway; none:"
        " nothing waits here, engines queue. Only `cost` holds requests. [default: 1]",
        metavar="SECONDS",
    ),
]

Bands = Annotated[
    list[str] | None,
    typer.Option(
        help="How much of one priority may wait in the gateway and how long, the rest gets 429:"
        " PRIORITY:max_requests=N,max_bytes=N,ttl_s=SECONDS, each if wanted; `other` for priorities"
        " without their own. Repeat it."
        " [default: other:max_requests=5000,max_bytes=1000000000,ttl_s=300]",
        metavar="LIMITS",
    ),
]

MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        help="Sequences that an engine runs at once, for engines that do not say (vLLM: its own"
        " --max-num-seqs). [default: unknown, no batch counts as full]",
        min=1,
    ),
]

KvEvents = Annotated[
    list[str] | None,
    typer.Option(
        help="Where an engine publishes KV events: ENGINE_URL=tcp://HOST:PORT[,replay=tcp://HOST:PORT]."
        " Without it the engine is asked.",
        metavar="SOURCE",
    ),
]

ApiKeys = Annotated[
    Path | None,
    typer.Option(help="YAML or JSON: SHA-256 (hex) of an API key -> tenant id.", metavar="FILE"),
]

UsageLog = Annotated[
    Path | None,
    typer.Option(help="Usage records, JSON lines. [default: in the state directory]", metavar="FILE"),
]

Record = Annotated[
    Path | None,
    typer.Option(
        help="Record arrivals, keys (never text) and decisions here, for `sumibi decisions rerun`.",
        metavar="DIR",
    ),
]
