"""One endpoint: what it is, what it has, what it has to do, and how fast it is believed to be.

An endpoint's *life* is one run of its engine process. A new life starts with empty caches and an empty
load; reservations of an earlier one stay in the ledger until their requests end, but no longer weigh on the
endpoint (see `ledger`). Health says whether an endpoint takes requests and nothing else: a flap leaves
load and blocks as they are.

Foreign load is what a scrape shows beyond our own requests. It fades unless it is seen again, and never
replaces our own count: between scrapes, however long, the ledger speaks.

When a life ends, or is doubted, is for `lives` to say.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from sumibi.core.latency import LatencyModel
from sumibi.core.prefixcache import PrefixCache
from sumibi.routing.busy import BusyPeriod
from sumibi.routing.changes import Changes
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import Grade, Role, Signals, Tier
from sumibi.routing.fading import faded_s
from sumibi.routing.feed import Feed
from sumibi.routing.index import BlockIndex
from sumibi.routing.kvblocks import DEVICE
from sumibi.routing.learning import Hardware, Learner, Transfers
from sumibi.routing.ledger import Load, Owner, inflight_since
from sumibi.routing.lower import Link, Lower, Place, Run, Store, TierView
from sumibi.routing.pace import Pace
from sumibi.routing.recall import Recall
from sumibi.routing.recency import Recency
from sumibi.routing.returns import ReturnTimes

TYPICAL_PROMPT_TOKENS: Final = 512
"""A foreign request's prompt, until our own requests at the endpoint say what is usual there."""
TYPICAL_RATE: Final = 0.1
"""Rate at which usual prefill times and output lengths follow our own requests."""
_TRUST = (Grade.NONE, Grade.APPROXIMATE, Grade.EXACT)
"""The lowest first."""


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
        "arrivals",
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
        "prefetches",
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
        self.prefetches = False
        """It brings KV up when it is told to."""
        self.role = Role.BOTH
        self.revision = ""
        self.transfers = Transfers(config.link, config.kv_bytes_per_token)
        self.dispatched = 0
        self.arrivals = Pace()
        """Of requests that decode here."""
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
            # Its own tiers may have endless room, so no whole division: that of infinity is no number.
            below = int(min(self.lower.own_tokens / block_tokens, self._most_below_blocks))
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
                    latency_s=place.latency_s,
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
        fixed_s = self.learner.a_s * self.learner.fixed_factor
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
