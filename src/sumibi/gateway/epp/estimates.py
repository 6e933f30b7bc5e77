"""When requests end whose answers Envoy does not show: as predicted, set right by what engines say.

A request's first token and its end come when the router expects them. A scrape of the engine that shows fewer
requests than are believed to be there ends as many of those that are due soonest; one that shows at least as
many puts off the end of those that are due, up to `_MOST` times what was predicted. So the count of requests
at an engine is wrong by at most what comes and goes between two scrapes; where other clients' load hides
ours, or no scrape comes, a request counts as long as was predicted, or `_MOST` times that at most.
"""

import asyncio
import heapq
from typing import TYPE_CHECKING, Final

from sumibi.gateway.shell import Shell
from sumibi.routing.events import Signals

if TYPE_CHECKING:
    from sumibi.gateway.epp.exchange import Exchange

_MOST: Final = 4.0
_LEAST_S: Final = 0.05
"""Of a prediction: requests take some time, whatever a model says that has not learnt yet."""
_SETTLES_S: Final = 0.1
"""A request that was named to Envoy later than so long before a scrape need not be in it."""


class _Entry:
    __slots__ = ("ends_t", "exchange", "last_t", "sent_t", "streaming")

    def __init__(self, exchange: "Exchange", sent_t: float, ends_t: float, last_t: float) -> None:
        self.exchange = exchange
        self.sent_t = sent_t
        self.ends_t = ends_t
        self.last_t = last_t
        """The end cannot be put off beyond."""
        self.streaming = False
        """Its first token is taken for sent."""


class Estimates:
    """The requests whose ends are estimated. Ends are told to the router by the requests themselves."""

    def __init__(self, shell: Shell, scrape_interval_s: float) -> None:
        self.total = 0
        """Requests whose end was estimated, or will be."""
        self._shell = shell
        self._fresh_s = 2 * scrape_interval_s
        self._entries: dict[str, _Entry] = {}
        self._due: list[tuple[float, str]] = []  # heap; entries that moved are in it more than once
        self._timer: asyncio.TimerHandle | None = None
        self._counted: dict[str, tuple[float, int]] = {}  # endpoint -> (time of the last scrape, requests)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, exchange: "Exchange") -> None:
        """It was named to Envoy just now."""
        now = self._shell.now()
        first_s, rest_s = (max(_LEAST_S, s) for s in self._shell.expected_s(exchange.id))
        whole_s = first_s + rest_s
        self.total += 1
        self._entries[exchange.id] = _Entry(exchange, now, now + whole_s, now + _MOST * whole_s)
        self._wake(now + first_s, exchange.id)

    def scraped(self, signals: Signals) -> None:
        """An engine said what it has to do."""
        if signals.running is None and signals.waiting is None:
            return
        counted = (signals.running or 0) + (signals.waiting or 0)
        self._counted[signals.endpoint] = signals.scraped_t, counted
        there = self._there(signals.endpoint, signals.scraped_t)
        for entry in sorted(there, key=lambda entry: entry.ends_t)[: max(0, len(there) - counted)]:
            self._end(entry)

    def close(self) -> None:
        """Estimate nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self._entries.clear()

    def _there(self, endpoint: str, scraped_t: float) -> list[_Entry]:
        """Whom a scrape of the endpoint should have counted."""
        return [
            entry
            for entry in self._entries.values()
            if entry.exchange.endpoint == endpoint and entry.sent_t < scraped_t - _SETTLES_S
        ]

    def _look(self, entry: _Entry, now: float) -> None:
        """An entry is due: its first token, or its end."""
        if not entry.streaming:
            entry.streaming = True
            entry.exchange.estimated_first_token()
            self._wake(entry.ends_t, entry.exchange.id)
            return
        scraped_t, counted = self._counted.get(entry.exchange.endpoint, (0.0, 0))
        there = self._there(entry.exchange.endpoint, scraped_t)
        runs_on = now - scraped_t < self._fresh_s and entry in there and counted >= len(there)
        if runs_on and now < entry.last_t:
            entry.ends_t = min(now + self._fresh_s, entry.last_t)
            self._wake(entry.ends_t, entry.exchange.id)
        else:
            self._end(entry)

    def _end(self, entry: _Entry) -> None:
        if not entry.streaming:
            entry.exchange.estimated_first_token()
        del self._entries[entry.exchange.id]
        entry.exchange.estimated_end()

    def _wake(self, at: float, request: str) -> None:
        heapq.heappush(self._due, (at, request))
        if self._due[0][0] == at:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            delay_s = max(0.0, self._due[0][0] - self._shell.now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._shell.now()
        while self._due and self._due[0][0] <= now:
            _, request = heapq.heappop(self._due)
            entry = self._entries.get(request)
            if entry is not None and (not entry.streaming or entry.ends_t <= now):
                self._look(entry, now)
        self._set_timer()
