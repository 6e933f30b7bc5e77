"""All endpoints and models: which endpoints serve a model, and which of them may take a request now."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from sumibi.core.keys import DEFAULT_BLOCK_TOKENS
from sumibi.core.latency import LatencyModel
from sumibi.routing.changes import Changes
from sumibi.routing.config import RouterConfig
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import EndpointUp, Role
from sumibi.routing.index import BlockIndex
from sumibi.routing.learning import Hardware
from sumibi.routing.ledger import Load
from sumibi.routing.lower import Store
from sumibi.routing.returns import ReturnTimes

if TYPE_CHECKING:
    from sumibi.routing.floors import Rows

HISTORY_BLOCKS: Final = 500_000
"""Blocks of a model's latest prompts that are remembered to learn when prefixes return."""
SMALLEST_BLOCK_TOKENS: Final = 16
"""Engines with smaller blocks (pages of 1 token, say) get routing blocks of several, to bound the index."""

UNSEEN_OUTPUT_TOKENS: Final = 1000.0
"""What a request is expected to generate before any is over. Long answers are seen last: taken for short ones
meanwhile, prompts that stay for good would be placed as if nobody decoded beside them for long."""


class Model:
    """A model (or adapter) name and the endpoints that serve it."""

    __slots__ = (
        "answers",
        "block_tokens",
        "decisions",
        "endpoints",
        "key_name",
        "name",
        "output_tokens",
        "returns",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.key_name = name
        """Under which its prompts are hashed: of a model with several names always the same one."""
        self.block_tokens: int | None = None
        """Tokens of a routing block; None until an endpoint has named its own."""
        self.endpoints: dict[str, Endpoint] = {}
        self.decisions = 0
        self.answers = 0
        """Whole answers whose length was told."""
        self.output_tokens = UNSEEN_OUTPUT_TOKENS
        """Tokens that a request is expected to generate: a running mean."""
        self.returns = ReturnTimes(HISTORY_BLOCKS)
        """After how long its prompts' prefixes are wanted again."""


class Roster:
    """Endpoints that a request may go to, and what follows from who they are."""

    __slots__ = (
        "at",
        "changes",
        "endpoints",
        "groups",
        "has_lower",
        "holders",
        "places",
        "rows",
        "trusted",
    )

    def __init__(self, endpoints: list[Endpoint], changes: Changes) -> None:
        self.endpoints = endpoints
        self.changes = changes
        self.rows: dict[int, Rows] = {}
        """By priority, see `floors`."""
        self.at = {endpoint: place for place, endpoint in enumerate(endpoints)}
        self.holders = [endpoint.holders for endpoint in endpoints]
        self.has_lower = any(endpoint.lower is not None for endpoint in endpoints)
        """Some have tiers below their devices."""
        self.trusted = 0
        """Holders (a bit set) whose blocks count: not those of suspects."""
        self.places: dict[int, int] = {}
        """Holder -> place of its endpoint."""
        self.groups: dict[Hardware, list[int]] = {}
        """Places of those that learn together."""
        for place, endpoint in enumerate(endpoints):
            self.groups.setdefault(endpoint.learner.shared, []).append(place)
            own = endpoint.holders
            if endpoint.suspect is None:
                self.trusted |= own
            while own:
                holder = own.bit_length() - 1
                self.places[holder] = place
                own ^= 1 << holder


class Fleet:
    """All endpoints and models."""

    def __init__(self, config: RouterConfig, index: BlockIndex) -> None:
        self._config = config
        self._index = index
        self._hardware: dict[LatencyModel, Hardware] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.models: dict[str, Model] = {}
        self.stores: dict[str, Store] = {}
        """Those that any endpoint ever read, by name."""
        self._changes = Changes()
        self._rosters: dict[str, Roster] = {}
        """By model, as of the change `_rosters_as_of`."""
        self._prefill_rosters: dict[str, Roster] = {}
        self._rosters_as_of = 0
        self.apart: set[str] = set()
        """Models of endpoints that have a role: only there pairs are made."""

    def block_tokens(self, model: str) -> int:
        """Tokens of a routing block of `model`: the first endpoint that names its block size fixes it."""
        known = self.models.get(model)
        return (known.block_tokens if known else None) or DEFAULT_BLOCK_TOKENS

    def tokens_of(self, endpoint: Endpoint) -> int:
        """Tokens of a routing block of its models."""
        return self.block_tokens(endpoint.models[0] if endpoint.models else "")

    def key_name(self, model: str) -> str:
        """The name under which prompts for `model` are hashed."""
        known = self.models.get(model)
        return known.key_name if known else model

    def upsert(self, event: EndpointUp) -> Endpoint:
        """The endpoint that `event` tells of, with its fields taken over."""
        self._changes.count_up()
        endpoint = self.endpoints.get(event.endpoint)
        latency = event.latency or self._config.latency
        if endpoint is None:
            endpoint = Endpoint(event.endpoint, self._config, self._index, self._changes)
            self.endpoints[event.endpoint] = endpoint
            endpoint.learn_from(latency, self._hardware.setdefault(latency, Hardware(latency)))
        elif endpoint.learner.start != latency:
            endpoint.learn_from(latency, self._hardware.setdefault(latency, Hardware(latency)))
        endpoint.kv_tokens, endpoint.max_sequences = event.kv_tokens, event.max_sequences
        endpoint.role, endpoint.revision = event.role, event.revision
        endpoint.prefetches = event.prefetches
        endpoint.transfers.know(
            event.link or self._config.link, event.kv_bytes_per_token or self._config.kv_bytes_per_token
        )
        left = {self.key_name(name) for name in endpoint.models}
        for name in endpoint.models:
            if name not in event.models:
                self._unserve(name, endpoint)
        endpoint.models = list(event.models)
        self._see_roles()
        self._name(event.aliases)
        left.difference_update(self.key_name(name) for name in endpoint.models)
        if left:
            # One that comes back may have other weights, as an adapter that is loaded anew.
            endpoint.recall.forget(left)
            for store in endpoint.stores.values():
                store.recall.forget(left)
        for name in endpoint.models:
            model = self.models.setdefault(name, Model(name))
            model.endpoints[endpoint.name] = endpoint
            if model.block_tokens is None and event.engine_block_tokens:
                model.block_tokens = _routing_block(event.engine_block_tokens)
        if endpoint.kv_tokens and endpoint.models:
            tokens = self.block_tokens(endpoint.models[0])
            endpoint.recall.device_blocks = max(1, endpoint.kv_tokens // tokens)
            endpoint.recency.limit(endpoint.recall.device_blocks)
        if event.tiers or endpoint.lower is not None:
            self._tiers(endpoint, event)
        return endpoint

    def _tiers(self, endpoint: Endpoint, event: EndpointUp) -> None:
        """Take over what it says of its tiers."""
        block_tokens = self.block_tokens(event.models[0] if event.models else "")
        most = self._config.max_lower_tier_blocks
        for tier in event.tiers:
            if tier.shared and tier.name not in self.stores:
                blocks = most if tier.tokens is None else min(most, tier.tokens // block_tokens)
                self.stores[tier.name] = Store(tier.name, self._index, max(1, blocks))
        stores = {tier.name: self.stores[tier.name] for tier in event.tiers if tier.shared}
        endpoint.read_tiers(event.tiers, stores, block_tokens)

    def _name(self, aliases: list[str]) -> None:
        """Let all names of one model go by the key name of the one known first, with its block size.

        A name that is known already keeps what it has: keys of its prompts are in use.
        """
        known = next((self.models[name] for name in aliases if name in self.models), None)
        for name in aliases:
            if name not in self.models:
                model = self.models[name] = Model(name)
                known = known or model
                model.key_name, model.block_tokens = known.key_name, known.block_tokens

    def remove(self, endpoint: Endpoint) -> None:
        """Forget it altogether. Models stay known, with their block size and usual output."""
        self._changes.count_up()
        for name in endpoint.models:
            self._unserve(name, endpoint)
        endpoint.recall.close()
        if endpoint.feed is not None:
            endpoint.feed.close()
        endpoint.load = Load()
        del self.endpoints[endpoint.name]
        self._see_roles()

    def _see_roles(self) -> None:
        with_role = (e for e in self.endpoints.values() if e.role is not Role.BOTH)
        self.apart = {name for e in with_role for name in e.models}

    def candidates(
        self, model: str, excluded: str | None = None, only: Sequence[str] | None = None
    ) -> list[Endpoint]:
        """Endpoints that may take a request for `model` now, in the order in which they joined: the whole of
        it, or all but its prompt; of those in `only`, if that is given.

        One that just refused or broke a connection is passed over as long as there is another. The list
        stays as it is.
        """
        if excluded is None and only is None:
            return self._roster(model).endpoints
        return self._candidates(model, excluded, only)

    def prefillers(
        self, model: str, excluded: str | None = None, only: Sequence[str] | None = None
    ) -> list[Endpoint]:
        """Endpoints that may compute a prompt for another one now; none that cannot be reached. The list
        stays as it is.
        """
        if model not in self.apart:
            return []
        if excluded is None and only is None:
            return self.prefill_roster(model, None).endpoints
        return _among(self._prefillers(model, excluded), only)

    def settle(self, t: float) -> None:
        """An event was taken: see to what changed."""
        self._changes.settle(t)

    def prefill_roster(self, model: str, endpoints: list[Endpoint] | None) -> Roster:
        """Of these `prefillers` for `model`; None: of all."""
        self._forget_old_rosters()
        roster = self._prefill_rosters.get(model)
        if roster is None:
            roster = Roster(self._prefillers(model, None), self._changes)
            if model in self.models:
                self._prefill_rosters[model] = roster
        if endpoints is None or roster.endpoints is endpoints:
            return roster
        return Roster(endpoints, self._changes)

    def roster(self, model: str, endpoints: list[Endpoint]) -> Roster:
        """Of these `candidates` for `model`."""
        known = self._roster(model)
        return known if known.endpoints is endpoints else Roster(endpoints, self._changes)

    def _roster(self, model: str) -> Roster:
        self._forget_old_rosters()
        roster = self._rosters.get(model)
        if roster is None:
            roster = Roster(self._candidates(model, None, None), self._changes)
            if model in self.models:
                self._rosters[model] = roster
        return roster

    def _forget_old_rosters(self) -> None:
        if self._rosters_as_of != self._changes.count:
            self._rosters.clear()
            self._prefill_rosters.clear()
            self._rosters_as_of = self._changes.count

    def _prefillers(self, model: str, excluded: str | None) -> list[Endpoint]:
        known = self.models.get(model)
        if known is None:
            return []
        return [
            e
            for e in known.endpoints.values()
            if e.up and e.unreachable_t is None and e.role is not Role.DECODE and e.name != excluded
        ]

    def _candidates(self, model: str, excluded: str | None, only: Sequence[str] | None) -> list[Endpoint]:
        known = self.models.get(model)
        if known is None:
            return []
        up = [
            e for e in known.endpoints.values() if e.up and e.role is not Role.PREFILL and e.name != excluded
        ]
        up = _among(up, only)
        reachable = [e for e in up if e.unreachable_t is None]
        return reachable or up

    def _unserve(self, model: str, endpoint: Endpoint) -> None:
        self.models[model].endpoints.pop(endpoint.name, None)


def _among(endpoints: list[Endpoint], only: Sequence[str] | None) -> list[Endpoint]:
    """Those of them that `only` names; None: all."""
    if only is None:
        return endpoints
    names = frozenset(only)
    return [e for e in endpoints if e.name in names]


def _routing_block(engine_block_tokens: int) -> int:
    """The smallest multiple of the engine's block that is not too small for the index."""
    return engine_block_tokens * -(-SMALLEST_BLOCK_TOKENS // engine_block_tokens)
