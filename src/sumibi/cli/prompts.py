"""Verbs about prompts: `keys check`.

Heavy imports are inside the verbs (see the package).
"""

from pathlib import Path
from typing import Annotated

import typer


def check(
    against: Annotated[
        str, typer.Option(help="A running engine's URL (vLLM, or an embedded engine).", metavar="URL")
    ],
    template: Annotated[
        Path | None,
        typer.Option(
            help="A chat template (a jinja file), or the directory with one. [default: the tokenizer's"
            " directory]",
            metavar="FILE",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory with tokenizer.json, as you give it to `sumibi serve`. [default: where the"
            " engine says its model is, if that is a directory of this machine]",
            metavar="DIR",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model's name at the engine. [default: the first it serves]")
    ] = None,
    conversations: Annotated[
        int, typer.Option(help="How many; each is some four requests. Kinds take turns.", min=1, max=10_000)
    ] = 52,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal conversations.")] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the requests that differ, for programs.")
    ] = False,
) -> None:
    """Check that the gateway reads your model's prompts as your engine does: same template, same tokens.

    Made-up conversations (system prompts, thinking, tools, odd text, template arguments) are rendered and
    tokenised here, and the engine is asked for its tokens of the same requests. Nothing is generated. If
    all agree, the keys that requests are placed by are exact. If not, the first difference of each kind is
    shown with what it likely comes from.

    The exit code is 0 if all agree and 1 if a request does not.

    \b
    Examples:
      sumibi keys check --against http://10.0.0.1:8000 --tokenizer ./my-model
      sumibi keys check --against http://10.0.0.1:8000 --tokenizer ./my-model --template tools.jinja
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi import console
    from sumibi.keycheck.checking import check_keys

    with console.progress() as report:
        found = check_keys(
            against,
            model=model,
            tokenizer=tokenizer,
            template=template,
            count=conversations,
            seed=seed,
            report=report,
        )
    console.print_key_check(found, json=json)
    raise typer.Exit(0 if found.ok else 1)
