"""What the policy picks for a request: a whole run at one endpoint, or a pair of two.

Joins `placing` (what each endpoint has of the prompt, and what it would cost there), `disagg` (pairs of
endpoints) and the policy, which scores what these found. Nothing is changed here but the policies' own notes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from sumibi.routing import disagg
from sumibi.routing.computing import Computing
from sumibi.routing.config import RouterConfig
from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Arrived
from sumibi.routing.fleet import Fleet, Roster
from sumibi.routing.index import BlockIndex
from sumibi.routing.levels import Levels
from sumibi.routing.placing import Looked, candidates, matchable_blocks
from sumibi.routing.policies import Ask, Policy, least, make_policy
from sumibi.routing.requests import Request

NOBODY: list[Endpoint] = []


class Sides(NamedTuple):
    """What both sides of pairs have of a prompt."""

    prefill: Roster
    legs: Looked
    """Their candidates, priced if the policy prices."""
    decode: Roster
    there: Looked


class Choice(NamedTuple):
    """What a policy picked."""

    ask: Ask
    endpoints: list[Endpoint]
    found: list[Candidate]
    """Theirs."""
    roster: Roster
    """Of all endpoints that were asked about."""
    levels: Levels
    """How far the prompt is known at those."""
    scores: list[float]
    pick: int
    sides: Sides | None = None
    """Where pairs are possible."""

    @property
    def leg(self) -> tuple[Endpoint, Candidate] | None:
        """Where the prompt is computed, of a pair."""
        name = self.picked.prefill
        if not name or self.sides is None:
            return None
        legs = self.sides.legs
        return next((e, c) for e, c in zip(legs.endpoints, legs.candidates, strict=True) if e.name == name)

    @property
    def begins(self) -> Endpoint:
        """Where the request goes first."""
        leg = self.leg
        return leg[0] if leg is not None else self.endpoints[self.pick]

    @property
    def picked(self) -> Candidate:
        """The chosen candidate."""
        return self.found[self.pick]


class Choosing:
    """The policies of all models, and what they are asked about."""

    def __init__(self, config: RouterConfig, fleet: Fleet, index: BlockIndex, computing: Computing) -> None:
        self._config = config
        self._fleet = fleet
        self._index = index
        self._computing = computing
        self._policies: dict[str, Policy] = {}
        """By model, made with its first request."""
        make_policy(config.policy, config)  # a name that there is none of is told at once

    def policy(self, model: str) -> Policy:
        """The one that requests for `model` are placed by."""
        policy = self._policies.get(model)
        if policy is None:
            policy = self._policies[model] = make_policy(self._config.policy, self._config)
        return policy

    def gone(self, endpoint: str) -> None:
        """It was removed for good."""
        for policy in self._policies.values():
            policy.gone(endpoint)

    def choose(
        self,
        request: Request,
        endpoints: list[Endpoint],
        t: float,
        ahead_s: Mapping[str, float],
        prefillers: list[Endpoint] = NOBODY,
        decoders: list[Endpoint] | None = None,
    ) -> Choice:
        """What the policy picks at `t`, `ahead_s` seconds of held work going first: a whole run at one of
        `endpoints`, or a prefill at one of `prefillers` and the rest at one of `decoders` (None: of
        `endpoints`).
        """
        event = request.event
        self._computing.expire(t)
        model = self._fleet.models[event.model]
        block_tokens = self._fleet.block_tokens(event.model)
        look = partial(
            candidates,
            event,
            t=t,
            block_tokens=block_tokens,
            output_tokens=model.output_tokens,
            returns=model.returns,
            index=self._index,
            computing=self._computing,
        )
        policy = self.policy(event.model)
        roster = self._fleet.roster(event.model, endpoints)
        some, found, levels = look(roster=roster, priced=policy.priced, ahead_s=ahead_s)
        number = request.attempt.number + 1 if request.attempt is not None else 1
        ask = Ask(
            request=event.request,
            attempt=number,
            number=model.decisions,
            t=t,
            keys=event.keys,
            length=matchable_blocks(event, block_tokens),
            prompt_tokens=event.prompt_tokens,
            block_tokens=block_tokens,
            session=event.session,
            priority=event.priority,
            stream=event.stream,
        )
        if prefillers:
            whole = Choice(ask, some, found, roster, levels, [], 0)
            paired = self._pair(event, policy, look, whole, prefillers, decoders or endpoints, ahead_s)
            if paired is not None:
                return paired
        scores = policy.choose(ask, found, some)
        pick = least(event.request, scores)
        if not policy.priced:
            # What is predicted of the pick is recorded beside what came, under any policy.
            found[pick] = look(roster=self._fleet.roster(event.model, [some[pick]])).candidates[0]
        return Choice(ask, some, found, roster, levels, scores, pick)

    def _pair(
        self,
        event: Arrived,
        policy: Policy,
        look: Callable[..., Looked],
        whole: Choice,
        prefillers: list[Endpoint],
        decoders: list[Endpoint],
        ahead_s: Mapping[str, float],
    ) -> Choice | None:
        """What the policy picks of pairs and of whole runs; None: nobody can be paired."""
        model, ask = event.model, whole.ask
        decode, prefill = self._fleet.roster(model, decoders), self._fleet.prefill_roster(model, prefillers)
        there = look(roster=decode, priced=False)
        legs = look(roster=prefill, output_tokens=1.0, ahead_s=ahead_s, priced=policy.priced)
        sides = Sides(prefill, legs, decode, there)
        output_tokens = self._fleet.models[model].output_tokens
        if event.max_tokens is not None:
            output_tokens = min(output_tokens, event.max_tokens)
        if policy.priced:
            some, found = disagg.pairs(legs, there, ask.t, ask, output_tokens)
            if not some:
                return None
            some, found = [*whole.endpoints, *some], [*whole.found, *found]
            scores = policy.choose(ask, found, some)
            pick = least(ask.request, scores)
            return Choice(ask, some, found, whole.roster, whole.levels, scores, pick, sides)
        some, found, scores = disagg.blind(policy, ask, legs, there)
        if not some:
            return None
        pick = least(ask.request, scores)
        choice = Choice(ask, some, found, whole.roster, whole.levels, scores, pick, sides)
        # As of whole runs, what is predicted of the pick is recorded.
        leg = look(roster=self._fleet.prefill_roster(model, [choice.begins]), output_tokens=1.0)
        local = look(roster=self._fleet.roster(model, [some[choice.pick]]), priced=False)
        _, priced = disagg.pairs(leg, local, ask.t, ask, output_tokens)
        found[choice.pick : choice.pick + len(priced)] = priced
        return choice
