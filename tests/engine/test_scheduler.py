"""The scheduler on a fake model whose tokens depend on every block being the right one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.engine.scheduler import AGEING
from sumibi.engine.sequence import FinishReason


def output(sequence):
    return sequence.tokens[sequence.prompt_tokens :]


def prompt(length, start=0):
    return [(start + i) % 50 for i in range(length)]


def test_long_prompts_are_computed_in_chunks_of_the_step_budget(make_runner, oracle):
    runner = make_runner(step_tokens=16)
    (sequence,) = runner.add(prompt(40), max_tokens=3)
    assert [sum(part.count for part in runner.step().parts) for _ in range(5)] == [16, 16, 8, 1, 1]
    assert output(sequence) == oracle(prompt(40), 3)
    assert sequence.finish is FinishReason.LENGTH


def test_decodes_go_first_and_prefills_take_what_is_left(make_runner):
    runner = make_runner(step_tokens=16)
    (first,) = runner.add(prompt(4), max_tokens=9)
    runner.step()
    runner.add(prompt(40, start=7))
    step = runner.step()
    assert [(part.sequence is first, part.count) for part in step.parts] == [(True, 1), (False, 15)]


def test_a_short_request_behind_a_long_prefill_has_its_token_within_two_budgets(make_runner):
    runner = make_runner(num_blocks=512, step_tokens=16)
    (long,) = runner.add(prompt(1000))
    for _ in range(5):
        runner.step()
    before = long.computed
    (short,) = runner.add([1, 2, 3])  # arrives while a step is under way
    runner.step()
    assert short.output_tokens == 1
    assert 0 < long.computed - before <= 16


def test_a_warm_request_behind_a_long_prefill_has_its_token_within_two_budgets(make_runner):
    runner = make_runner(num_blocks=512, step_tokens=16)
    runner.add(prompt(200, start=3), max_tokens=1)
    runner.run()
    runner.add(prompt(1000))
    runner.step()
    (warm,) = runner.add([*prompt(200, start=3), 1, 2])
    runner.step()
    assert warm.output_tokens == 1
    assert warm.cached_tokens == 200


def test_a_long_prefill_among_endless_short_ones_is_delayed_by_a_multiple_of_its_length(make_runner):
    runner = make_runner(num_blocks=512, step_tokens=16)
    (long,) = runner.add(prompt(160))
    others = 0
    for arrival in range(10_000):
        if long.output_tokens:
            break
        for k in range(2):  # two prompts of 15 a step: more than the budget
            runner.add([arrival % 50, arrival // 50, k, *prompt(12)], max_tokens=1)
        others += sum(part.count for part in runner.step().parts if part.sequence is not long)
    assert 160 / AGEING / 2 < others <= 160 / AGEING + 16


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(2, 60)), min_size=2, max_size=40))
def test_no_prefill_is_overtaken_by_more_than_its_share(make_runner, traffic):
    runner = make_runner(num_blocks=1024, max_sequences=16, step_tokens=16)
    sequences = []
    for start, (delay, length) in enumerate(traffic):
        sequences += runner.add([start, *prompt(length - 1)], max_tokens=1)
        for _ in range(delay):
            runner.step()
    runner.run()
    for sequence in sequences:
        assert sequence.overtaken_tokens <= sequence.prompt_tokens / AGEING + 16


def test_a_request_that_does_not_fit_is_not_starved_by_small_ones_that_do(make_runner):
    runner = make_runner(num_blocks=16, block_tokens=4, step_tokens=16)
    runner.add(prompt(8), max_tokens=40)
    runner.step()
    (big,) = runner.add(prompt(48, start=9), max_tokens=1)
    for arrival in range(400):
        if big.finish:
            break
        runner.add([arrival % 50, arrival // 50, *prompt(6)], max_tokens=2)
        runner.step()
    assert big.finish is FinishReason.LENGTH


def test_no_more_sequences_run_than_allowed(make_runner, oracle):
    runner = make_runner(max_sequences=2)
    families = [runner.add(prompt(5, start=i), max_tokens=6) for i in range(5)]
    while runner.step():
        assert len(runner.scheduler.running) <= 2
    assert all(output(f[0]) == oracle(prompt(5, start=i), 6) for i, f in enumerate(families))


def test_a_prefix_that_is_just_being_computed_is_waited_for_and_not_computed_twice(make_runner):
    runner = make_runner(step_tokens=16)
    runner.add([*prompt(24), 1])
    (second,) = runner.add([*prompt(24), 2])
    runner.run()
    assert second.cached_tokens == 24


def test_a_hit_leaves_at_least_one_token_to_compute(make_runner, oracle):
    runner = make_runner(block_tokens=4)
    runner.add(prompt(8))
    runner.run()
    (again,) = runner.add(prompt(8))
    runner.run()
    assert again.cached_tokens == 4
    assert output(again) == oracle(prompt(8), 4)


def test_output_is_reused_as_the_next_turns_prefix(make_runner):
    runner = make_runner(block_tokens=4)
    (first,) = runner.add(prompt(6), max_tokens=7)
    runner.run()
    (second,) = runner.add([*first.tokens, 1, 2, 3])
    runner.run()
    assert second.cached_tokens == 12  # the last of 13 tokens was never computed


def test_choices_share_the_prompts_blocks_and_copy_the_partial_one(make_runner, oracle):
    runner = make_runner(block_tokens=4, num_blocks=16)
    family = runner.add(prompt(10), max_tokens=5, n=3)
    runner.step()
    assert runner.pool.held == 2 + 3
    assert [sequence.computed for sequence in family] == [10, 10, 10]
    runner.run()
    assert all(output(sequence) == oracle(prompt(10), 5) for sequence in family)


def test_choices_without_a_free_place_wait_and_lose_nothing(make_runner, oracle):
    runner = make_runner(block_tokens=4, num_blocks=16, max_sequences=2)
    family = runner.add(prompt(10), max_tokens=5, n=5)
    runner.run()
    assert all(output(sequence) == oracle(prompt(10), 5) for sequence in family)


def test_preemption_loses_nothing_and_the_oldest_is_never_its_victim(make_runner, oracle):
    runner = make_runner(block_tokens=4, num_blocks=12, step_tokens=16)
    families = [runner.add(prompt(6, start=10 * i), max_tokens=30) for i in range(3)]
    while runner.step():
        assert families[0][0].table or families[0][0].finish
    assert runner.scheduler.preemptions > 0
    for i, (sequence,) in enumerate(families):
        assert output(sequence) == oracle(prompt(6, start=10 * i), 30)


def test_an_aborted_sequence_frees_its_blocks_at_once(make_runner):
    runner = make_runner()
    (running,) = runner.add(prompt(30))
    runner.step()
    (waiting,) = runner.add(prompt(30, start=5))
    for sequence in (running, waiting):
        runner.scheduler.abort(sequence)
        assert sequence.finish is FinishReason.ABORT
    assert runner.pool.held == 0
    assert not runner.scheduler.has_work


def test_a_stop_token_ends_a_sequence_and_is_part_of_it(make_runner, oracle):
    expected = oracle(prompt(5), 9)
    stop = expected[4]
    assert stop not in expected[:4]
    runner = make_runner()
    (sequence,) = runner.add(prompt(5), max_tokens=9, stop_token_ids=frozenset({stop}))
    runner.run()
    assert output(sequence) == expected[:5]
    assert (sequence.finish, sequence.stop_token) == (FinishReason.STOP, stop)


def test_prompt_logprobs_ask_for_every_prompt_position_once_even_if_cached(make_runner):
    runner = make_runner(step_tokens=16)
    runner.add(prompt(40))
    runner.run()
    (sequence,) = runner.add(prompt(40), prompt_logprobs=0)
    asked = []
    while step := runner.scheduler.schedule():
        for part in step.parts:
            asked += part.prompt_positions
            sequence.prompt_logprobs += [None] * len(part.prompt_positions)
        runner.scheduler.account(step, [7] * len(step.samplers()))
    assert asked == list(range(39))
    assert sequence.cached_tokens == 0


def test_limits_that_cannot_work_are_refused(make_runner):
    with pytest.raises(ValueError, match="cannot hold 8 decodes"):
        make_runner(max_sequences=8, step_tokens=7)
    with pytest.raises(ValueError, match="do not fit into 4 blocks"):
        make_runner(num_blocks=4, block_tokens=4, max_tokens=17)


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
)
def test_any_traffic_ends_with_the_right_tokens_and_no_block_held(
    make_runner, oracle, traffic, num_blocks, max_sequences, step_tokens
):
    runner = make_runner(num_blocks=num_blocks, max_sequences=max_sequences, step_tokens=step_tokens)
    expected, leaving = [], []
    for delay, length, kind, max_tokens, n, leaves_after in traffic:
        for _ in range(delay):
            runner.step()
            for at, family in leaving:
                if at <= runner.steps:
                    for sequence in family:
                        runner.scheduler.abort(sequence)
                    runner.scheduler.check_integrity()
        family = runner.add(prompt(length, start=17 * kind), max_tokens=max_tokens, n=n)
        if leaves_after is not None:
            leaving.append((runner.steps + leaves_after, family))
        expected.append((family, oracle(prompt(length, start=17 * kind), max_tokens)))
    runner.run()
    assert runner.pool.held == 0
    for family, tokens in expected:
        for sequence in family:
            if sequence.finish is FinishReason.ABORT:
                assert output(sequence) == tokens[: sequence.output_tokens]
            else:
                assert (sequence.finish, output(sequence)) == (FinishReason.LENGTH, tokens)
