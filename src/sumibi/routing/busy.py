"""How long an endpoint was busy with how much: what its latency model is learnt from."""

from typing import Final

BUSY_PERIOD_PREFILLS: Final = 8
"""Prefills in a busy period before it is closed and learnt from, though the endpoint is still busy."""


class BusyPeriod:
    """A stretch of time in which an endpoint always had a prefill of ours to compute.

    Work is conserved: whatever order the engine serves in, the period lasts as long as the work in it takes.
    So the latency model is learnt from periods, not from requests.
    """

    __slots__ = ("fetch_s", "prefills", "since_t", "sound", "work_ns")

    def __init__(self) -> None:
        self.reset(None)

    def reset(self, since_t: float | None) -> None:
        """Begin anew at `since_t`; None: not before the next dispatch."""
        self.since_t = since_t
        self.prefills = 0
        self.work_ns = 0
        self.fetch_s = 0.0
        """Predicted of what they had fetched."""
        self.sound = True
        """False once something happened in it whose work is not known (an aborted prefill, ...)."""
