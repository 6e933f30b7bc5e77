"""What is loaded and stored for an engine's requests: the rules of its connector interface, by hand."""

import time
from array import array
from dataclasses import dataclass, field

import pytest

from sumibi.tiers import StoreTier, Tier
from sumibi.tiers.connector.asker import StoreAsker
from sumibi.tiers.connector.book import Told
from sumibi.tiers.connector.messages import Change, Hello, Report
from sumibi.tiers.connector.names import content_id
from sumibi.tiers.connector.planner import Planner

B = 4
HELLO = Report(hello=Hello("an engine", 100))


@dataclass
class Prompt:
    request_id: str
    num_tokens: int
    block_hashes: list = field(default_factory=list)

    def __post_init__(self):
        self.block_hashes += [b"%31d" % i for i in range(self.num_tokens // B)]


def describe(prompt, index):
    return Told(prompt.block_hashes[index], prompt.block_hashes[index - 1] if index else None, array("I"))


def ids(prompt, version=b""):
    return [content_id(block_hash, version) for block_hash in prompt.block_hashes]


def below(names, tier=Tier.HOST):
    return Report(changes=[Change(True, name, tier) for name in names])


def table(request_id):
    return list(range(100, 200))


@pytest.fixture
def planner():
    planner = Planner(B, describe, None)
    planner.reported(HELLO)
    return planner


def test_at_least_one_token_is_left_to_compute(planner):
    for tokens, offered in ((12, 8), (13, 12), (3, 0)):
        prompt = Prompt(f"of {tokens}", tokens)
        planner.reported(below(ids(prompt)))
        planner.arrived(prompt, b"")
        assert planner.offer(prompt, 0) == offered


def test_only_what_follows_the_device_s_hit_is_offered_and_loaded(planner):
    prompt = Prompt("one", 22)
    names = ids(prompt)
    planner.reported(below(names[1:4]))
    planner.arrived(prompt, b"")
    assert planner.offer(prompt, 0) == 0
    assert planner.offer(prompt, 4) == 12
    assert planner.offer(prompt, 4) == 12, "asking changes nothing"
    planner.allocated(prompt, [7, 8, 9, 10, 11, 12], 12)
    assert planner.loading("one") == [Tier.HOST] * 3
    orders = planner.orders([], table)
    assert orders.idle
    assert [(load.content_ids, load.blocks) for load in orders.loads] == [(names[1:4], [8, 9, 10])]
    assert planner.orders([], table).loads == [], "once"


def test_the_caller_s_count_says_what_is_loaded(planner):
    prompt = Prompt("one", 22)
    planner.reported(below(ids(prompt)))
    planner.arrived(prompt, b"")
    planner.offer(prompt, 0)
    planner.allocated(prompt, [7, 8, 9, 10, 11, 12], 0)  # another connector's turn
    assert planner.orders([], table).loads == []


def test_blocks_are_stored_in_the_step_that_fills_them(planner):
    prompt = Prompt("one", 22)
    names = ids(prompt)
    planner.arrived(prompt, b"")
    planner.offer(prompt, 0)
    planner.allocated(prompt, [], 0)
    saves = planner.orders([("one", 10)], table).saves
    assert [(save.content_id, save.parent, save.block) for save in saves] == [
        (names[0], None, 100),
        (names[1], names[0], 101),
    ]
    assert planner.orders([("one", 11)], table).saves == []
    assert [save.block for save in planner.orders([("one", 22)], table).saves] == [102, 103, 104]
    # The next block is full in the step after its last token was sampled, and its hash is known then.
    prompt.num_tokens = 24
    assert planner.orders([("one", 24)], table).saves == [], "its hash is not known yet"
    prompt.block_hashes.append(b"%31d" % 5)
    assert [save.block for save in planner.orders([("one", 25)], table).saves] == [105]


def test_what_lies_below_is_not_stored_again_and_what_was_lost_is(planner):
    prompt = Prompt("one", 12)
    names = ids(prompt)
    planner.reported(below(names[:2]))
    planner.arrived(prompt, b"")
    planner.offer(prompt, 0)
    planner.allocated(prompt, [], 8)
    planner.reported(Report(missing=[names[1]]))
    # The engine computes from the missing block on.
    assert planner.offer(prompt, 0) == 4
    planner.allocated(prompt, [], 4)
    assert [save.block for save in planner.orders([("one", 12)], table).saves] == [101, 102]


def test_nothing_is_answered_before_the_worker_has_said_what_it_has():
    planner = Planner(B, describe, None)
    prompt = Prompt("one", 22)
    planner.arrived(prompt, b"")
    assert planner.offer(prompt, 0) is None
    planner.reported(HELLO)
    assert planner.offer(prompt, 0) == 0


def test_a_clear_makes_all_of_it_other_blocks(planner):
    prompt = Prompt("one", 22)
    planner.reported(below(ids(prompt)))
    planner.arrived(prompt, b"")
    assert planner.offer(prompt, 0) == 20
    planner.clear()
    assert planner.offer(prompt, 0) == 0
    planner.reported(below(ids(prompt)))  # said before the worker knew
    assert planner.offer(prompt, 0) == 0
    # What it had computed by then is of the old weights; what it computes after a new start is not.
    assert planner.orders([("one", 22)], table).saves == []
    planner.allocated(prompt, [], 0)
    orders = planner.orders([("one", 22)], table)
    assert len(orders.saves) == 5
    assert not {save.content_id for save in orders.saves} & set(ids(prompt))
    assert [save.content_id for save in orders.saves] == ids(prompt, orders.generation)
    assert planner.unsettled
    planner.reported(Report(orders.generation))
    assert not planner.unsettled


def test_adapters_of_one_name_and_hash_are_kept_apart(planner):
    one, other = Prompt("one", 22), Prompt("other", 22)
    planner.reported(below(ids(one, b"first version")))
    planner.arrived(one, b"first version")
    planner.arrived(other, b"second version")
    assert planner.offer(one, 0) == 20
    assert planner.offer(other, 0) == 0


def test_an_idle_engine_is_kept_awake_until_writes_are_done(planner):
    assert not planner.unsettled
    planner.reported(Report(writing=3))
    assert planner.unsettled
    planner.reported(Report(writing=0))
    assert not planner.unsettled


def test_requests_that_are_over_are_forgotten(planner):
    prompt = Prompt("one", 22)
    planner.arrived(prompt, b"")
    planner.ended("one")
    planner.ended("one")
    assert planner.offer(prompt, 0) == 0
    assert planner.orders([("one", 22)], table).saves == []


class TestStore:
    """What other engines put into a shared directory."""

    @pytest.fixture
    def shared(self, make, tmp_path):
        """Tiers of another engine that writes there, and a planner that asks there."""
        store = StoreTier(str(tmp_path), 1 << 20, timeout_s=2.0)
        tiers = make(store=store, block_bytes=100, namespace="an engine")
        planner = Planner(B, describe, lambda hello: StoreAsker(store, hello))
        planner.reported(HELLO)
        yield tiers, planner
        planner.close()

    def offered(self, planner, prompt, computed=0):
        until_s = time.monotonic() + 5
        while (tokens := planner.offer(prompt, computed)) is None:
            assert time.monotonic() < until_s
            time.sleep(0.002)
        return tokens

    def put(self, tiers, names):
        parents = [None, *names[:-1]]
        assert tiers.store([(n, p, bytes(100)) for n, p in zip(names, parents, strict=True)]) == len(names)
        assert tiers.flush(5)

    def test_what_another_engine_wrote_is_found(self, shared):
        tiers, planner = shared
        prompt = Prompt("one", 22)
        self.put(tiers, ids(prompt)[:3])
        planner.arrived(prompt, b"")
        assert self.offered(planner, prompt) == 12
        planner.allocated(prompt, list(range(6)), 12)
        assert planner.loading("one") == [Tier.STORE] * 3
        assert len(planner.book.take_events()) == 3, "announced, now that its tokens are known"

    def test_it_continues_what_lies_nearer(self, shared):
        tiers, planner = shared
        prompt = Prompt("one", 22)
        self.put(tiers, ids(prompt))
        planner.reported(below(ids(prompt)[:2], Tier.DISK))
        planner.arrived(prompt, b"")
        assert self.offered(planner, prompt) == 20
        assert self.offered(planner, prompt, computed=12) == 8

    def test_a_store_of_another_namespace_has_nothing(self, make, tmp_path, shared):
        _, planner = shared
        prompt = Prompt("one", 22)
        store = StoreTier(str(tmp_path), 1 << 20)
        self.put(make(store=store, block_bytes=100, namespace="other weights"), ids(prompt))
        planner.arrived(prompt, b"")
        assert self.offered(planner, prompt) == 0
