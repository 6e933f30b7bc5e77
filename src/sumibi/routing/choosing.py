"""What the policy picks for a request: a whole run at one endpoint, or a pair of two.

Joins `placing` (what each endpoint has of the prompt, and what it would cost there), `disagg` (pairs of
endpoints) and the policy, which scores what these found. Nothing is changed here but the policies' own notes.
"""

from collections.abc import Mapping
from typing import NamedTuple

from sumibi.routing import disagg
from sumibi.routing.computing import Computing
from sumibi.routing.config import RouterConfig
from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Arrived
from sumibi.routing.fleet import Fleet, Model, Roster
from sumibi.routing.index import BlockIndex
from sumibi.routing.levels import Levels
from sumibi.routing.placing import NOTHING_AHEAD, Looked, candidates, matchable_blocks
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


class _Asked(NamedTuple):
    """A prompt to be placed."""

    event: Arrived
    model: Model
    block_tokens: int
    t: float


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
        asked = _Asked(event, model, block_tokens, t)
        policy = self.policy(event.model)
        roster = self._fleet.roster(event.model, endpoints)
        some, found, levels = self._look(asked, roster, ahead_s, model.output_tokens, policy.priced)
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
            paired = self._pair(asked, policy, whole, prefillers, decoders or endpoints, ahead_s)
            if paired is not None:
                return paired
        scores = policy.choose(ask, found, some)
        pick = least(event.request, scores)
        if not policy.priced:
            # What is predicted of the pick is recorded beside what came, under any policy.
            alone = self._fleet.roster(event.model, [some[pick]])
            found[pick] = self._look(asked, alone, NOTHING_AHEAD, model.output_tokens).candidates[0]
        return Choice(ask, some, found, roster, levels, scores, pick)

    def _look(
        self,
        asked: "_Asked",
        roster: Roster,
        ahead_s: Mapping[str, float],
        output_tokens: float,
        priced: bool = True,
    ) -> Looked:
        """What the endpoints of a roster have of a prompt, and what it would cost there."""
        return candidates(
            asked.event,
            roster,
            asked.t,
            block_tokens=asked.block_tokens,
            output_tokens=output_tokens,
            returns=asked.model.returns,
            index=self._index,
            computing=self._computing,
            ahead_s=ahead_s,
            priced=priced,
        )

    def _pair(
        self,
        asked: "_Asked",
        policy: Policy,
        whole: Choice,
        prefillers: list[Endpoint],
        decoders: list[Endpoint],
        ahead_s: Mapping[str, float],
    ) -> Choice | None:
        """What the policy picks of pairs and of whole runs; None: nobody can be paired."""
        event, ask = asked.event, whole.ask
        model, output_tokens = event.model, asked.model.output_tokens
        decode, prefill = self._fleet.roster(model, decoders), self._fleet.prefill_roster(model, prefillers)
        there = self._look(asked, decode, NOTHING_AHEAD, output_tokens, False)
        legs = self._look(asked, prefill, ahead_s, 1.0, policy.priced)
        sides = Sides(prefill, legs, decode, there)
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
        begins = self._fleet.prefill_roster(model, [choice.begins])
        leg = self._look(asked, begins, NOTHING_AHEAD, 1.0)
        alone = self._fleet.roster(model, [some[choice.pick]])
        local = self._look(asked, alone, NOTHING_AHEAD, asked.model.output_tokens, False)
        _, priced = disagg.pairs(leg, local, ask.t, ask, output_tokens)
        found[choice.pick : choice.pick + len(priced)] = priced
        return choice
