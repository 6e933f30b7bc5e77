"""The gateway's own log (`--record DIR`, DIR/events.jsonl): yesterday's traffic, to be replayed.

Only what clients did is taken: arrivals, keys, lengths. What the router decided and how engines fared is
left behind, for another policy or fleet would have fared differently.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from sumibi.bench.traces.conversations import Asked, Conversations
from sumibi.bench.traces.lines import decode, trace_error
from sumibi.routing.events import AnyEvent, Arrived, EndpointUp, Finished
from sumibi.routing.recording import Started
from sumibi.routing.router import Router
from sumibi.sim.workload import Workload

_decoder: msgspec.json.Decoder[Started | AnyEvent] = msgspec.json.Decoder(Started | AnyEvent)


def matches(record: dict[str, object]) -> bool:
    """True if the first record of a file is of this format."""
    return "type" in record and ("t" in record or record["type"] == "Started")


def read(path: Path, lines: Iterable[tuple[int, bytes]]) -> Workload:
    """All requests of a log, in an open loop. A log of several runs of a gateway is one after the other.

    Every model must have prompt blocks of one size.
    """
    conversations = Conversations()
    router: Router | None = None
    open_requests: dict[str, Asked] = {}
    offset_s, last_s = 0.0, 0.0
    fresh = True
    sizes: dict[str, int] = {}
    for number, line in lines:
        event = decode(_decoder, path, number, line)
        if isinstance(event, Started):
            router, fresh = Router(event.config), True
            open_requests.clear()
            continue
        if router is None:
            raise trace_error(path, number, "the beginning of this run is not in the log (a log is bounded);"
                              " start from a `Started` line")  # fmt: skip
        if fresh:
            # a gateway that is started again has another clock
            offset_s, fresh = last_s - event.t, False
        last_s = event.t + offset_s
        if isinstance(event, EndpointUp):
            # only to know the router's block size, by its own rule
            router.handle(event)
        elif isinstance(event, Arrived):
            asked = _asked(event, last_s)
            open_requests[event.request] = asked
            conversations.asked.append(asked)
            sizes.setdefault(event.model, router.block_tokens(event.model))
        elif isinstance(event, Finished) and event.request in open_requests:
            asked = open_requests[event.request]
            asked.end_s = last_s
            if event.output_tokens is not None:
                asked.output_tokens = max(event.output_tokens, 0)
            if event.prompt_tokens is not None:
                asked.prompt_tokens = max(event.prompt_tokens, 1)
    if len(set(sizes.values())) > 1:
        several = ", ".join(f"{model}: {size}" for model, size in sizes.items())
        raise trace_error(path, 0, f"has models with prompt blocks of different sizes ({several})")
    if not sizes:
        raise trace_error(path, 0, "has no request in it")
    (size,) = set(sizes.values())
    for asked in conversations.asked:
        del asked.keys[asked.prompt_tokens // size :]
    return conversations.workload("recording" if path.name == "events.jsonl" else path.stem, size)


def _asked(event: Arrived, start_s: float) -> Asked:
    return Asked(
        start_s=start_s,
        keys=list(event.keys),
        prompt_tokens=max(event.prompt_tokens, 1),
        output_tokens=None,
        conversation=event.session,
        max_tokens=event.max_tokens,
        model=event.model,
        tenant=event.tenant,
        priority=event.priority,
    )
