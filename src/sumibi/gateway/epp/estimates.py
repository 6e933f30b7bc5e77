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
    """One request."""

    __slots__ = ("ends_t", "exchange", "last_t", "scraped", "sent_t", "streaming")

    def __init__(self, exchange: "Exchange", sent_t: float, ends_t: float, last_t: float) -> None:
        self.exchange = exchange
        self.sent_t = sent_t
        self.ends_t = ends_t
        self.last_t = last_t
        """The end cannot be put off beyond."""
        self.streaming = False
        """Its first token is taken for sent."""
        self.scraped = False
        """The last scrape of its endpoint should have counted it."""


class _There:
    """The requests at one endpoint."""

    __slots__ = ("counted", "entries", "scraped", "scraped_t")

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        self.scraped = 0
        """Those of them that the last scrape should have counted."""
        self.scraped_t = 0.0
        self.counted = 0
        """What it did count."""


class Estimates:
    """The requests whose ends are estimated. Ends are told to the router by the requests themselves."""

    def __init__(self, shell: Shell, scrape_interval_s: float) -> None:
        self.total = 0
        """Requests whose end was estimated, or will be."""
        self._shell = shell
        self._fresh_s = 2 * scrape_interval_s
        self._at: dict[str, str] = {}  # request -> endpoint
        self._there: dict[str, _There] = {}
        self._due: list[tuple[float, str]] = []  # heap; entries that moved are in it more than once
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._at)

    def add(self, exchange: "Exchange") -> None:
        """It was named to Envoy just now."""
        now = self._shell.now()
        first_s, rest_s = (max(_LEAST_S, s) for s in self._shell.expected_s(exchange.id))
        whole_s = first_s + rest_s
        self.total += 1
        self._put(_Entry(exchange, now, now + whole_s, now + _MOST * whole_s))
        self._wake(now + first_s, exchange.id)

    def moved(self, exchange: "Exchange") -> None:
        """It is answered at another endpoint than was thought."""
        entry = self._take(exchange.id)
        if entry is not None:
            self._put(entry)

    def over(self, request: str) -> None:
        """It ended, and that was seen."""
        self._take(request)

    def scraped(self, signals: Signals) -> None:
        """An engine said what it has to do."""
        if signals.running is None and signals.waiting is None:
            return
        there = self._there.get(signals.endpoint)
        if there is None:
            return
        there.scraped_t = signals.scraped_t
        there.counted = (signals.running or 0) + (signals.waiting or 0)
        counted = []
        for entry in there.entries.values():
            entry.scraped = entry.sent_t < signals.scraped_t - _SETTLES_S
            if entry.scraped:
                counted.append(entry)
        there.scraped = len(counted)
        surplus = there.scraped - there.counted
        if surplus > 0:
            for entry in heapq.nsmallest(surplus, counted, key=lambda entry: entry.ends_t):
                self._end(entry)

    def close(self) -> None:
        """Estimate nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self._at.clear()
        self._there.clear()

    def _put(self, entry: _Entry) -> None:
        entry.scraped = False
        endpoint = self._at[entry.exchange.id] = entry.exchange.endpoint
        self._there.setdefault(endpoint, _There()).entries[entry.exchange.id] = entry

    def _take(self, request: str) -> _Entry | None:
        endpoint = self._at.pop(request, None)
        if endpoint is None:
            return None
        there = self._there[endpoint]
        entry = there.entries.pop(request)
        there.scraped -= entry.scraped
        if not there.entries:
            del self._there[endpoint]
        return entry

    def _look(self, entry: _Entry, now: float) -> None:
        """An entry is due: its first token, or its end."""
        if not entry.streaming:
            entry.streaming = True
            entry.exchange.estimated_first_token()
            self._wake(entry.ends_t, entry.exchange.id)
            return
        there = self._there[self._at[entry.exchange.id]]
        fresh = now - there.scraped_t < self._fresh_s
        if fresh and entry.scraped and there.counted >= there.scraped and now < entry.last_t:
            entry.ends_t = min(now + self._fresh_s, entry.last_t)
            self._wake(entry.ends_t, entry.exchange.id)
        else:
            self._end(entry)

    def _end(self, entry: _Entry) -> None:
        if not entry.streaming:
            entry.exchange.estimated_first_token()
        self._take(entry.exchange.id)
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
            endpoint = self._at.get(request)
            if endpoint is None:
                continue
            entry = self._there[endpoint].entries[request]
            if not entry.streaming or entry.ends_t <= now:
                self._look(entry, now)
        self._set_timer()
