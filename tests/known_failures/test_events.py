"""F19-F28, F30, F33: what KV events tell, and what happens when they do not."""

import msgspec
import pytest
from routing_lab import BLOCK, Engine, Lab, keys_of, prompt

from sumibi.core.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode_batch
from sumibi.routing.events import (
    AskReplay,
    EndpointSuspect,
    FinishReason,
    Grade,
    GradeChanged,
    ReplayEnded,
    Signals,
    Tick,
)

P1, P2 = prompt("one", 5 * BLOCK), prompt("two", 3 * BLOCK)
FULL, GROUP = {"kv_cache_spec_kind": "full_attention"}, {"medium": "GPU", "group_idx": 0}


def following(engine=None, *, replay=False, name="e", **fields):
    """A lab with one endpoint whose events are followed; with replay, what the engine published is known."""
    lab = Lab()
    lab.up(name, has_events=True, has_replay=replay, **fields)
    if replay and engine is not None:
        lab.replay(name, engine, 0)
    return lab


def matched(lab, token_ids, endpoint="e", model="m"):
    """Tokens of a prompt that a decision now would count as cached."""
    name = f"probe{len(lab.router.decisions(1000))}"
    lab.arrive(name, [*token_ids, 1], model=model)
    tokens = lab.candidates(name)[endpoint].matched_tokens
    lab.finish(name, FinishReason.CLIENT_GONE)
    return tokens


def publish(lab, engine, token_ids, endpoint="e"):
    engine.run(token_ids)
    return lab.batch(endpoint, engine.publish())


def tell(lab, seq, *events, endpoint="e"):
    return lab.batch(endpoint, EventBatch(seq=seq, ts=float(seq), events=list(events)))


def stored(hashes, token_ids, *, parent=None, **fields):
    return BlockStored(list(hashes), parent, list(token_ids), BLOCK, **fields)


def asked(instructions):
    return [i.from_seq for i in instructions if isinstance(i, AskReplay)]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("told_by", ["sequence", "process start"])
def test_f19_a_restart_leaves_no_phantom_blocks(replay, told_by):
    """R#2853: without a replay socket the sequence is ignored, so an engine that begins anew at 0 keeps the
    blocks of the process before it.
    """
    old, new = Engine(20), Engine(20, process=1)
    lab = following(old, replay=replay, process_start_s=1.0)
    for i in range(3):
        publish(lab, old, prompt(i, 2 * BLOCK))
    assert matched(lab, prompt(0, 2 * BLOCK)) == 2 * BLOCK
    if told_by == "process start":
        lab.tell(Signals, endpoint="e", scraped_t=lab.t, process_start_s=2.0)
        assert [matched(lab, prompt(i, 2 * BLOCK)) for i in range(3)] == [0, 0, 0]
        assert lab.view("e").epoch == 2
    publish(lab, new, P2)
    if replay:
        lab.replay("e", new, 0)
    assert [matched(lab, prompt(i, 2 * BLOCK)) for i in range(3)] == [0, 0, 0]
    assert matched(lab, P2) == len(P2)
    assert (lab.view("e").epoch, lab.view("e").grade) == (2, Grade.EXACT)


def test_f20_a_router_that_restarts_recovers_whole_chains():
    """KV#372: after a restart of the router, blocks whose parents were stored before are dropped."""
    engine = Engine(200)
    before = following(engine, replay=True)
    for turn in range(1, 9):
        publish(before, engine, [*prompt("agent", 4 * turn * BLOCK), 1])
    assert matched(before, prompt("agent", 32 * BLOCK)) == 32 * BLOCK

    after = Lab()
    assert asked(after.up("e", has_events=True, has_replay=True)) == [0]
    # A live batch comes before anything is replayed: a child of parents that are not known yet.
    publish(after, engine, [*prompt("agent", 40 * BLOCK), 1])
    after.replay("e", engine, 0)
    assert matched(after, prompt("agent", 40 * BLOCK)) == 40 * BLOCK
    assert after.router.counters().orphans_dropped == 0
    assert after.view("e").grade is Grade.EXACT


def test_f20_children_that_come_before_their_parents_are_kept():
    """The same without replay, parents last."""
    lab = following()
    tell(lab, 7, stored([4, 5], P1[3 * BLOCK :], parent=3))
    tell(lab, 8, stored([3], P1[2 * BLOCK : 3 * BLOCK], parent=2))
    assert matched(lab, P1) == 0
    tell(lab, 9, stored([1, 2], P1[: 2 * BLOCK]))
    assert matched(lab, P1) == 5 * BLOCK


def test_f21_a_cleared_cache_matches_nothing():
    """KV#593: AllBlocksCleared is ignored."""
    engine = Engine(20)
    lab = following(engine)
    for p in (P1, P2):
        publish(lab, engine, p)
    lab.ask("running", P1)
    lab.first("running")
    engine.clear()
    lab.batch("e", engine.publish())
    lab.finish("running")
    lab.tell(Tick, dt=10.0)
    assert (matched(lab, P1), matched(lab, P2), lab.view("e").blocks) == (0, 0, 0)


def test_f22_duplicates_and_early_removes_are_counted_per_tier_and_group():
    """KV#680, vllm#55092: a block that is held twice goes with the first of its removes."""
    lab = following()
    one = P1[:BLOCK]
    tell(lab, 0, stored([1], one, **GROUP, **FULL), stored([1], one, **GROUP, **FULL))
    tell(lab, 1, BlockRemoved([1], **GROUP))
    assert matched(lab, one) == BLOCK  # the second copy
    tell(lab, 2, BlockRemoved([1], **GROUP))
    assert matched(lab, one) == 0
    tell(lab, 3, BlockRemoved([1], **GROUP), stored([1], one, **GROUP, **FULL))
    assert matched(lab, one) == BLOCK  # the early remove counted for nothing
    tell(lab, 4, stored([1], one, medium="CPU", group_idx=0, **FULL), BlockRemoved([1], medium="CPU"))
    assert matched(lab, one) == BLOCK  # another tier's
    tell(lab, 5, BlockRemoved([1], medium="GPU", group_idx=1))
    assert matched(lab, one) == BLOCK  # another group's


OTHER_KINDS = [
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "chunked_local_attention",
    "encoder_only_attention",
    "cross_attention",
]


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_f23_only_full_attention_proves_residency(kind):
    """R#2362, KV#336, AMD-AGI/Infera#98: groups of other kinds count as held; 24.7 % were really reused, and
    their blocks poison the chain of the full group.
    """
    lab = following()
    other = {"medium": "GPU", "group_idx": 1, "kv_cache_spec_kind": kind}
    # The window group's blocks are other hashes in other places, and its stores come first.
    tell(lab, 0, stored([11, 12, 13], P1[: 3 * BLOCK], **other))
    assert matched(lab, P1) == 0
    tell(lab, 1, stored([1, 2], P1[: 2 * BLOCK], **GROUP, **FULL))
    assert matched(lab, P1) == 2 * BLOCK
    tell(lab, 2, stored([14], P1[3 * BLOCK : 4 * BLOCK], parent=13, **other))
    tell(lab, 3, BlockRemoved([11, 12, 1], medium="GPU", group_idx=1))
    assert matched(lab, P1) == 2 * BLOCK
    tell(lab, 4, stored([3, 4], P1[2 * BLOCK : 4 * BLOCK], parent=2, **GROUP, **FULL))
    assert matched(lab, P1) == 4 * BLOCK
    assert lab.view("e").blocks == 4


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_f23_the_kinds_of_full_attention_count(kind):
    """The other half of the rule."""
    lab = following()
    tell(lab, 0, stored([1, 2], P1[: 2 * BLOCK], medium="GPU", group_idx=0, kv_cache_spec_kind=kind))
    assert matched(lab, P1) == 2 * BLOCK


def test_f24_two_ranks_of_one_engine_are_told_apart():
    """R#2229, R#2379, R#2936, KV#357: the rank is dropped, so the blocks of one rank count for all."""
    lab = Lab()
    ranks = ["http://pod:8000#0", "http://pod:8000#1"]
    lab.up(*ranks, has_events=True)
    blocks = stored([1, 2, 3], P2)
    lab.batch(ranks[1], EventBatch(seq=0, ts=0.0, events=[blocks], rank=1))
    assert (matched(lab, P2, ranks[0]), matched(lab, P2, ranks[1])) == (0, 3 * BLOCK)
    assert lab.ask("r", [*P2, 1]) == ranks[1]
    # The same hashes and the same numbers at the other rank are its own.
    lab.batch(ranks[0], EventBatch(seq=0, ts=0.0, events=[stored([1], P1[:BLOCK])], rank=0))
    lab.batch(ranks[0], EventBatch(seq=1, ts=0.0, events=[AllBlocksCleared()], rank=0))
    assert (matched(lab, P1, ranks[0]), matched(lab, P2, ranks[1])) == (0, 3 * BLOCK)


def test_f26_arrays_maps_and_unknown_events_in_one_batch_all_count():
    """vllm#42892, R#2944, dyn#14530: the encoding changes from arrays to maps and whole batches are lost
    without a word; a map in the adapter's slot is taken for an adapter.
    """
    later = {"spec": "later", "locality": {"x": 1}}
    as_map = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": P1[:BLOCK],
        "block_size": BLOCK,
        **later,
    }
    as_array = ["BlockStored", [2], 1, P1[BLOCK : 2 * BLOCK], BLOCK]
    long_array = [
        "BlockStored",
        [3],
        2,
        P1[2 * BLOCK : 3 * BLOCK],
        *(BLOCK, None, "GPU", None, None, 0, "full_attention", None, "a slot of next year"),
    ]
    unknown = [{"type": "BlockWarmed", "block_hashes": [9]}, ["BlockWarmed", [9]]]
    events = [as_map, unknown[0], as_array, unknown[1], long_array]
    for whole in ([1.0, events, 0], [1.0, events], {"ts": 1.0, "events": events, "data_parallel_rank": 0}):
        lab = following()
        lab.batch("e", decode_batch(0, msgspec.msgpack.encode(whole)))
        assert matched(lab, P1) == 3 * BLOCK
    batch = decode_batch(0, msgspec.msgpack.encode([1.0, events, 0]))
    assert (len(batch.events), batch.skipped) == (3, 2)
    lab = following()
    slots = [1, "x", None, {"cache_salt": "tenant"}]
    salted = ["BlockStored", [1, 2, 3], None, P2, BLOCK, None, "GPU", slots[3]]
    lab.batch("e", decode_batch(0, msgspec.msgpack.encode([1.0, [salted], 0])))
    assert matched(lab, P2) == 0
    lab.arrive("salted", [*P2, 1], keys=keys_of(P2, salt="tenant"))
    assert lab.candidates("salted")["e"].matched_tokens == 3 * BLOCK


def host_blocks(lab):
    """Blocks believed to be in the host memory of `e`."""
    feed = lab.router._fleet.endpoints["e"].feed
    return lab.router._index.counts[feed.tiers["cpu"]]


def test_f28_a_tier_that_never_reports_removals_does_not_grow_for_ever():
    """lmc#5076: a host tier publishes stores and never removes, so it is believed to have everything."""
    lab = Lab(check=False, max_lower_tier_blocks=256)
    lab.up("e", has_events=True)
    for i in range(100):
        tell(lab, i, stored(range(8 * i, 8 * i + 8), prompt(i, 8 * BLOCK), medium="CPU"))
        assert host_blocks(lab) <= 256
    index, feed = lab.router._index, lab.router._fleet.endpoints["e"].feed
    newest, oldest = keys_of(prompt(99, 8 * BLOCK)), keys_of(prompt(0, 8 * BLOCK))
    assert all(index.holds(feed.tiers["cpu"], key) for key in newest)
    assert not any(index.holds(feed.tiers["cpu"], key) for key in oldest)
    assert lab.router.counters().index_blocks_now == host_blocks(lab)
    assert matched(lab, prompt(99, 8 * BLOCK)) == 0  # the host's blocks are no device hits


def test_f28_nor_by_events_that_are_long_beside_the_limit():
    """The same, 8 blocks an event and room for 64."""
    lab = Lab(check=False, max_lower_tier_blocks=64)
    lab.up("e", has_events=True)
    for i in range(40):
        tell(lab, i, stored(range(8 * i, 8 * i + 8), prompt(i, 8 * BLOCK), medium="CPU"))
    assert host_blocks(lab) <= 64


def test_f30_what_is_known_of_a_cache_is_graded_and_every_change_is_told():
    """NVIDIA/TensorRT-LLM#14882, AMD-AGI/Infera#143, dyn#12095: the exact index falls back in silence; 90 %
    hits instead of 96, 462 of 528 blocks hashed to nothing, a publisher that was off.
    """
    told = []

    def note(instructions):
        told.extend((i.grade, i.cause) for i in instructions if isinstance(i, GradeChanged))

    engine, lab = Engine(30), Lab()
    note(lab.up("e", has_events=False))  # the publisher is off
    assert told[-1][0] is Grade.APPROXIMATE
    assert "no KV events" in told[-1][1]
    note(lab.up("e", has_events=True))
    note(publish(lab, engine, P1))
    assert told[-1][0] is Grade.EXACT
    engine.run(P2)
    engine.publish()  # lost
    note(publish(lab, engine, prompt("three", BLOCK)))
    assert told[-1][0] is Grade.APPROXIMATE
    assert "between 0 and 2 were missed" in told[-1][1]
    note(lab.tell(EndpointSuspect, endpoint="e", cause="its KV event stream broke"))
    assert told[-1] == (Grade.NONE, "its KV event stream broke")
    assert lab.view("e").grade is Grade.NONE
    assert [grade for grade, _ in told] == [Grade.APPROXIMATE, Grade.EXACT, Grade.APPROXIMATE, Grade.NONE]


def test_f30_blocks_that_hash_to_nothing_are_counted():
    """462 of 528: events that name blocks without tokens, of parents and hashes that nobody knows."""
    lab = following()
    tell(lab, 0, BlockStored(list(range(100, 562)), None, [], 0, medium="CPU"))
    tell(lab, 1, stored(range(66), prompt("known", 66 * BLOCK)))
    counters = lab.router.counters()
    assert (counters.skipped_events, lab.view("e").blocks) == (462, 66)


def test_f33_a_restarted_router_learns_a_long_history_within_bounds():
    """dyn#10580, dyn#4904: 2.28 million events are dumped at once and a restarted frontend takes 45 s, or
    never learns the workers again until these are restarted.
    """
    engine = Engine(64)
    for i in range(400):  # most of it was evicted since
        engine.run(prompt(i, 4 * BLOCK))
        engine.publish()
    lab = Lab(check=False, max_buffered_batches=10)
    assert asked(lab.up("e", has_events=True, has_replay=True)) == [0]
    for i in range(400, 425):  # it works on while it replays
        publish(lab, engine, prompt(i, 4 * BLOCK))
        assert len(lab.router._fleet.endpoints["e"].feed.sequence._held) <= 10
    assert lab.router.counters().batches_dropped == 20
    again = lab.replay("e", engine, 0)
    assert asked(again) == []
    held = engine.held()
    for i in range(425):
        p = prompt(i, 4 * BLOCK)
        here = sum(name in held for name, _ in engine.hashes(p))
        assert matched(lab, p) == here * BLOCK
    assert lab.view("e").blocks == 64
    assert (lab.view("e").epoch, lab.view("e").grade) == (1, Grade.EXACT)


def test_f33_a_replay_that_fails_is_asked_for_again_until_the_engine_is_known():
    """The engine is not restarted; the router does not give up for good."""
    engine, lab = Engine(40), Lab()
    for i in range(5):
        engine.run(prompt(i, 4 * BLOCK))
        engine.publish()
    lab.up("e", has_events=True, has_replay=True)
    fails, again = 0, []
    while fails < 6:
        lab.tell(ReplayEnded, endpoint="e", ok=False)
        again = asked(lab.tell(Tick, dt=60.0))
        fails += 1
    assert again == [0]
    lab.replay("e", engine, 0)
    assert [matched(lab, prompt(i, 4 * BLOCK)) for i in range(5)] == [4 * BLOCK] * 5
    assert lab.view("e").grade is Grade.EXACT
