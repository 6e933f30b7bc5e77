"""Endpoints that compute one prefill after another, in order of arrival, behind a router that may hold."""

from heapq import heappop, heappush
from itertools import count
from math import inf

from routing_lab import MODEL, Lab

from sumibi.core.latency import LatencyModel
from sumibi.routing.events import Admitted, Arrived, Dispatch, FirstToken, Refuse, Tick, WakeAt

FLAT = LatencyModel(a_s=0.0, b_s=1e-4, q_s=0.0, d0_s=1e-6, d1_s=0.0, d2_s=0.0)
"""10,000 prompt tokens a second and nothing else, so that what must come out can be counted by hand."""


def held(lab):
    """Requests held, all queues together."""
    return sum(queue.requests for queue in lab.router.counters().held_now)


class Queues:
    """The world around a `Lab`. Prompts have no keys, unless given: nothing is ever cached."""

    def __init__(self, *names, check=False, **config):
        self.lab = Lab(check=check, **({"latency": FLAT} | config))
        self.lab.up(*names)
        self.arrived_t, self.left_t, self.first_t, self.refused = {}, {}, {}, {}
        self.placed = []
        self.gone = set()
        self._free_t = dict.fromkeys(names, 0.0)
        self._due = []
        self._order = count()

    def at(self, t, what, *arguments):
        heappush(self._due, (t, next(self._order), what, arguments))

    def play(self, until=inf):
        while self._due and self._due[0][0] <= until:
            t, _, what, arguments = heappop(self._due)
            self.lab.t = max(self.lab.t, t)
            what(*arguments)

    def arrive(self, request, tokens, keys=(), **fields):
        self.arrived_t[request] = self.lab.t
        told = {"model": MODEL, "keys": list(keys), "prompt_tokens": tokens, "stream": True} | fields
        self.obey(self.lab.tell(Arrived, request=request, **told))
        if request not in self.refused:
            self.obey(self.lab.tell(Admitted, request=request))

    def leave(self, request, reason):
        """The client goes, if the request still waits."""
        if request in self.arrived_t and not self.over(request):
            self.gone.add(request)
            self.obey(self.lab.finish(request, reason, answered=False))

    def over(self, request):
        """It left its queue, one way or another."""
        return request in self.left_t or request in self.refused or request in self.gone

    def obey(self, instructions):
        for instruction in instructions:
            match instruction:
                case Dispatch():
                    self._start(instruction)
                case Refuse():
                    self.refused[instruction.request] = (instruction.status, instruction.reason)
                case WakeAt():
                    self.at(instruction.at, lambda: self.obey(self.lab.tell(Tick)))

    def _start(self, dispatch):
        name, t = dispatch.request, self.lab.t
        assert not self.over(name)
        self.placed.append(name)
        self.left_t[name] = t
        self.lab.dispatched(name)
        picked = self.lab.router.decision(dispatch.decision).picked
        prompt_tokens = self.lab.router.decision(dispatch.decision).prompt_tokens
        work_s = FLAT.b_s * (prompt_tokens - picked.reused_tokens)
        free_t = self._free_t[dispatch.endpoint] = max(t, self._free_t[dispatch.endpoint]) + work_s
        self.at(free_t, self._first, name)

    def _first(self, name):
        self.first_t[name] = self.lab.t
        attempt = self.lab.attempts[name].attempt
        self.obey(self.lab.tell(FirstToken, request=name, attempt=attempt))
        self.obey(self.lab.finish(name))

    def waited_s(self, name):
        return self.left_t[name] - self.arrived_t[name]
