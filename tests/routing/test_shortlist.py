"""A fleet too large to be priced as a whole: the same picks as if it were."""

from random import Random

import pytest
from routing_lab import BLOCK, MODEL, Lab, prompt

from sumibi.core.latency import LatencyModel
from sumibi.routing import changes, fleet, placing, recency
from sumibi.routing.cost import company_s, price
from sumibi.routing.events import Dispatch, Signals, Tier
from sumibi.routing.floors import ROUNDING, Floors, rows
from sumibi.routing.spread import spread_over

NAMES = [str(i) for i in range(24)]
FAST = LatencyModel(a_s=0.02, b_s=2e-4, q_s=1e-7, d0_s=0.01, d1_s=1e-3, d2_s=1e-6)
TIERS = [
    Tier(name="cpu", tokens=6000, gb_per_s=1.0, latency_s=0.01),
    Tier(name="pool", shared=True, tokens=30_000, gb_per_s=0.5),
]
SLOW = LatencyModel(a_s=0.1, b_s=1e-3, q_s=1e-6, d0_s=0.02, d1_s=2e-3, d2_s=2e-6)


class Traffic:
    """Agents' turns, forks and one-shot prompts, priorities, adapters' worth of foreign load, full batches,
    restarts, refusals and held requests, on two kinds of hardware that turn out slower than thought."""

    def __init__(self, seed, tiers=()):
        self.random = Random(seed)
        self.lab = Lab(check=False)
        self.seed = seed
        self.under_way = []
        self.picks = []
        for i, name in enumerate(NAMES):
            latency = SLOW if i % 3 == 0 else FAST
            self.lab.up(name, kv_tokens=3000, max_sequences=4, latency=latency, tiers=list(tiers))
        self.usage = {"output_tokens": 20} if tiers else {"output_tokens": 20, "cached_tokens": 0}
        self.sessions = [prompt(("agent", i % 3), 10 * BLOCK) + prompt(i, 5 * BLOCK) for i in range(30)]

    def place(self, instructions):
        for each in instructions:
            if isinstance(each, Dispatch):
                self.lab.dispatched(each.request)
                self.under_way.append([each.request, False])
                self.picks.append((each.request, each.endpoint))

    def step(self, number):
        random, lab = self.random, self.lab
        which = random.randrange(len(self.sessions))
        tokens = self.sessions[which] + prompt((self.seed, number), random.choice((3, 20, 80)))
        if len(tokens) > 60 * BLOCK:
            tokens = tokens[: 15 * BLOCK]
        self.sessions[which] = tokens
        lab.t += random.choice((0.0, 0.02, 0.3))
        fields = {"priority": random.choice((0, 0, 1)), "max_tokens": random.choice((5, 50))}
        self.place(lab.arrive(str(number), tokens, **fields))
        while len(self.under_way) > 60 or (self.under_way and random.random() < 0.5):
            request = self.under_way[random.randrange(len(self.under_way))]
            if not request[1]:
                lab.first(request[0], dt=0.01)
                request[1] = True
            else:
                self.under_way.remove(request)
                self.place(lab.finish(request[0], dt=0.01, **self.usage))
        name = random.choice(NAMES)
        if random.random() < 0.05:
            self.place(lab.tell(Signals, endpoint=name, scraped_t=lab.t, running=9, waiting=3))
        if random.random() < 0.02:
            self.place(lab.tell(Signals, endpoint=name, scraped_t=lab.t, process_start_s=1.0 + number))


def always_fresh(monkeypatch):
    """Orders of victims are renewed whenever they are asked for, so it does not matter who asked before."""
    monkeypatch.setattr(recency, "FRESH_S", -1.0)
    monkeypatch.setattr(placing, "FRESH_S", -1.0)
    monkeypatch.setattr(placing, "STALE_S", -1.0)
    monkeypatch.setattr(placing, "MOST_ORDERED", 0)
    monkeypatch.setattr(changes, "MOST_CHANGES", 100)
    monkeypatch.setattr(fleet, "UNSEEN_OUTPUT_TOKENS", 20.0)  # the traffic's answers


@pytest.mark.interpreted
@pytest.mark.parametrize(("seed", "tiers"), [(0, ()), (1, ()), (2, ()), (0, TIERS), (1, TIERS)])
def test_the_pick_is_that_among_all(seed, tiers, monkeypatch):
    always_fresh(monkeypatch)
    picks, priced = [], []
    for many in (len(NAMES), 1):
        monkeypatch.setattr(placing, "MANY", many)
        traffic = Traffic(seed, tiers)
        for number in range(300):
            traffic.step(number)
        traffic.lab.router.check_integrity()
        picks.append(traffic.picks)
        decisions = traffic.lab.router.decisions(1000)
        picks[-1] += [d.picked for d in decisions]
        priced.append([len(d.candidates) for d in decisions])
    assert picks[0] == picks[1]
    assert len({candidate.endpoint for candidate in picks[0][-200:]}) > 12
    assert set(priced[0]) == {len(NAMES)}
    # A store makes endpoints more alike.
    assert sum(priced[1]) < sum(priced[0]) * (0.75 if tiers else 0.7)
    fetched = [d.picked.host_tokens > 0 or d.picked.store_tokens > 0 for d in decisions]
    assert sum(fetched) > 50 if tiers else not any(fetched)


@pytest.mark.parametrize(("seed", "tiers"), [(0, ()), (1, ()), (0, TIERS)])
def test_a_bound_is_never_above_the_price_and_near_it_where_nothing_is_evicted(seed, tiers, monkeypatch):
    always_fresh(monkeypatch)
    traffic, near = Traffic(seed, tiers), []
    for number in range(200):
        traffic.step(number)
        lab = traffic.lab
        if number % 10:
            continue
        lab.router.check_integrity()
        returns = lab.router._fleet.models[MODEL].returns
        endpoints = lab.router._fleet.candidates(MODEL)
        roster = lab.router._fleet.roster(MODEL, endpoints)
        for endpoint in endpoints:
            endpoint.order_victims(lab.t, BLOCK, returns)
        for priority in (0, 1):
            known = rows(roster, priority, lab.t)
            even = known.spread(lab.t)
            floors = Floors(
                known,
                lab.t,
                prompt_tokens=200,
                output_tokens=30.0,
                spread=even,
                company_s=company_s(even.inflight + 1.0, 0.7),
            )
            for place, endpoint in enumerate(endpoints):
                bound_s = floors.at(place, 0)
                ((near_s, _),) = [near for near in floors.near(bound_s, 0) if near[1] == place]
                assert near_s <= bound_s * (1 + ROUNDING)
                candidate = price(
                    endpoint,
                    lab.t,
                    prompt_tokens=200,
                    matched_tokens=0,
                    pending_tokens=0,
                    pending_s=0.0,
                    output_tokens=30.0,
                    block_tokens=BLOCK,
                    spread=spread_over(roster, lab.t),
                    followed=0.7,
                    priority=priority,
                )
                assert bound_s <= candidate.total_s * (1 + ROUNDING)
                near.append(bound_s / candidate.total_s)
    assert len(near) > 500
    assert max(near) > 0.85


def test_a_conversation_s_next_turn_is_priced_at_few_and_says_so():
    lab = Lab(check=False)
    lab.up(*NAMES)
    for i in range(len(NAMES)):
        lab.ask(str(i), prompt(i, 50 * BLOCK))
    for i in range(len(NAMES)):
        lab.first(str(i), dt=0.1)
    assert lab.ask("next", [*prompt(5, 50 * BLOCK), 1]) == lab.attempts["5"].endpoint
    (decision,) = lab.router.decisions(1)
    assert len(decision.candidates) <= 3
    assert len(decision.candidates) + decision.left_out == len(NAMES)
