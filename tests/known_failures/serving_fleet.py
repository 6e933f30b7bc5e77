"""A fleet to play failures on: a `Lab`, endpoints that serve one prefill after another, time that passes."""

from heapq import heappop, heappush
from itertools import count
from math import inf

from routing_lab import MODEL, Lab

from sumibi.core.latency import LatencyModel
from sumibi.routing.events import Admitted, Arrived, Dispatch, FirstToken, Refuse, Tick, WakeAt


class Fleet:
    """Endpoints of one `Lab` with queues of their own, first come first served. They have cached what the
    router believes, and decoding takes `decode_s` a request, whatever its batch. Requests that the router
    holds back start when it says so.
    """

    def __init__(self, names, latency: LatencyModel, *, decode_s=0.5, **config):
        self.names = names
        self.lab = Lab(check=False, latency=latency, **config)
        self.lab.up(*names)
        self.latency = latency
        self.decode_s = decode_s
        self.placed = {}
        """Request -> endpoint, in order."""
        self.waited_s = {}
        """Request -> from its arrival to its dispatch."""
        self.refused = {}
        """Request -> (status, reason)."""
        self.ended = []
        """Requests in the order in which they ended."""
        self.on_end = lambda request: None
        self._arrived = {}
        self._free_t = dict.fromkeys(names, 0.0)
        self._due = []
        self._order = count()

    def pass_time(self, until):
        """Everything that happens up to `until`."""
        while self._due and self._due[0][0] <= until:
            t, _, what, *arguments = heappop(self._due)
            self.lab.t = max(self.lab.t, t)
            what(*arguments)
        if until < inf:
            self.lab.t = max(self.lab.t, until)

    def arrive(self, t, request, token_ids, **fields):
        """A request arrives. Returns its endpoint if it is sent at once."""
        self.pass_time(t)
        self._arrived[request] = (t, len(token_ids))
        self._carry_out(self.lab.arrive(request, token_ids, **fields))
        return self.placed.get(request)

    def arrive_unlike_any(self, t, request, tokens, **fields):
        """The same with a prompt of so many tokens that has nothing in common with another (no keys)."""
        self.pass_time(t)
        self._arrived[request] = (t, tokens)
        fields = {"model": MODEL, "keys": [], "prompt_tokens": tokens, "stream": True} | fields
        instructions = self.lab.tell(Arrived, request=request, **fields)
        self._carry_out(instructions + self.lab.tell(Admitted, request=request))

    def drain(self):
        """Until everything is over."""
        self.pass_time(inf)

    def shares(self):
        """Requests by endpoint."""
        taken = list(self.placed.values())
        return {name: taken.count(name) for name in self.names}

    def _carry_out(self, instructions):
        for instruction in instructions:
            if isinstance(instruction, Dispatch):
                self._start(instruction.request, instruction.endpoint)
            elif isinstance(instruction, Refuse):
                self.refused[instruction.request] = (instruction.status, instruction.reason)
            elif isinstance(instruction, WakeAt):
                self._at(instruction.at, self._tick)

    def _start(self, request, endpoint):
        t, (arrived_t, tokens) = self.lab.t, self._arrived[request]
        self.placed[request], self.waited_s[request] = endpoint, t - arrived_t
        self.lab.dispatched(request)
        reused = self.lab.candidates(request)[endpoint].reused_tokens
        begins = max(t, self._free_t[endpoint])
        ends = self._free_t[endpoint] = begins + self.latency.prefill_s(tokens - reused, reused)
        self._at(ends, self._first, request)
        self._at(ends + self.decode_s, self._end, request)

    def _first(self, request):
        self._carry_out(self.lab.tell(FirstToken, request=request, attempt=1))

    def _end(self, request):
        self._carry_out(self.lab.finish(request))
        self.ended.append(request)
        self.on_end(request)

    def _tick(self):
        self._carry_out(self.lab.tell(Tick))

    def _at(self, t, what, *arguments):
        heappush(self._due, (t, next(self._order), what, *arguments))
