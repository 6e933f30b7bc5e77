"""What lies below the devices: which blocks count where, and what they cost, by hand."""

import pytest
from routing_lab import BLOCK, Engine, Lab, prompt

from sumibi.core.kvevents import BlockRemoved, BlockStored, EventBatch
from sumibi.core.latency import LatencyModel
from sumibi.routing.config import RouterConfig
from sumibi.routing.cost import CROWD, EVICT, POWER
from sumibi.routing.events import Grade, Tier
from sumibi.routing.lower import USUAL, Kind

START = LatencyModel(a_s=0.1, b_s=1e-3, q_s=1e-6, d0_s=0.01, d1_s=1e-3, d2_s=1e-6)
OUTPUT = 10
BYTES = 1_000_000
HOST = Tier(name="cpu", tokens=1000 * BLOCK, gb_per_s=2.0, latency_s=0.01)
STORE = Tier(name="pool", shared=True, tokens=1000 * BLOCK, gb_per_s=1.0, latency_s=0.02)


def fetch_s(tier, tokens):
    """Latency, and bytes over bandwidth."""
    return tier.latency_s + tokens * BYTES / (tier.gb_per_s * 1e9)


def made_of(*names, tiers=(HOST,), **fields):
    lab = Lab(latency=START)
    lab.up(*names, tiers=list(tiers), **({"kv_bytes_per_token": BYTES} | fields))
    return lab


class Told:
    """Tells of the cache of an endpoint by KV events: engine hashes are numbers of the caller."""

    def __init__(self, lab, endpoint):
        self.lab, self.endpoint, self.seq = lab, endpoint, 0

    def tell(self, *events):
        self.lab.batch(self.endpoint, EventBatch(seq=self.seq, ts=float(self.seq), events=list(events)))
        self.seq += 1

    def stored(self, first, token_ids, medium, *, parent=None):
        hashes = list(range(first, first + len(token_ids) // BLOCK))
        self.tell(BlockStored(hashes, parent, list(token_ids), BLOCK, medium=medium))


def look(lab, name, token_ids, endpoint="a", **fields):
    """The candidate for a request."""
    lab.ask(name, token_ids, max_tokens=OUTPUT, **fields)
    return lab.candidates(name)[endpoint]


def test_what_is_in_host_memory_is_fetched_and_the_rest_computed():
    lab = made_of("a", has_events=True)
    told = Told(lab, "a")
    p = prompt("p", 40 * BLOCK)
    told.stored(0, p[: 10 * BLOCK], "GPU")
    told.stored(10, p[10 * BLOCK : 30 * BLOCK], "CPU", parent=9)
    c = look(lab, "1", p)
    assert (c.matched_tokens, c.host_tokens, c.disk_tokens, c.store_tokens) == (10 * BLOCK, 20 * BLOCK, 0, 0)
    assert c.reused_tokens == 30 * BLOCK
    assert c.fetch_s == pytest.approx(0.01 + 20 * BLOCK * BYTES / 2e9)
    assert c.compute_s == pytest.approx(START.prefill_s(10 * BLOCK, 30 * BLOCK))
    assert c.ttft_s == pytest.approx(c.fetch_s + c.compute_s)
    assert c.total_s == pytest.approx(c.ttft_s + c.delay_s + c.evict_s + c.balance_s)
    # Nobody else waits for the fetch.
    assert look(lab, "2", prompt("other", 100)).wait_s == pytest.approx(c.compute_s)


def test_a_run_may_go_back_and_forth_and_ends_where_a_block_is_nowhere():
    lab = made_of("a", has_events=True)
    told = Told(lab, "a")
    p = prompt("p", 20 * BLOCK)
    told.stored(0, p, "GPU")
    told.stored(0, p[: 14 * BLOCK], "CPU")
    told.tell(BlockRemoved([*range(4, 8)], medium="GPU"))
    told.tell(BlockRemoved([*range(12, 16)], medium="GPU"))
    # Device 0-3, host 4-7, device 8-11, host 12-13, then 14 and 15 are nowhere.
    c = look(lab, "1", [*p, 1])
    assert (c.matched_tokens, c.host_tokens) == (8 * BLOCK, 6 * BLOCK)


def test_the_fastest_place_that_has_a_block_is_read_and_links_work_beside_one_another():
    disk = Tier(name="storage", gb_per_s=1.0, latency_s=0.5)
    lab = made_of("a", tiers=[disk, HOST], has_events=True)
    told = Told(lab, "a")
    p = prompt("p", 30 * BLOCK)
    told.stored(0, p[: 10 * BLOCK], "cpu")
    told.stored(0, p, "STORAGE")
    c = look(lab, "1", [*p, 1])
    assert (c.host_tokens, c.disk_tokens) == (10 * BLOCK, 20 * BLOCK)
    assert c.fetch_s == pytest.approx(max(fetch_s(HOST, 10 * BLOCK), fetch_s(disk, 20 * BLOCK)))


def test_a_fetch_comes_behind_those_that_were_asked_for_before():
    lab = made_of("a", has_events=True)
    told = Told(lab, "a")
    p, q = prompt("p", 20 * BLOCK), prompt("q", 10 * BLOCK)
    told.stored(0, p, "CPU")
    told.stored(100, q, "CPU")
    first = look(lab, "1", [*p, 1])
    second = look(lab, "2", [*q, 1])
    assert first.fetch_s == pytest.approx(fetch_s(HOST, 20 * BLOCK))
    # It is asked for when the first one is computed: by then part of that transfer is over.
    assert second.wait_s == pytest.approx(first.compute_s)
    left_s = fetch_s(HOST, 20 * BLOCK) - first.compute_s
    assert left_s > 0
    assert second.fetch_s == pytest.approx(left_s + fetch_s(HOST, 10 * BLOCK))


def test_a_tier_that_only_events_tell_of_counts_with_what_is_usual():
    lab = made_of("a", tiers=[], has_events=True, kv_bytes_per_token=None)
    p = prompt("p", 20 * BLOCK)
    Told(lab, "a").stored(0, p, "CPU_TIER1")
    c = look(lab, "1", [*p, 1])
    gb_per_s, latency_s = USUAL[Kind.HOST]
    size_bytes = 20 * BLOCK * RouterConfig().kv_bytes_per_token
    assert c.host_tokens == 20 * BLOCK
    assert c.fetch_s == pytest.approx(latency_s + size_bytes / (gb_per_s * 1e9))
    (tier,) = lab.view("a").tiers
    assert (tier.name, tier.kind, tier.blocks, tier.grade) == ("cpu_tier1", Kind.HOST, 20, Grade.EXACT)


def test_room_that_nobody_told_of_is_endless_beside_a_device_of_known_size():
    """Real vLLM with tiers: it tells how large its device is, and by KV events that there are tiers."""
    lab = made_of("a", tiers=[], has_events=True, kv_tokens=100 * BLOCK)
    told = Told(lab, "a")
    for name in "pqr":
        told.stored(0, prompt(name, 60 * BLOCK), "CPU")
        told.stored(0, prompt(name, 60 * BLOCK), "STORAGE")
    for request, name in enumerate("pqr"):
        c = look(lab, str(request), [*prompt(name, 60 * BLOCK), 1])
        assert c.host_tokens == 60 * BLOCK
        assert 0.0 <= c.evict_s < 1.0, "nothing is lost where there is room"
        lab.finish(str(request))
    lab.up("a", tiers=[], has_events=True, kv_tokens=100 * BLOCK, kv_bytes_per_token=BYTES)
    assert {tier.name for tier in lab.view("a").tiers} == {"cpu", "storage"}


def test_a_suspect_endpoint_has_nothing_below_either():
    lab = made_of("a", "b", has_events=True, has_replay=True, process_start_s=1.0)
    p = prompt("p", 20 * BLOCK)
    Told(lab, "a").stored(0, p, "CPU")
    lab.router._lives.suspect(lab.router._fleet.endpoints["a"], "test", lab.t, ask=False)
    assert look(lab, "1", [*p, 1]).fetched_tokens == 0


# --- without events ---


def test_without_events_what_the_device_gave_up_is_believed_to_be_below():
    lab = made_of("a", tiers=[Tier(name="cpu", tokens=100 * BLOCK)], kv_tokens=100 * BLOCK)
    p, q, r = (prompt(name, 60 * BLOCK) for name in "pqr")
    lab.run("1", p)
    lab.run("2", q)  # 20 blocks of p, its last, make room
    c = look(lab, "3", [*p, 1])
    assert (c.matched_tokens, c.host_tokens) == (40 * BLOCK, 20 * BLOCK)
    lab.first("3")
    lab.finish("3")
    lab.run("4", r)
    assert look(lab, "5", [*q, 1]).reused_tokens == 60 * BLOCK, "180 of 200 blocks"
    (tier,) = lab.view("a").tiers
    assert tier.grade is Grade.APPROXIMATE
    lab.run("6", prompt("s", 60 * BLOCK))
    assert look(lab, "7", [*p, 1]).reused_tokens == 20 * BLOCK, "40 of them are nowhere any more"


# --- stores ---


def test_what_was_computed_anywhere_is_believed_to_be_in_a_store_that_tells_nothing():
    lab = made_of("a", "b", tiers=[STORE])
    p = prompt("p", 30 * BLOCK)
    home = lab.ask("1", p)
    other = "b" if home == "a" else "a"
    assert look(lab, "early", [*p, 1], other).store_tokens == 0, "it is not computed yet"
    lab.finish("early", answered=False)
    lab.first("1")
    lab.finish("1")
    c = look(lab, "2", [*p, 1], other)
    assert c.store_tokens == 30 * BLOCK
    assert c.fetch_s == pytest.approx(fetch_s(STORE, 30 * BLOCK))
    # It lives on when the process that wrote it does not.
    lab.up(home, tiers=[STORE], kv_bytes_per_token=BYTES, process_start_s=1.0)
    lab.up(home, tiers=[STORE], kv_bytes_per_token=BYTES, process_start_s=2.0)
    at_home = look(lab, "3", [*p, 1], home)
    assert (at_home.matched_tokens, at_home.store_tokens) == (0, 30 * BLOCK)
    for view in lab.router.fleet_view():
        (tier,) = view.tiers
        assert (tier.kind, tier.blocks, tier.grade) == (Kind.STORE, 30, Grade.APPROXIMATE)


def test_a_store_forgets_what_was_used_longest_ago():
    small = Tier(name="pool", shared=True, tokens=50 * BLOCK, gb_per_s=1.0, latency_s=0.02)
    lab = made_of("a", "b", tiers=[small], kv_tokens=30 * BLOCK)
    lab.run("1", prompt("p", 30 * BLOCK))
    lab.run("2", prompt("q", 30 * BLOCK))
    found = lab.ask("3", [*prompt("p", 30 * BLOCK), 1]) and lab.candidates("3").values()
    assert sorted(c.store_tokens for c in found) == [0, 20 * BLOCK], "one has it on its device"


def test_a_store_that_events_tell_of_is_what_they_say_for_all_who_read_it():
    lab = made_of("a", "b", tiers=[STORE], has_events=True)
    p = prompt("p", 30 * BLOCK)
    told = Told(lab, "a")
    told.stored(0, p, "POOL")
    Told(lab, "b").tell()
    assert look(lab, "1", [*p, 1], "b").store_tokens == 30 * BLOCK
    told.tell(BlockRemoved([*range(20, 30)], medium="POOL"))
    assert look(lab, "2", [*p, 1], "b").store_tokens == 20 * BLOCK
    (tier,) = lab.view("b").tiers
    assert (tier.blocks, tier.grade) == (20, Grade.EXACT)


def test_the_transfers_of_a_store_are_of_all_who_read_it():
    lab = made_of("a", "b", tiers=[STORE], has_events=True)
    p, q = prompt("p", 30 * BLOCK), prompt("q", 10 * BLOCK)
    told = Told(lab, "a")
    told.stored(0, p, "POOL")
    told.stored(100, q, "POOL")
    lab.ask("1", [*p, 1])
    found = look(lab, "2", [*q, 1], "b" if lab.attempts["1"].endpoint == "a" else "a")
    assert found.wait_s == 0.0
    assert found.fetch_s == pytest.approx(fetch_s(STORE, 30 * BLOCK) + fetch_s(STORE, 10 * BLOCK))


# --- what leaves the device ---


def talk(lab, name, tokens, turns=8):
    """A conversation that came back every 10 s; when its last turn ended."""
    for turn in range(turns):
        lab.run(f"{name} {turn}", prompt(name, tokens + turn * BLOCK))
        ended_t = lab.t
        lab.t += 10.0
    return ended_t


def chance(lab, ended_t, uses=8):
    return lab.router._fleet.models["m"].returns.chance(uses, lab.t - ended_t)


def test_what_goes_to_host_memory_costs_its_fetch_times_the_chance_that_it_is_wanted():
    lab = made_of("a", kv_tokens=100 * BLOCK, has_events=True)
    engine = Engine(100)
    for turn in range(8):
        token_ids = prompt("talk", (80 + turn) * BLOCK)
        lab.run(f"talk {turn}", token_ids)
        engine.run(token_ids)
        lab.batch("a", engine.publish())
        ended_t = lab.t
        lab.t += 10.0
    c = look(lab, "new", prompt("new", 40 * BLOCK))
    # 87 of 100 blocks lie there: 27 blocks and the output have to go, to memory that has room.
    leaves = -(-(40 * BLOCK + OUTPUT - 13 * BLOCK) // BLOCK) * BLOCK
    wanted = chance(lab, ended_t)
    assert 0.0 < wanted < 1.0
    live = 87 * BLOCK * wanted
    crowd = (live + (40 * BLOCK + OUTPUT) / 2) / (1100 * BLOCK)
    work_s = (START.prefill_s(40 * BLOCK) - START.a_s) * lab.view("a").work_factor
    fetched_s = leaves * BYTES / 2e9
    assert c.evict_s == pytest.approx(wanted * fetched_s + work_s * CROWD * crowd**POWER)


def test_what_falls_out_of_a_full_host_memory_is_lost():
    below = Tier(name="cpu", tokens=50 * BLOCK, gb_per_s=1e6, latency_s=0.0)
    lab = made_of("a", tiers=[below], kv_tokens=100 * BLOCK)
    ended_t = talk(lab, "old", 60 * BLOCK)
    lab.run("one", prompt("one", 80 * BLOCK))
    one_t = lab.t
    lab.t += 2.0  # so that the order of victims is as of now
    assert lab.view("a").blocks + lab.view("a").tiers[0].blocks == 67 + 80
    c = look(lab, "new", prompt("new", 10 * BLOCK))
    # 3 of 150 are free: of the oldest conversation's end 8 blocks go, the output's one included.
    wanted, factor = chance(lab, ended_t), lab.view("a").work_factor
    end_s = 8 * BLOCK * (START.b_s + START.q_s * (67 - 8 / 2) * BLOCK)
    one = lab.router._fleet.models["m"].returns.chance(1, lab.t - one_t)
    crowd = ((67 * wanted + 80 * one) * BLOCK + (10 * BLOCK + OUTPUT) / 2) / (150 * BLOCK)
    work_s = START.prefill_s(10 * BLOCK) - START.a_s
    expected_s = (EVICT * end_s * wanted + work_s * CROWD * crowd**POWER) * factor
    assert c.evict_s == pytest.approx(expected_s, rel=1e-3)


def test_what_a_store_has_is_not_lost():
    lab = made_of("a", tiers=[STORE], kv_tokens=100 * BLOCK)
    ended_t = talk(lab, "old", 80 * BLOCK)
    c = look(lab, "new", prompt("new", 40 * BLOCK))
    leaves = -(-(40 * BLOCK + OUTPUT - 13 * BLOCK) // BLOCK) * BLOCK
    lost_s = EVICT * leaves * (START.b_s + START.q_s * (87 * BLOCK - leaves / 2)) * lab.view("a").work_factor
    assert leaves * BYTES / 1e9 < lost_s
    assert c.evict_s == pytest.approx(chance(lab, ended_t) * leaves * BYTES / 1e9)


def test_what_a_queue_will_push_down_is_still_there():
    lab = made_of("a", kv_tokens=100 * BLOCK)
    p = prompt("p", 60 * BLOCK)
    lab.run("1", p)
    lab.ask("queued", prompt("queued", 70 * BLOCK))
    assert look(lab, "2", [*p, 1]).reused_tokens == 60 * BLOCK


# --- stay, move, compute ---


@pytest.mark.parametrize(
    ("gb_per_s", "ahead_blocks", "expected"),
    [(20.0, 0, "a"), (20.0, 40, "b"), (0.05, 40, "a"), (0.05, 200, "b"), (None, 40, "a"), (None, 200, "b")],
)
def test_a_conversation_is_fetched_elsewhere_where_that_is_quicker_than_to_wait(
    gb_per_s, ahead_blocks, expected
):
    """At home are nothing, 0.95 s or 8.4 s to wait for. Elsewhere its 50 blocks of 1.6 MB take 0.004 or 1.6 s
    to fetch, or 1.2 s to compute where there is no store.
    """
    lab = Lab(latency=START)
    tiers = [Tier(name="pool", shared=True, gb_per_s=gb_per_s, latency_s=0.0)] if gb_per_s else []
    fields = {"tiers": tiers, "has_events": True, "kv_bytes_per_token": 100_000}
    lab.up("a", **fields)
    p, told = prompt("p", 50 * BLOCK), Told(lab, "a")
    told.stored(0, p, "GPU")
    if tiers:
        told.stored(0, p, "POOL")
    if ahead_blocks:
        assert lab.ask("ahead", prompt("ahead", ahead_blocks * BLOCK), max_tokens=128) == "a"
    lab.up("b", **fields)
    assert lab.ask("turn", [*p, *prompt("new", BLOCK)], max_tokens=128) == expected


def test_what_an_endpoint_says_later_of_its_tiers_speed_counts_from_then_on():
    lab = made_of("a", tiers=[Tier(name="storage", tokens=1000 * BLOCK)], has_events=True)
    told = Told(lab, "a")
    p, q = prompt("p", 20 * BLOCK), prompt("q", 20 * BLOCK)
    told.stored(0, p, "STORAGE")
    told.stored(100, q, "STORAGE")
    gb_per_s, latency_s = USUAL[Kind.DISK]
    size_bytes = 20 * BLOCK * BYTES
    assert look(lab, "1", [*p, 1]).fetch_s == pytest.approx(latency_s + size_bytes / (gb_per_s * 1e9))
    lab.t += 1000.0
    measured = Tier(name="storage", tokens=1000 * BLOCK, gb_per_s=0.4, latency_s=0.02)
    lab.up("a", tiers=[measured], has_events=True, kv_bytes_per_token=BYTES)
    assert look(lab, "2", [*q, 1]).fetch_s == pytest.approx(0.02 + size_bytes / 0.4e9)
    (tier,) = lab.view("a").tiers
    assert (tier.gb_per_s, tier.latency_s, tier.blocks) == (pytest.approx(0.4), 0.02, 40)
