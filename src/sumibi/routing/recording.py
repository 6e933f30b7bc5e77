"""A recorded event log, read back: fed to fresh routers it gives the same decisions, bit for bit.

A log is a list of JSON lines: for each run of a router its settings, then every event it was given, in its
recordable form. A gateway that is started again goes on in the same file, with a line of settings first.
"""

from collections.abc import Iterable

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import AnyEvent
from sumibi.routing.router import Router


class Started(msgspec.Struct, frozen=True, tag=True):
    """The first line of a run: the settings that its decisions depend on."""

    config: RouterConfig


_decoder: msgspec.json.Decoder[Started | AnyEvent] = msgspec.json.Decoder(Started | AnyEvent)


def replay(lines: Iterable[bytes]) -> list[Router]:
    """Feed a recorded log to fresh routers, one for each run in it; each as it was at the end of its run.

    Raises BadRequest naming the line that is no record, or that has lost the beginning of its run (a log is
    bounded, the oldest part goes first).
    """
    routers: list[Router] = []
    for number, line in enumerate(lines, 1):
        try:
            record = _decoder.decode(line)
        except msgspec.MsgspecError as cause:
            raise BadRequest(f"line {number} is not a recorded event: {cause}") from cause
        if isinstance(record, Started):
            routers.append(Router(record.config))
        elif routers:
            routers[-1].handle(record)
        else:
            raise BadRequest(f"line {number}: the beginning of this run is not in the log")
    return routers
