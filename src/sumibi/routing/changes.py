"""What happened to endpoints since a decision looked at all of them.

A decision in a large fleet goes by what is remembered of each endpoint. So every change is noted: those that
move the numbers of one endpoint singly, and those that change who may be asked by a count.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sumibi.routing.endpoint import Endpoint
    from sumibi.routing.floors import Rows

MOST_CHANGES: Final = 4096
"""That are remembered singly; then whatever depends on them is made anew."""


class Changes:
    """What happened to endpoints."""

    __slots__ = ("count", "latest", "log")

    def __init__(self) -> None:
        self.count = 0
        """Changes that a `Roster` depends on."""
        self.latest: Rows | None = None
        """What the latest decision went by, of a large fleet."""
        self.log: list[Endpoint] = []
        """Those whose load, learnt model or order of victims changed since `count` did."""

    def touch(self, endpoint: "Endpoint") -> None:
        """Note a change that no roster depends on."""
        self.log.append(endpoint)
        if len(self.log) > MOST_CHANGES:
            self.count_up()

    def count_up(self) -> None:
        """Note one that rosters depend on."""
        self.count += 1
        self.log.clear()
        self.latest = None

    def settle(self, t: float) -> None:
        """Have the next decision find all of this done: what changed is at hand now, and may not be then."""
        if self.latest is not None:
            self.latest.refresh(t)
