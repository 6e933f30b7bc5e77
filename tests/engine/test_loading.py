"""Sequences whose KV comes from outside, on the fake model: a block that is not what it should be shows as a
wrong token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.core.content import content_id, content_root
from sumibi.core.kvevents import BlockStored
from sumibi.engine.blocks import wire_hash
from sumibi.engine.sequence import FinishReason


def output(sequence):
    return sequence.tokens[sequence.prompt_tokens :]


def prompt(length, start=0):
    return [(start + i) % 50 for i in range(length)]


def ids(tokens, count):
    """Content ids of the first `count` blocks of 4, as `core.content` defines them."""
    chain = [content_root("fake")]
    for index in range(count):
        chain.append(content_id(chain[-1], tokens[4 * index : 4 * index + 4]))
    return chain[1:]


@pytest.fixture
def stand(make_runner):
    """A runner whose source has the first 5 blocks of `prompt(30)`."""

    def make(**options):
        runner = make_runner(outside=True, **options)
        runner.source.keep(prompt(30), ids(prompt(30), 5))
        return runner

    return make


def test_what_is_outside_is_loaded_while_others_go_on_and_only_the_rest_is_computed(stand, oracle):
    runner = stand()
    (sequence,) = runner.add(prompt(30))
    (other,) = runner.add([9, 9, 9], max_tokens=3)
    step = runner.step()
    assert [part.sequence for part in step.parts] == [other]
    assert (runner.loads[0].tokens, len(runner.loads[0].blocks)) == (20, 5)
    runner.step()
    runner.step()
    assert other.finish is FinishReason.LENGTH
    assert runner.step() is None
    assert runner.scheduler.has_work is False  # nobody wants a step until the load has ended
    assert runner.finish_load() == 20
    step = runner.step()
    assert [(part.start, part.count) for part in step.parts] == [(20, 10)]
    runner.run()
    assert output(sequence) == oracle(prompt(30), 4)
    assert (sequence.cached_tokens, sequence.cached_by_source) == (20, {"host": 20})


def test_a_device_hit_comes_first_and_the_load_goes_on_from_there(stand):
    runner = stand()
    runner.add(prompt(9), max_tokens=1)
    runner.run()  # its first two blocks are on the device now, loaded
    (sequence,) = runner.add(prompt(30))
    runner.step()
    assert runner.loads[0].first_block == 2
    runner.run()
    assert sequence.cached_by_source == {"device": 8, "host": 12}


@pytest.mark.parametrize("good", range(5))
def test_what_a_load_did_not_bring_is_computed(stand, oracle, good):
    runner = stand()
    (sequence,) = runner.add(prompt(30))
    runner.step()
    assert runner.finish_load(good=good) == 4 * good
    runner.run()
    assert output(sequence) == oracle(prompt(30), 4)
    assert sequence.cached_tokens == 4 * good


def test_loaded_blocks_are_announced_as_computed_ones_are(stand):
    runner = stand()
    runner.add(prompt(30))
    runner.step()
    assert runner.pool.drain_events() == []
    runner.finish_load()
    (event,) = runner.pool.drain_events()
    assert isinstance(event, BlockStored)
    assert event.medium == "GPU"
    assert event.token_ids == prompt(20)
    assert event.block_hashes == [wire_hash(each) for each in ids(prompt(30), 5)]


def test_one_token_is_left_to_compute(make_runner, oracle):
    runner = make_runner(outside=True)
    runner.source.keep(prompt(20), ids(prompt(20), 5))
    (sequence,) = runner.add(prompt(20))
    runner.step()
    assert (runner.loads[0].tokens, len(runner.loads[0].blocks)) == (19, 5)  # the last token is computed anew
    runner.finish_load()
    assert sequence.remaining == 1
    runner.run()
    assert output(sequence) == oracle(prompt(20), 4)


def test_a_partial_last_block_may_come_too(make_runner, oracle):
    runner = make_runner(outside=True)
    runner.source.offer = lambda sequence, first_block: len(sequence.tokens) - 4 * first_block
    (sequence,) = runner.add(prompt(18))
    runner.step()
    load = runner.loads.pop()
    assert (load.tokens, len(load.blocks), len(load.content_ids)) == (17, 5, 4)
    for index, block in enumerate(load.blocks):
        runner.model.memory[block] = (prompt(18) + [None] * 2)[4 * index : 4 * index + 4]
    assert runner.scheduler.loaded(load, ["p2p"] * 5) == 17
    runner.scheduler.check_integrity()
    assert (sequence.computed, sequence.filled) == (17, 4)
    assert sequence.cached_by_source == {"p2p": 17}
    runner.run()
    assert output(sequence) == oracle(prompt(18), 4)


def test_a_second_sequence_waits_for_what_is_being_loaded(stand, oracle):
    runner = stand()
    (first,), (second,) = runner.add(prompt(30)), runner.add([*prompt(22), 7])
    runner.step()
    assert len(runner.loads) == 1
    runner.run()
    # The second is the shorter one, so it is the first that finds everything there.
    assert (first.cached_by_source, second.cached_by_source) == ({"device": 20}, {"host": 20})
    assert output(second) == oracle([*prompt(22), 7], 4)
    assert output(first) == oracle(prompt(30), 4)


def test_blocks_of_an_aborted_load_come_back_when_nobody_writes_to_them_any_more(stand):
    runner = stand()
    (sequence,) = runner.add(prompt(30))
    runner.step()
    runner.scheduler.abort(sequence)
    runner.scheduler.check_integrity()
    assert sequence.finish is FinishReason.ABORT
    assert not runner.scheduler.has_work
    assert runner.pool.held == 8
    assert runner.pool.clear() is False
    assert runner.finish_load() == 0
    assert runner.pool.held == 0
    assert len(runner.pool.known_contents()) == 5  # what came is not thrown away


def test_a_load_is_ended_once(stand):
    runner = stand()
    runner.add(prompt(30))
    runner.step()
    (load,) = runner.loads
    runner.finish_load()
    assert runner.scheduler.loaded(load, ["host"] * 5) == 0
    runner.scheduler.check_integrity()


def test_a_load_that_takes_too_long_is_given_up_and_everything_computed(stand, oracle):
    runner = stand()
    (sequence,) = runner.add(prompt(30))
    runner.step()
    runner.scheduler.give_up(runner.loads[0])
    for _ in range(6):
        runner.step()
    assert output(sequence) == oracle(prompt(30), 4)
    assert sequence.cached_tokens == 0
    assert runner.finish_load() == 0
    assert runner.pool.held == 0


def test_choices_wait_for_their_prompt_also_when_it_is_loaded(stand, oracle):
    runner = stand()
    family = runner.add(prompt(30), n=3)
    runner.run()
    assert all(output(sequence) == oracle(prompt(30), 4) for sequence in family)
    assert [sequence.cached_tokens for sequence in family] == [20] * 3


def test_prompt_logprobs_load_nothing(stand):
    runner = stand()
    runner.add(prompt(30), prompt_logprobs=0)
    runner.scheduler.schedule()
    assert runner.scheduler.drain_loads() == []


def test_loading_sequences_count_as_running(stand):
    runner = stand(max_sequences=1)
    runner.add(prompt(30))
    (other,) = runner.add(prompt(16, start=7))
    assert runner.step() is None
    runner.finish_load()
    runner.run()
    assert other.finish is FinishReason.LENGTH


def test_a_load_begins_also_when_a_prefill_takes_the_whole_step(stand):
    runner = stand(num_blocks=128)
    runner.add(prompt(18, start=7))
    runner.add(prompt(30))
    step = runner.step()
    assert sum(part.count for part in step.parts) == 16
    assert len(runner.loads) == 1


def test_a_lone_sequence_without_room_waits_for_a_load_instead_of_making_way(stand, oracle):
    runner = stand(num_blocks=12)
    (first,) = runner.add([8, 8, 8], max_tokens=24)
    runner.step()
    (second,) = runner.add(prompt(30))
    steps = 0
    while runner.step():
        steps += 1
    assert steps < 24
    assert first.table
    assert runner.scheduler.preemptions == 0
    runner.run()
    assert output(first) == oracle([8, 8, 8], 24)
    assert output(second) == oracle(prompt(30), 4)


def test_pinned_blocks_outlive_their_sequence_and_known_ones_stay_cached_afterwards(make_runner):
    pinned = []

    class Sink:
        def filled(self, sequence, first_block):
            pinned.append(runner.scheduler.pin(sequence.table[first_block : sequence.filled]))

        def ended(self, sequence):
            assert sequence.finish is FinishReason.LENGTH
            pinned.append(runner.scheduler.pin(sequence.table))  # the partial last block too

    runner = make_runner(sink=Sink())
    runner.add(prompt(18), max_tokens=1)
    runner.run()
    assert [len(blocks) for blocks in pinned] == [4, 5]
    assert runner.pool.held == 5
    for blocks in pinned:
        runner.scheduler.unpin(blocks)
        runner.scheduler.check_integrity()
    assert runner.pool.held == 0
    assert len(runner.pool.known_contents()) == 4


arrivals = st.tuples(
    st.integers(0, 6),  # steps before it comes
    st.integers(1, 30),  # prompt tokens
    st.integers(0, 2),  # which of three prefixes
    st.integers(1, 10),  # output tokens
    st.integers(1, 3),  # choices
    st.one_of(st.none(), st.integers(0, 12)),  # steps until its client leaves
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=12),
    st.integers(10, 16),
    st.integers(2, 4),
    st.integers(4, 12),
    st.lists(st.integers(0, 7), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_traffic_and_any_source_end_with_the_right_tokens_and_no_block_held(
    make_runner, oracle, traffic, num_blocks, max_sequences, step_tokens, outside, chance
):
    runner = make_runner(
        num_blocks=num_blocks, max_sequences=max_sequences, step_tokens=step_tokens, outside=True
    )
    for kind, blocks in enumerate(outside):
        runner.source.keep(prompt(40, start=17 * kind), ids(prompt(40, start=17 * kind), blocks))
    expected, leaving = [], []

    def advance():
        """A step, and what may happen to loads meanwhile."""
        step = runner.step()
        for load in [load for load in runner.loads if not load.abandoned and chance.random() < 0.1]:
            runner.scheduler.give_up(load)
            runner.scheduler.check_integrity()
        while runner.loads and chance.random() < 0.4:
            at = chance.randrange(len(runner.loads))
            good = None if chance.random() < 0.6 else chance.randint(0, len(runner.loads[at].blocks))
            runner.finish_load(at, good)
        return step

    for delay, length, kind, max_tokens, n, leaves_after in traffic:
        for _ in range(delay):
            advance()
            for at, family in leaving:
                if at <= runner.steps:
                    for sequence in family:
                        runner.scheduler.abort(sequence)
                    runner.scheduler.check_integrity()
        family = runner.add(prompt(length, start=17 * kind), max_tokens=max_tokens, n=n)
        if leaves_after is not None:
            leaving.append((runner.steps + leaves_after, family))
        expected.append((family, oracle(prompt(length, start=17 * kind), max_tokens)))
    for _ in range(20_000):
        if not advance() and not runner.loads and not runner.scheduler.has_work:
            break
    assert not runner.scheduler.has_work
    assert runner.pool.held == 0
    for family, tokens in expected:
        for sequence in family:
            if sequence.finish is FinishReason.ABORT:
                assert output(sequence) == tokens[: sequence.output_tokens]
            else:
                assert (sequence.finish, output(sequence)) == (FinishReason.LENGTH, tokens)
