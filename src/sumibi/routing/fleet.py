"""The endpoints: what each one is, what is known of it, and which of them serve a model.

An endpoint's *life* is one run of its engine process. A new life starts with empty caches and an empty
load; reservations of an earlier one stay in the ledger until their requests end, but no longer weigh on the
endpoint (see `ledger`). Health says whether an endpoint takes requests and nothing else: a flap leaves
load and blocks as they are.

Foreign load is what a scrape shows beyond our own requests. It fades unless it is seen again, and never
replaces our own count: between scrapes, however long, the ledger speaks.
"""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from sumibi.core.keys import DEFAULT_BLOCK_TOKENS
from sumibi.core.latency import LatencyModel
from sumibi.core.prefixcache import PrefixCache
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import EndpointUp, Grade, Role, Signals, Tier
from sumibi.routing.feed import Feed
from sumibi.routing.index import BlockIndex
from sumibi.routing.learning import Hardware, Learner, Transfers
from sumibi.routing.ledger import Load, Owner, inflight_since
from sumibi.routing.lower import Link, Lower, Place, Run, Store, TierView
from sumibi.routing.recall import Recall
from sumibi.routing.recency import Recency
from sumibi.routing.returns import ReturnTimes
from sumibi.routing.source import DEVICE

if TYPE_CHECKING:
    from sumibi.routing.floors import Rows

TYPICAL_PROMPT_TOKENS = 512
"""A foreign request's prompt, until our own requests at the endpoint say what is usual there."""
TYPICAL_RATE = 0.1
"""Rate at which usual prefill times and output lengths follow our own requests."""
BUSY_PERIOD_PREFILLS = 8
"""Prefills in a busy period before it is closed and learnt from, though the endpoint is still busy."""
MOST_CHANGES = 4096
"""That are remembered singly; then whatever depends on them is made anew."""
HISTORY_BLOCKS = 500_000
"""Blocks of a model's latest prompts that are remembered to learn when prefixes return."""
SHARE_HALF_LIFE_S = 1800.0
"""What an endpoint computed counts half after this time in its share of the work."""
SHARE_EPOCH_S = 64 * SHARE_HALF_LIFE_S
"""What endpoints computed is summed as of times this far apart."""
SMALLEST_BLOCK_TOKENS = 16
"""Engines with smaller blocks (pages of 1 token, say) get routing blocks of several, to bound the index."""


_TRUST = (Grade.NONE, Grade.APPROXIMATE, Grade.EXACT)
"""The lowest first."""


class Changes:
    """What happened to endpoints."""

    __slots__ = ("count", "latest", "log")

    def __init__(self) -> None:
        self.count = 0
        """Changes that a `Roster` depends on."""
        self.latest: Rows | None = None
        """What the latest decision went by, of a large fleet."""
        self.log: list[Endpoint] = []
        """Those whose load, learnt model or order of victims changed since `count` did."""

    def touch(self, endpoint: "Endpoint") -> None:
        """Note a change that no roster depends on."""
        self.log.append(endpoint)
        if len(self.log) > MOST_CHANGES:
            self.count_up()

    def count_up(self) -> None:
        """Note one that rosters depend on."""
        self.count += 1
        self.log.clear()
        self.latest = None

    def settle(self, t: float) -> None:
        """Have the next decision find all of this done: what changed is at hand now, and may not be then."""
        if self.latest is not None:
            self.latest.refresh(t)


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


class Endpoint:
    """One engine replica (one rank of it)."""

    __slots__ = (
        "_changes",
        "_half_life_s",
        "_index",
        "_links",
        "_most_below_blocks",
        "_suspect",
        "_unreachable_t",
        "_up",
        "busy",
        "dispatched",
        "emitted_grade",
        "epoch",
        "feed",
        "foreign_running",
        "foreign_t",
        "foreign_waiting",
        "grade",
        "has_events",
        "has_foreign",
        "holders",
        "kv_tokens",
        "learner",
        "load",
        "lower",
        "max_sequences",
        "models",
        "name",
        "process_start_s",
        "recall",
        "recency",
        "revision",
        "role",
        "settled_s",
        "signals",
        "stores",
        "tiers",
        "transfers",
        "typical_prefill_s",
        "worked_s",
        "worked_t",
    )

    def __init__(
        self, name: str, config: RouterConfig, index: BlockIndex, changes: Changes | None = None
    ) -> None:
        self.name = name
        self._changes = changes or Changes()
        self.models: list[str] = []
        self._up = False
        self.epoch = 1
        """Lives seen, this one included."""
        self._suspect: str | None = None
        self._unreachable_t: float | None = None
        self.grade = Grade.APPROXIMATE
        self.emitted_grade: Grade | None = None
        self.has_events = False
        """Its KV events arrive at present."""
        self.kv_tokens: int | None = None
        self.max_sequences: int | None = None
        self.tiers: list[Tier] = []
        """Below its device, as it said itself."""
        self.lower: Lower | None = None
        """What is known to be below its device; None: nothing."""
        self._links: dict[str, Link] = {}
        """Of tiers of its own, by name."""
        self.stores: dict[str, Store] = {}
        """Those that it reads, by name."""
        self.process_start_s: float | None = None
        self.role = Role.BOTH
        self.revision = ""
        self.transfers = Transfers(config.link, config.kv_bytes_per_token)
        self.dispatched = 0
        self.load = Load(self.touch)
        self.busy = BusyPeriod()
        self.recall = Recall(index, config.recall_blocks, config.max_lower_tier_blocks)
        self.feed: Feed | None = None
        """What its KV events said; stays if they stop for a while."""
        self.recency = Recency(config.recall_blocks)
        self.worked_s = self.worked_t = 0.0
        """Prefill work placed here, fading, as of `worked_t`: by the start's coefficients, times its own
        speed."""
        self.settled_s = 0.0
        """The same of what was new in its prompt, each by that part."""
        self.holders = 1 << self.recall.holder
        """Bit set of the holders in the index whose blocks spare a prefill here."""
        self.signals: Signals | None = None
        self.foreign_running = self.foreign_waiting = self.foreign_t = 0.0
        self.has_foreign = False
        self.learn_from(config.latency, Hardware(config.latency))
        self._half_life_s = config.foreign_half_life_s
        self._index = index
        self._most_below_blocks = config.max_lower_tier_blocks

    @property
    def up(self) -> bool:
        """Whether it takes requests."""
        return self._up

    @up.setter
    def up(self, up: bool) -> None:
        self._up = up
        self._changes.count_up()

    @property
    def suspect(self) -> str | None:
        """Why its blocks are not trusted at present."""
        return self._suspect

    @suspect.setter
    def suspect(self, why: str | None) -> None:
        self._suspect = why
        self._changes.count_up()

    @property
    def unreachable_t(self) -> float | None:
        """When it last refused or broke a connection, if nothing was heard of it since."""
        return self._unreachable_t

    @unreachable_t.setter
    def unreachable_t(self, t: float | None) -> None:
        if t != self._unreachable_t:
            self._unreachable_t = t
            self._changes.count_up()

    def learn_from(self, start: LatencyModel, shared: Hardware) -> None:
        """Begin to learn its latency model: from `start`, together with those that have the same start."""
        self.learner = Learner(start, shared)
        self._changes.count_up()
        self.typical_prefill_s = start.prefill_s(TYPICAL_PROMPT_TOKENS)

    def resident_blocks(self) -> int:
        """Blocks believed to be in its device cache."""
        counts = self._index.counts
        known = counts[self.recall.holder]
        if self.feed is not None:
            return known + counts[self.feed.device]
        lower = self.lower
        return known if lower is None or lower.front is None else min(known, lower.front.blocks)

    def worked(self, start_work_s: float, new: float, t: float) -> None:
        """A prefill of so much work, by the start's coefficients, was placed here; the part `new` of the
        prompt was computed.
        """
        fade, work_s = faded_s(1.0, t - self.worked_t), start_work_s * self.learner.own
        self.worked_s = self.worked_s * fade + work_s
        self.settled_s = self.settled_s * fade + work_s * new
        self.worked_t = t
        self.touch()

    def worked_lately_s(self, t: float) -> float:
        """Prefill work that was placed here, the last half-hour counting most, by the start's coefficients
        and its own speed: times the hardware's factor it is in seconds.

        Of a `t` before the last placement: what the same work would have counted then.
        """
        return faded_s(self.worked_s, t - self.worked_t)

    def settled_lately_s(self, t: float) -> float:
        """The same of what settled here."""
        return faded_s(self.settled_s, t - self.worked_t)

    def order_victims(self, t: float, block_tokens: int, returns: ReturnTimes) -> None:
        """Have its `recency` as of now."""
        self.recency.refresh(
            t, latency=self.learner.start, block_tokens=block_tokens, returns=returns, resident=self._has
        )

    def overfull(self, block_tokens: int) -> bool:
        """Whether the prefills that were sent there will evict something before they are computed, so that
        it is nowhere below either.

        Not where lower tiers, which nobody tells of, seem to keep what the device evicts.
        """
        tokens, lower = self.load.prefill_tokens, self.lower
        if not tokens or self.kv_tokens is None or self.recall.below_blocks:
            return False
        if lower is not None:
            return not lower.stores and self.kept_tokens(block_tokens) + tokens > self.room_tokens()
        return self.resident_blocks() * block_tokens + tokens > self.kv_tokens

    def room_tokens(self) -> float:
        """Of its device, and of its own tiers below."""
        return (self.kv_tokens or 0) + (self.lower.own_tokens if self.lower is not None else 0)

    def kept_tokens(self, block_tokens: int) -> int:
        """Tokens in them."""
        return (self.resident_blocks() + self.below_blocks()) * block_tokens

    def below_blocks(self) -> int:
        """Blocks believed to be in its own tiers below the device."""
        feed, counts = self.feed, self._index.counts
        if feed is None:
            return max(0, counts[self.recall.holder] - self.resident_blocks())
        return sum([counts[holder] for holder in feed.tiers.values() if holder != feed.device])

    def touch(self) -> None:
        """Its load, learnt model or order of victims changed."""
        self._changes.touch(self)

    def moved_away(self, keys: Sequence[int]) -> None:
        """A conversation that lived here goes on elsewhere."""
        self.recency.moved_away(keys)
        self.touch()

    def lasting(self, blocks: int, keys: Sequence[int], block_tokens: int) -> int:
        """How many of the first `blocks` of a prompt, all of them there, a full engine will not have lost
        when it comes to this prompt.
        """
        if blocks and self.load.prefill_tokens and self.overfull(block_tokens):
            return min(blocks, self.recency.reach(keys))
        return blocks

    def _has(self, key: int) -> bool:
        index, feed = self._index, self.feed
        if self.lower is not None and feed is not None:
            held = 1 << self.recall.holder | sum([1 << holder for holder in feed.tiers.values()])
            return bool(index.holders_of(key) & held)
        return index.holds(self.recall.holder, key) or (feed is not None and index.holds(feed.device, key))

    def read_tiers(self, tiers: Sequence[Tier], stores: dict[str, Store], block_tokens: int) -> None:
        """It says that these are below its device; `stores` are the shared ones among them, by name."""
        self.tiers, self.stores = list(tiers), stores
        self.see_tiers(block_tokens)

    def see_tiers(self, block_tokens: int) -> None:
        """Have `lower` as of what it said itself and what its KV events have told of."""
        feed = self.feed
        told = {} if feed is None else feed.tiers
        if feed is not None:
            feed.stores = self.stores
        tiers = [*self.tiers]
        known = {tier.name for tier in tiers}
        tiers += [Tier(name=name) for name in told if name != DEVICE and name not in known]
        places = []
        for tier in tiers:
            store = self.stores.get(tier.name)
            if store is not None:
                holders, link = store.holders, store.link
            else:
                holders = 1 << told[tier.name] if tier.name in told else 0
                link = self._links.setdefault(tier.name, Link())
            places.append(Place(tier, self.transfers.bytes_per_token, holders, link, store))
        before, self.lower = self.lower, Lower(places) if places else None
        if before is None and self.lower is None:
            return
        device = self.kv_tokens // block_tokens if self.kv_tokens else 0
        if device and self.lower is not None:
            own = self.lower.own_tokens
            below = int(min(own // block_tokens, self._most_below_blocks))
            if feed is None and self.lower.own is not None:
                kept = before.front if before is not None else None
                self.lower.front = kept or PrefixCache(device)
                self.lower.front.capacity = device
            self.recall.device_blocks = max(1, device + (below if feed is None else 0))
            self.recency.limit(max(1, device + below))
        self._changes.count_up()

    def run(self, keys: Sequence[int], path: list[tuple[int, int]], device: int) -> Run:
        """How far it has a prompt, and where: `device` leading blocks on the device. `path`: the index's."""
        lower = self.lower
        if lower is None or self.suspect is not None:
            return [(device, None)] if device else []
        return lower.run(keys, path, device, self.holders)

    def view_tiers(self) -> list[TierView]:
        """What is known of each tier."""
        counts, feed = self._index.counts, self.feed
        seen = []
        for place in self.lower.places if self.lower is not None else ():
            store = place.store
            told = store.announced if store is not None else feed is not None and place.name in feed.tiers
            if store is not None:
                blocks = counts[store.told] + counts[store.recall.holder]
            elif feed is not None:
                blocks = counts[feed.tiers[place.name]] if told else 0
            else:
                blocks = self.below_blocks() if self.lower is not None and place is self.lower.own else 0
            seen.append(
                TierView(
                    name=place.name,
                    kind=place.kind,
                    blocks=blocks,
                    tokens=None if place.tokens == inf else int(place.tokens),
                    gb_per_s=self.transfers.bytes_per_token / place.token_s / 1e9,
                    grade=self.grade if told else min(self.grade, Grade.APPROXIMATE, key=_TRUST.index),
                )
            )
        return seen

    def attach(self, feed: Feed) -> None:
        """Its KV events are followed from now on."""
        if self.feed is not None:
            self.feed.close()
        self.feed = feed
        feed.stores = self.stores
        self.holders = 1 << self.recall.holder | 1 << feed.device
        self._changes.count_up()

    def judge(self) -> tuple[Grade, str]:
        """How well its cache is known now, and why."""
        if self.suspect is not None:
            return Grade.NONE, self.suspect
        if self.feed is None or not self.has_events:
            return Grade.APPROXIMATE, "it publishes no KV events, or they do not arrive"
        gap = self.feed.gap
        return (Grade.APPROXIMATE, gap) if gap else (Grade.EXACT, "its KV events are complete")

    def observe_load(self, signals: Signals) -> None:
        """Take a scrape: what it shows beyond our own requests is foreign."""
        self.signals = signals
        running, waiting = signals.running or 0, signals.waiting or 0
        foreign = max(0, running + waiting - inflight_since(self.load, signals.scraped_t))
        self.foreign_waiting = float(min(foreign, waiting))
        self.foreign_running = foreign - self.foreign_waiting
        self.foreign_t = signals.scraped_t
        self.has_foreign = foreign > 0

    def foreign(self, t: float) -> tuple[float, float]:
        """Foreign requests (running, waiting) as far as the last scrape still counts at `t`."""
        fade = 0.5 ** ((t - self.foreign_t) / self._half_life_s)
        return self.foreign_running * fade, self.foreign_waiting * fade

    def prefill_left_s(self, t: float, last: Owner | None = None) -> float:
        """Seconds until the prefills reserved here are computed: all of them, or those up to `last`'s.

        The first one counts less the longer it has been worked on; one that has overrun its prediction by
        x is expected to take another x, so an endpoint that hangs looks worse by the second.
        """
        load = self.load
        if not load.prefills:
            return 0.0
        fixed_s = self.learner.start.a_s * self.learner.fixed_factor
        prefills, work_ns = len(load.prefills), load.prefill_work_ns
        if last is not None:
            ahead = list(load.prefills)
            ahead = ahead[: ahead.index(last) + 1]
            prefills, work_ns = len(ahead), sum(load.prefills[owner].work_ns for owner in ahead)
        total_s = prefills * fixed_s + work_ns * 1e-9 * self.learner.work_factor
        head = next(iter(load.prefills.values()))
        head_s = fixed_s + head.work_ns * 1e-9 * self.learner.work_factor
        elapsed_s = t - load.head_since_t
        overrun_s = elapsed_s - head_s
        if overrun_s <= 0:
            return total_s - elapsed_s
        return total_s - head_s + (overrun_s if head.streamed else 0.0)

    def begins_in_s(self, t: float) -> float:
        """Seconds until it can begin with another prefill, a place in its batch being free."""
        wait_s = self.foreign(t)[1] * self.typical_prefill_s if self.has_foreign else 0.0
        return wait_s + self.prefill_left_s(t)

    def new_life(self) -> None:
        """Another process serves here now: its caches are empty and none of our requests are in it."""
        self.epoch += 1
        self.load = Load(self.touch)
        self.touch()
        self.busy.reset(None)
        self.foreign_running = self.foreign_waiting = 0.0
        self.has_foreign = False
        self.recall.clear()
        self.recency.clear()
        self._links.clear()
        if self.lower is not None and self.lower.front is not None:
            self.lower.front.clear()
        if self.feed is not None:
            self.feed.forget()


class Model:
    """A model (or adapter) name and the endpoints that serve it."""

    __slots__ = (
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
        self.output_tokens = 128.0
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

    def candidates(self, model: str, excluded: str | None = None) -> list[Endpoint]:
        """Endpoints that may take a request for `model` now, in the order in which they joined: the whole of
        it, or all but its prompt.

        One that just refused or broke a connection is passed over as long as there is another. The list
        stays as it is.
        """
        if excluded is None:
            return self._roster(model).endpoints
        return self._candidates(model, excluded)

    def prefillers(self, model: str, excluded: str | None = None) -> list[Endpoint]:
        """Endpoints that may compute a prompt for another one now; none that cannot be reached. The list
        stays as it is.
        """
        if model not in self.apart:
            return []
        if excluded is None:
            return self.prefill_roster(model, None).endpoints
        return self._prefillers(model, excluded)

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
            roster = Roster(self._candidates(model, None), self._changes)
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

    def _candidates(self, model: str, excluded: str | None) -> list[Endpoint]:
        known = self.models.get(model)
        if known is None:
            return []
        up = [
            e for e in known.endpoints.values() if e.up and e.role is not Role.PREFILL and e.name != excluded
        ]
        reachable = [e for e in up if e.unreachable_t is None]
        return reachable or up

    def _unserve(self, model: str, endpoint: Endpoint) -> None:
        self.models[model].endpoints.pop(endpoint.name, None)


def faded_s(worked_s: float, for_s: float) -> float:
    """What work counts after so many seconds."""
    fade: float = 0.5 ** (for_s / SHARE_HALF_LIFE_S)
    return worked_s * fade


def share_epoch_t(t: float) -> float:
    """A time not after `t`, and the same for a long while: all work counts half at the same pace, so sums as
    of then need no renewal as time goes on.
    """
    return t // SHARE_EPOCH_S * SHARE_EPOCH_S


def _routing_block(engine_block_tokens: int) -> int:
    """The smallest multiple of the engine's block that is not too small for the index."""
    return engine_block_tokens * -(-SMALLEST_BLOCK_TOKENS // engine_block_tokens)
