"""A policy by itself, with endpoints whose load and metrics a test can set."""

import msgspec
from xxhash import xxh3_64_intdigest

from sumibi.routing.config import RouterConfig
from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Finished, FinishReason, Grade, Signals
from sumibi.routing.index import BlockIndex
from sumibi.routing.policies import make_policy
from sumibi.routing.policies.base import Ask, least

BLOCK = 64


def candidate(endpoint, **fields):
    """A candidate with zeros for all that is not given."""
    zeros = {field.name: 0 for field in msgspec.structs.fields(Candidate)}
    return Candidate(**(zeros | {"endpoint": endpoint, "grade": Grade.EXACT} | fields))


def keys(name, blocks):
    """Routing keys of a prompt's first blocks: equal for equal names."""
    return [xxh3_64_intdigest(f"{name} {i}".encode()) for i in range(blocks)]


def prompt(**lengths):
    """A prompt in pieces: prompt(system=3, a=2) has three blocks in common with prompt(system=3, b=9)."""
    path, chain = (), []
    for name, blocks in lengths.items():
        path += (name,)
        chain += keys(path, blocks)
    return chain


class Desk:
    """Asks one policy, as a router would."""

    def __init__(self, policy, *endpoints, block=BLOCK, kv_tokens=None, **config):
        self.policy = make_policy(policy, RouterConfig(policy=policy, **config))
        self.block = block
        index = BlockIndex(1000)
        self.endpoints = {name: Endpoint(name, RouterConfig(), index) for name in endpoints}
        for endpoint in self.endpoints.values():
            endpoint.kv_tokens = kv_tokens
        self.t = 0.0
        self.asked = 0

    def scrape(self, endpoint, **signals):
        self.endpoints[endpoint].signals = Signals(t=self.t, scraped_t=self.t, endpoint=endpoint, **signals)

    def scores(self, chain, *, request=None, tokens=None, among=None, matched=None, session="", below=None):
        """Scores by endpoint. `matched`: tokens that the router's own index has, by endpoint; `below`: fields
        of the candidates about what lies below the device.
        """
        self.asked += 1
        self.ask = Ask(
            request=request or f"request-{self.asked}",
            attempt=1,
            number=self.asked - 1,
            t=self.t,
            keys=chain,
            length=len(chain),
            prompt_tokens=len(chain) * self.block if tokens is None else tokens,
            block_tokens=self.block,
            session=session,
            priority=0,
            stream=True,
        )
        names = list(among or self.endpoints)
        found = [
            candidate(name, matched_tokens=(matched or {}).get(name, 0), **(below or {}).get(name, {}))
            for name in names
        ]
        scores = self.policy.choose(self.ask, found, [self.endpoints[name] for name in names])
        return dict(zip(names, scores, strict=True))

    def place(self, chain, on=None, **fields):
        """Ask and place: where the policy wants it, or `on` an endpoint. Returns where."""
        scores = self.scores(chain, **fields)
        names = list(scores)
        on = on or names[least(self.ask.request, list(scores.values()))]
        self.policy.placed(self.ask, self.endpoints[on])
        return on

    def first(self, request):
        self.policy.first_token(request)

    def end(self, request):
        event = Finished(t=self.t, request=request, attempt=1, reason=FinishReason.STOP, answered=True)
        self.policy.ended(request, event)
