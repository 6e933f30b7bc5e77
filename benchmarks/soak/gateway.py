"""A gateway as `sumibi serve` starts it, but for its limits: seconds instead of minutes, so that a test can
wait for them; and, if wanted, with a wall clock that jumps. First argument: JSON of `Start`.
"""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec


class Start(msgspec.Struct):
    """What the process is told."""

    engines: list[str]
    port: int
    admin_port: int
    usage_log: str
    timeouts: dict[str, float]
    """Fields of `options.Timeouts`."""
    jumps: bool = False
    """The wall clock jumps, years back and forth, with every look at it."""


def jumping(true: Callable[[], float]) -> Callable[[], float]:
    """A wall clock that nobody can rely on."""
    draw = random.Random(5)
    return lambda: true() + draw.choice((0.0, 3600.0, -3600.0, 3e8, -3e8))


def main(start: Start) -> int:
    """Serve until told to stop."""
    if start.jumps:
        time.time = jumping(time.time)  # before anything could take the true one
    from sumibi.gateway.main import main as serve
    from sumibi.gateway.options import GatewayOptions, Timeouts, engine_options

    return serve(
        GatewayOptions(
            engines=engine_options(start.engines),
            port=start.port,
            admin_port=start.admin_port,
            usage_log=Path(start.usage_log),
            timeouts=Timeouts(**start.timeouts),
            scrape_interval_s=0.2,
        )
    )


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Start)))
