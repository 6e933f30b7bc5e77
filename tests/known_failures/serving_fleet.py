"""A fleet to play failures on: a `Lab`, endpoints that serve one prefill after another, time that passes."""

from heapq import heappop, heappush
from itertools import count

from routing_lab import Lab

from sumibi.core.latency import LatencyModel


class Fleet:
    """Endpoints of one `Lab` with queues of their own. They cache nothing, so time depends on lengths only
    unless the caller says what is cached; decoding takes `decode_s` a request, whatever its batch.
    """

    def __init__(self, names, latency: LatencyModel, *, decode_s=0.5, **config):
        self.names = names
        self.lab = Lab(check=False, latency=latency, **config)
        self.lab.up(*names)
        self.latency = latency
        self.decode_s = decode_s
        self.placed = []
        """(request, endpoint) in order."""
        self.ttft_s = {}
        self._free_t = dict.fromkeys(names, 0.0)
        self._due = []
        self._order = count()

    def pass_time(self, until):
        """Everything that the endpoints do up to `until`."""
        while self._due and self._due[0][0] <= until:
            t, _, what, request = heappop(self._due)
            self.lab.t = max(self.lab.t, t)
            what(request)
        self.lab.t = max(self.lab.t, until)

    def arrive(self, t, request, token_ids, **fields):
        """A request arrives and is sent at once. Returns its endpoint."""
        self.pass_time(t)
        endpoint = self.lab.ask(request, token_ids, **fields)
        assert endpoint in self.names
        self.placed.append((request, endpoint))
        reused = self.lab.candidates(request)[endpoint].reused_tokens
        begins = max(t, self._free_t[endpoint])
        ends = self._free_t[endpoint] = begins + self.latency.prefill_s(len(token_ids) - reused, reused)
        self.ttft_s[request] = ends - t
        heappush(self._due, (ends, next(self._order), self.lab.first, request))
        heappush(self._due, (ends + self.decode_s, next(self._order), self.lab.finish, request))
        return endpoint

    def drain(self):
        """Until everything is over."""
        while self._due:
            self.pass_time(self._due[0][0])

    def shares(self):
        """Requests by endpoint."""
        taken = [endpoint for _, endpoint in self.placed]
        return {name: taken.count(name) for name in self.names}
