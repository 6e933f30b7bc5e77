"""From batches on the wire to what the router believes: order, loss, restarts, grades."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_lab import BLOCK, MODEL, REPEATABLE, Engine, Lab, keys_of, prompt

from sumibi.core.kvevents import BlockStored, EventBatch
from sumibi.routing.events import (
    AskReplay,
    EndpointDown,
    EndpointSuspect,
    Finished,
    FinishReason,
    Grade,
    GradeChanged,
    ReplayEnded,
    Residency,
    Signals,
    Tick,
)

P1, P2 = prompt("one", 5 * BLOCK), prompt("two", 3 * BLOCK)


def believed(lab, endpoint, prompts):
    """Keys of `prompts` that the router has for `endpoint`'s device."""
    feed = lab.router._fleet.endpoints[endpoint].feed
    return {key for p in prompts for key in keys_of(p) if lab.router._index.holds(feed.device, key)}


def actual(engine, prompts):
    held = engine.held()
    names = [
        (name, key) for p in prompts for (name, _), key in zip(engine.hashes(p), keys_of(p), strict=True)
    ]
    return {key for name, key in names if name in held}


def asks(instructions):
    return [(i.endpoint, i.from_seq) for i in instructions if isinstance(i, AskReplay)]


def grades(instructions):
    return [i.grade for i in instructions if isinstance(i, GradeChanged)]


def causes(instructions):
    return [i.cause for i in instructions if isinstance(i, GradeChanged)]


def following(engine, *, replay=True, **fields):
    """A lab with one endpoint `e` whose events so far were replayed."""
    lab = Lab()
    fields = {"has_events": True, "has_replay": replay, "process_start_s": 1.0} | fields
    if asks(lab.up("e", **fields)):
        lab.replay("e", engine, 0)
    return lab


def publish(lab, engine, token_ids, **how):
    engine.run(token_ids)
    return lab.batch("e", engine.publish(), **how)


def matched(lab, token_ids, endpoint="e"):
    """Tokens of a prompt that a decision now would count as cached."""
    name = f"probe{lab.t}-{len(lab.router.decisions(1000))}"
    lab.arrive(name, [*token_ids, 1])
    tokens = lab.candidates(name)[endpoint].matched_tokens
    lab.finish(name, FinishReason.CLIENT_GONE)
    return tokens


def test_a_fresh_router_asks_for_everything_and_is_exact_at_the_end_mark():
    engine = Engine(20)
    for p in (P1, P2):
        engine.run(p)
        engine.publish()
    lab = Lab()
    start = lab.up("e", has_events=True, has_replay=True)
    assert asks(start) == [("e", 0)]
    assert grades(start) == [Grade.APPROXIMATE]
    assert grades(lab.replay("e", engine, 0)) == [Grade.EXACT]
    assert believed(lab, "e", [P1, P2]) == actual(engine, [P1, P2]) == {*keys_of(P1), *keys_of(P2)}


def test_without_replay_a_fresh_router_says_approximate():
    engine = Engine(20)
    engine.run(P2)
    engine.publish()
    lab = following(engine, replay=False)
    publish(lab, engine, P1)
    assert lab.view("e").grade is Grade.APPROXIMATE
    assert matched(lab, P1) == len(P1)


def test_without_replay_a_router_that_saw_the_first_batch_is_exact():
    engine = Engine(20)
    lab = following(engine, replay=False)
    publish(lab, engine, P1)
    assert lab.view("e").grade is Grade.EXACT


def test_live_batches_during_a_replay_are_applied_after_it_in_order():
    engine = Engine(6)
    engine.run(P1)
    engine.publish()
    lab = Lab()
    lab.up("e", has_events=True, has_replay=True)
    engine.run(P2)  # evicts some of the first
    lab.batch("e", engine.publish())
    assert believed(lab, "e", [P1, P2]) == set()
    lab.replay("e", engine, 0)
    assert believed(lab, "e", [P1, P2]) == actual(engine, [P1, P2])
    assert lab.view("e").grade is Grade.EXACT


def test_a_repeated_batch_changes_nothing():
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    lab.batch("e", engine.published[-1])
    engine.run(P2)
    assert asks(lab.batch("e", engine.publish())) == []
    assert lab.router.counters().batches_repeated == 1
    assert believed(lab, "e", [P1, P2]) == actual(engine, [P1, P2])


def test_a_gap_is_filled_by_a_replay_from_the_last_batch_seen():
    engine = Engine(6)
    lab = following(engine)
    publish(lab, engine, P1)
    engine.run(P2)
    engine.publish()  # lost
    noticed = publish(lab, engine, P1)
    assert asks(noticed) == [("e", 0)]
    assert grades(noticed) == [Grade.APPROXIMATE]
    assert grades(lab.replay("e", engine, 0)) == [Grade.EXACT]
    assert believed(lab, "e", [P1, P2]) == actual(engine, [P1, P2])


def test_a_gap_without_replay_is_said_and_healed_by_a_clear():
    engine = Engine(20)
    lab = following(engine, replay=False)
    publish(lab, engine, P1)
    engine.run(P2)
    engine.publish()  # lost
    publish(lab, engine, P1[: 2 * BLOCK] + P2)
    assert lab.view("e").grade is Grade.APPROXIMATE
    engine.clear()
    publish(lab, engine, P2)
    assert lab.view("e").grade is Grade.EXACT
    assert believed(lab, "e", [P1, P2]) == actual(engine, [P1, P2])


def test_a_replay_that_keeps_failing_drops_the_blocks_and_is_tried_again_later():
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    engine.run(P2)
    engine.publish()  # lost
    publish(lab, engine, prompt("three", BLOCK))
    for pause in (1.0, 2.0):
        lab.tell(ReplayEnded, endpoint="e", ok=False)
        assert believed(lab, "e", [P1]) == set(keys_of(P1))
        assert asks(lab.tell(Tick, dt=pause)) == [("e", 0)]
    lab.tell(ReplayEnded, endpoint="e", ok=False)
    assert believed(lab, "e", [P1]) == set()
    publish(lab, engine, P2)  # followed meanwhile
    assert lab.view("e").grade is Grade.APPROXIMATE
    assert asks(lab.tell(Tick, dt=30.0)) == [("e", 0)]
    lab.replay("e", engine, 0)
    assert lab.view("e").grade is Grade.EXACT
    assert believed(lab, "e", [P1, P2]) == actual(engine, [P1, P2])


def test_an_engine_that_comes_back_is_asked_at_once_though_asking_had_failed():
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    lab.tell(EndpointSuspect, endpoint="e", cause="connection refused")
    for pause in (1.0, 2.0, 0.0):
        lab.tell(ReplayEnded, endpoint="e", ok=False)
        lab.tell(Tick, dt=pause)
    engine.run(P2)
    engine.publish()  # not seen
    assert asks(lab.up("e", has_events=True, has_replay=True, process_start_s=1.0)) == [("e", 0)]
    lab.replay("e", engine, 0)
    assert believed(lab, "e", [P1, P2]) == actual(engine, [P1, P2])
    assert lab.view("e").grade is Grade.EXACT
    engine.run(prompt("three", BLOCK))
    engine.publish()  # lost
    assert asks(publish(lab, engine, P1)) == [("e", 1)]


def test_a_replay_without_an_end_is_given_up():
    engine = Engine(20)
    lab = Lab()
    lab.up("e", has_events=True, has_replay=True)
    lab.tell(Tick, dt=121.0)
    assert lab.router.counters().replays_failed == 1
    assert asks(lab.tell(Tick, dt=1.0)) == [("e", 0)]
    lab.replay("e", engine, 0)
    assert lab.view("e").grade is Grade.EXACT


def test_more_held_back_than_allowed_is_dropped_and_asked_for_again():
    engine = Engine(20)
    lab = Lab(max_buffered_batches=2)
    lab.up("e", has_events=True, has_replay=True)
    for i in range(4):
        engine.run(prompt(i, BLOCK))
        lab.batch("e", engine.publish())
    assert lab.router.counters().batches_dropped == 2
    assert asks(lab.tell(ReplayEnded, endpoint="e", ok=True)) == [("e", 0)]
    lab.replay("e", engine, 0)
    prompts = [prompt(i, BLOCK) for i in range(4)]
    assert believed(lab, "e", prompts) == actual(engine, prompts)
    assert lab.view("e").grade is Grade.EXACT


@pytest.mark.parametrize("replay", [True, False])
def test_a_sequence_that_goes_back_is_a_new_process(replay):
    """F19: with and without replay, phantom blocks leave at once."""
    old, new = Engine(20), Engine(20, process=1)
    lab = following(old, replay=replay)
    publish(lab, old, P1)
    instructions = publish(lab, new, P2)
    assert asks(instructions) == ([("e", 0)] if replay else [])
    if replay:
        lab.replay("e", new, 0)
    assert believed(lab, "e", [P1, P2]) == set(keys_of(P2))
    assert (lab.view("e").epoch, lab.view("e").grade) == (2, Grade.EXACT)


def test_a_restart_is_noticed_by_replay_though_the_new_sequence_passed_the_old_one():
    old, new = Engine(20), Engine(40, process=1)
    lab = following(old)
    publish(lab, old, P1)
    for i in range(5):  # none of these is seen
        new.run(prompt(i, BLOCK))
        new.publish()
    assert asks(publish(lab, new, P2)) == [("e", 0)]
    assert asks(lab.replay("e", new, 0)) == [("e", 0)]
    lab.replay("e", new, 0)
    prompts = [P1, P2, *(prompt(i, BLOCK) for i in range(5))]
    assert believed(lab, "e", prompts) == actual(new, prompts)
    assert (lab.view("e").epoch, lab.view("e").grade) == (2, Grade.EXACT)


def test_a_late_batch_that_a_replay_was_asked_for_is_no_new_process():
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    engine.run(P2)
    late = engine.publish()
    publish(lab, engine, prompt(0, BLOCK))
    lab.batch("e", late)
    lab.replay("e", engine, 0)
    assert believed(lab, "e", [P1, P2]) == actual(engine, [P1, P2])
    assert (lab.view("e").epoch, lab.view("e").grade) == (1, Grade.EXACT)


def test_blocks_whose_parents_the_replay_no_longer_has_are_given_up():
    engine = Engine(20)
    for size in (2, 4):
        engine.run([*P1[: size * BLOCK], 1])
        engine.publish()
    del engine.published[0]
    lab = Lab()
    lab.up("e", has_events=True, has_replay=True)
    (batch,) = engine.published
    lab.batch("e", batch, replayed=True)
    assert lab.router.counters().orphan_blocks_now == 2
    lab.tell(ReplayEnded, endpoint="e", ok=True)
    assert lab.router.counters().orphan_blocks_now == 0
    assert lab.router.counters().orphans_dropped == 2
    assert lab.view("e").grade is Grade.APPROXIMATE


def test_batches_held_back_of_the_process_before_are_dropped_with_it():
    old, new = Engine(20), Engine(20, process=1)
    lab = following(old)
    publish(lab, old, P1)
    old.run(P2)
    old.publish()  # lost
    for i in range(3):
        publish(lab, old, prompt(i, BLOCK))
    new.run(P2)
    new.publish()
    assert asks(lab.replay("e", new, 0)) == [("e", 0)]
    assert asks(lab.replay("e", new, 0)) == []
    assert asks(publish(lab, new, P1)) == []
    prompts = [P1, P2, *(prompt(i, BLOCK) for i in range(3))]
    assert believed(lab, "e", prompts) == actual(new, prompts)
    assert (lab.view("e").epoch, lab.view("e").grade) == (2, Grade.EXACT)


@pytest.mark.parametrize("told_by", ["signals", "up"])
@pytest.mark.parametrize("replay", [True, False])
def test_a_restart_is_noticed_by_the_process_start(told_by, replay):
    old, new = Engine(20), Engine(20, process=1)
    lab = following(old, replay=replay)
    publish(lab, old, P1)
    if told_by == "signals":
        instructions = lab.tell(Signals, endpoint="e", scraped_t=lab.t, process_start_s=99.0)
    else:
        instructions = lab.up("e", has_events=True, has_replay=replay, process_start_s=99.0)
    assert believed(lab, "e", [P1]) == set()
    assert lab.view("e").epoch == 2
    assert asks(instructions) == ([("e", 0)] if replay else [])
    if replay:
        lab.replay("e", new, 0)
    publish(lab, new, P2)
    assert believed(lab, "e", [P1, P2]) == set(keys_of(P2))
    assert lab.view("e").epoch == 2
    assert lab.view("e").grade is Grade.EXACT


def test_a_suspect_s_blocks_count_for_nothing_until_the_same_batch_is_seen_again():
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    engine.run(P2)
    engine.publish()  # lost with the connection
    doubted = lab.tell(EndpointSuspect, endpoint="e", cause="subscription broke")
    assert asks(doubted) == [("e", 0)]
    assert grades(doubted) == [Grade.NONE]
    assert matched(lab, P1) == 0
    assert believed(lab, "e", [P1]) == set(keys_of(P1))
    assert grades(lab.replay("e", engine, 0)) == [Grade.EXACT]
    assert matched(lab, P1) == len(P1)
    assert matched(lab, P2) == len(P2)
    assert lab.view("e").epoch == 1


@pytest.mark.parametrize("published", [0, 1, 5])
def test_a_suspect_that_was_restarted_loses_its_blocks(published):
    """The last batch seen is absent from the replay, or another one has its number."""
    old, new = Engine(20), Engine(40, process=1)
    lab = following(old)
    publish(lab, old, P1)
    publish(lab, old, P2)
    lab.tell(EndpointSuspect, endpoint="e", cause="connection refused")
    for i in range(published):
        new.run(prompt(i, BLOCK))
        new.publish()
    assert asks(lab.replay("e", new, 1)) == [("e", 0)]
    lab.replay("e", new, 0)
    prompts = [P1, P2, *(prompt(i, BLOCK) for i in range(published))]
    assert believed(lab, "e", prompts) == actual(new, prompts)
    assert (lab.view("e").epoch, lab.view("e").grade) == (2, Grade.EXACT)


def test_a_batch_that_the_engine_no_longer_has_voids_what_was_known():
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    for i in range(4):
        engine.run(prompt(i, BLOCK))
        engine.publish()
    lab.tell(EndpointSuspect, endpoint="e", cause="subscription broke")
    del engine.published[:3]
    lab.replay("e", engine, 0)
    assert believed(lab, "e", [P1]) == set()
    assert believed(lab, "e", [prompt(3, BLOCK)]) == set(keys_of(prompt(3, BLOCK)))
    assert lab.view("e").grade is Grade.APPROXIMATE


def test_without_replay_a_suspect_is_trusted_again_when_it_goes_on_as_before():
    engine = Engine(20)
    lab = following(engine, replay=False)
    publish(lab, engine, P1)
    lab.tell(EndpointSuspect, endpoint="e", cause="subscription broke")
    lab.tell(Signals, endpoint="e", scraped_t=lab.t, process_start_s=1.0)
    assert lab.view("e").grade is Grade.APPROXIMATE  # nobody knows what was missed
    publish(lab, engine, P2)
    assert lab.view("e").grade is Grade.EXACT


def test_an_endpoint_that_comes_back_is_asked_what_was_missed():
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    assert asks(lab.tell(EndpointDown, endpoint="e", cause="health")) == []
    engine.run(P2)
    engine.publish()
    back = lab.up("e", has_events=True, has_replay=True, process_start_s=1.0)
    assert asks(back) == [("e", 0)]
    lab.replay("e", engine, 0)
    assert matched(lab, P2) == len(P2)
    assert lab.view("e").epoch == 1


def test_a_stream_that_breaks_for_a_while_leaves_approximate_knowledge():
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    lab.tell(EndpointSuspect, endpoint="e", cause="stream broke")
    lab.tell(ReplayEnded, endpoint="e", ok=False)
    lab.up("e", has_events=False, process_start_s=1.0)
    lab.tell(Signals, endpoint="e", scraped_t=lab.t, process_start_s=1.0)
    assert lab.view("e").grade is Grade.APPROXIMATE
    lab.run("r", P2)
    assert matched(lab, P2) == len(P2)  # by what we sent there
    lab.up("e", has_events=True, has_replay=True, process_start_s=1.0)
    lab.tell(Tick, dt=1.0)
    lab.replay("e", engine, 0)
    assert lab.view("e").grade is Grade.EXACT
    assert matched(lab, P2) == 0


def test_ranks_of_one_engine_are_told_apart():
    """F24."""
    lab = Lab()
    lab.up("http://h:1#0", "http://h:1#1", has_events=True)
    for rank in (0, 1):
        engine = Engine(20)
        engine.run([P1, P2][rank])
        lab.batch(f"http://h:1#{rank}", engine.publish())
    assert matched(lab, P1, "http://h:1#0") == len(P1)
    assert matched(lab, P1, "http://h:1#1") == 0
    assert matched(lab, P2, "http://h:1#1") == len(P2)


def test_an_engine_with_smaller_blocks_is_followed_in_the_model_s_blocks():
    lab, engine = Lab(), Engine(20, block=BLOCK // 2)
    lab.up("first")
    lab.up("e", has_events=True, engine_block_tokens=BLOCK // 2)
    assert lab.router.block_tokens(MODEL) == BLOCK
    publish(lab, engine, P1)
    assert matched(lab, P1) == len(P1)


def test_tiny_engine_blocks_do_not_make_tiny_routing_blocks():
    """F14."""
    lab = Lab()
    lab.up("e", engine_block_tokens=1)
    assert lab.router.block_tokens(MODEL) == 16


def test_events_of_unknown_endpoints_and_unasked_replays_are_counted_and_ignored():
    lab, engine = following(Engine(20)), Engine(20)
    before = lab.router.counters().stale_events
    engine.run(P1)
    batch = engine.publish()
    lab.batch("nobody", batch)
    lab.batch("e", batch, replayed=True)
    lab.tell(ReplayEnded, endpoint="e", ok=True)
    assert lab.router.counters().stale_events == before + 3
    assert believed(lab, "e", [P1]) == set()


def test_the_cause_of_a_changed_grade_is_what_is_so():
    old, new = Engine(20), Engine(20, process=1)
    lab = Lab()
    fields = {"has_events": True, "has_replay": True, "process_start_s": 1.0}
    assert causes(lab.up("e", **fields)) == ["its KV events are being replayed"]
    assert causes(lab.replay("e", old, 0)) == ["its KV events are complete"]
    publish(lab, old, P1)
    assert causes(lab.tell(EndpointSuspect, endpoint="e", cause="stream broke")) == ["stream broke"]
    said = causes(lab.replay("e", new, 0)) + causes(lab.replay("e", new, 0))
    assert said == [
        "batch 0 is unknown to the engine; its KV events are being replayed",
        "its KV events are complete",
    ]
    lost = lab.up("e", **fields | {"has_events": False})
    assert causes(lost) == ["it publishes no KV events, or they do not arrive"]


def test_without_replay_the_cause_names_the_batches_that_were_missed():
    engine = Engine(20)
    lab = Lab()
    assert causes(lab.up("e", has_events=True)) == ["no KV events have come yet"]
    engine.run(P1)
    lab.batch("e", engine.publish())
    engine.run(P2)
    engine.publish()  # lost
    engine.run(prompt(0, BLOCK))
    assert causes(lab.batch("e", engine.publish())) == ["KV event batches between 0 and 2 were missed"]


def test_an_index_without_room_is_not_called_exact():
    """F30: what is left out is said."""
    engine = Engine(20)
    lab = Lab(max_index_blocks=4)
    lab.up("e", has_events=True, has_replay=True)
    lab.replay("e", engine, 0)
    assert grades(publish(lab, engine, P1)) == [Grade.APPROXIMATE]
    assert lab.router.counters().index_refused_blocks == 1


def test_skipped_events_are_counted_and_the_rest_of_the_batch_counts():
    """F26."""
    lab = Lab()
    lab.up("e", has_events=True)
    lab.batch("e", EventBatch(0, 0.0, [BlockStored([1], None, P1[:BLOCK], BLOCK)], skipped=2))
    assert lab.router.counters().skipped_events == 2
    assert matched(lab, P1) == BLOCK


def test_recorded_batches_hold_no_tokens_and_are_followed_by_what_they_meant():
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    batch, residency = lab.recorded[-2:]
    assert batch.batch.events == []
    assert isinstance(residency, Residency)
    assert residency.changes[0].keys == keys_of(P1)


# --- everything at once ---

SHARED = prompt("shared", 2 * BLOCK)
PROMPTS = [SHARED + prompt(i, (1 + i % 3) * BLOCK) for i in range(6)] + [prompt("lone", 3 * BLOCK + 5)]

actions = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "run",
                "run",
                "run",
                "deliver",
                "deliver",
                "lose",
                "repeat",
                "delay",
                "clear",
                "restart",
                "suspect",
                "replay",
                "replay fails",
                "scrape",
                "down",
                "tick",
            ]
        ),
        st.integers(0, 1),
        st.integers(0, len(PROMPTS) - 1),
    ),
    max_size=80,
)


class Wire:
    """Two engines, the batches on their way to the router, and the replays it asked for."""

    def __init__(self, replay, starts):
        self.lab = Lab()
        self.starts = starts
        self.replay = replay
        self.engines = [Engine(9), Engine(9)]
        self.under_way = [[], []]
        self.asked = [None, None]
        for i in (0, 1):
            self.up(i)

    def up(self, i):
        start = float(self.engines[i].process) + 1 if self.starts else None
        self.note(
            self.lab.up(str(i), has_events=True, has_replay=self.replay, process_start_s=start, kv_tokens=144)
        )

    def note(self, instructions):
        for endpoint, from_seq in asks(instructions):
            self.asked[int(endpoint)] = from_seq

    def do(self, what, i, which):
        lab, engine, queue = self.lab, self.engines[i], self.under_way[i]
        if what == "run":
            engine.run(PROMPTS[which])
            queue.append(engine.publish())
        elif what == "clear":
            engine.clear()
            queue.append(engine.publish())
        elif what == "deliver" and queue:
            self.note(lab.batch(str(i), queue.pop(0), dt=0.01))
        elif what == "lose" and queue:
            queue.pop(which % len(queue))
        elif what == "repeat" and queue:
            self.note(lab.batch(str(i), queue[0]))
        elif what == "delay" and len(queue) > 1:
            queue.append(queue.pop(0))
        elif what == "restart":
            self.engines[i] = Engine(9, process=engine.process + 1)
            queue.clear()
            for _ in range(which):
                self.engines[i].run(PROMPTS[which])
                self.engines[i].publish()
            self.note(lab.tell(EndpointSuspect, endpoint=str(i), cause="connection broke"))
        elif what == "suspect":
            self.note(lab.tell(EndpointSuspect, endpoint=str(i), cause="?"))
        elif what == "replay" and self.asked[i] is not None:
            from_seq, self.asked[i] = self.asked[i], None
            self.note(lab.replay(str(i), engine, from_seq))
        elif what == "replay fails" and self.asked[i] is not None:
            self.asked[i] = None
            self.note(lab.tell(ReplayEnded, endpoint=str(i), ok=False))
        elif what == "scrape":
            start = float(engine.process) + 1 if self.starts else None
            self.note(lab.tell(Signals, endpoint=str(i), scraped_t=lab.t, process_start_s=start))
        elif what == "down":
            self.note(lab.tell(EndpointDown, endpoint=str(i), cause="health"))
            self.up(i)
        elif what == "tick":
            self.note(lab.tell(Tick, dt=40.0))

    def settle(self, *, clear):
        """Everything arrives; what is asked for is answered; one more batch shows what was lost last."""
        for i in (0, 1):
            self.do("scrape", i, 0)
            for what in ("clear", "run", "run") if clear else ("run", "run"):
                self.do(what, i, 1)
            while self.under_way[i]:
                self.do("deliver", i, 0)
                self.do("replay", i, 0)
            for _ in range(4):
                self.do("tick", i, 0)
                self.do("replay", i, 0)
        for i in (0, 1):
            assert believed(self.lab, str(i), PROMPTS) == actual(self.engines[i], PROMPTS)
            assert self.lab.view(str(i)).grade is Grade.EXACT


@given(actions, st.booleans())
@settings(REPEATABLE, max_examples=250)
def test_with_replay_the_index_converges_to_each_engine_s_cache_after_any_disorder(actions, starts):
    wire = Wire(replay=True, starts=starts)
    for action in actions:
        wire.do(*action)
    wire.settle(clear=False)


@given(actions)
@settings(REPEATABLE, max_examples=250)
def test_without_replay_the_index_converges_to_each_engine_s_cache_after_a_clear(actions):
    wire = Wire(replay=False, starts=True)
    for action in actions:
        wire.do(*action)
    wire.settle(clear=True)


def test_finished_requests_do_not_confuse_the_order_of_events():
    """Suspicion by a broken request and by its stream, at once, asks once."""
    engine = Engine(20)
    lab = following(engine)
    publish(lab, engine, P1)
    lab.ask("r", P1)
    broken = lab.tell(Finished, request="r", attempt=1, reason=FinishReason.ENGINE_GONE, answered=True)
    again = lab.tell(EndpointSuspect, endpoint="e", cause="stream broke")
    assert asks(broken) == [("e", 0)]
    assert asks(again) == []
