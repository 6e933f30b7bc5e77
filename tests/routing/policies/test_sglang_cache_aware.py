"""SGLang's cache-aware policy, with the holes that users have met."""

from policy_lab import BLOCK, Desk, prompt

from sumibi.routing.policies.sglang_cache_aware import TREE_CHARACTERS


def desk(*names, **fields):
    return Desk("sglang-cache-aware", *names, **fields)


def load(it, **requests):
    for name, inflight in requests.items():
        it.endpoints[name].load.inflight = inflight


def test_more_than_three_tenths_of_the_prompt_must_match():
    it = desk("a", "b")
    it.place(prompt(x=3), on="b")
    assert it.scores(prompt(x=3, y=6)) == {"a": 1.0, "b": 0.0}  # 3/9
    # 3/10 is not more: the smallest tree, in blocks
    assert it.scores(prompt(x=3, z=7)) == {"a": 0.0, "b": 3.0}


def test_the_longest_match_wins():
    it = desk("a", "b", "c")
    for on, blocks in (("a", 4), ("b", 8), ("c", 6)):
        it.place(prompt(x=4, **({"y": blocks - 4} if blocks > 4 else {})), on=on)
    assert it.scores(prompt(x=4, y=5)) == {"a": 1.0, "b": 0.0, "c": 1.0}


def test_the_share_is_of_the_whole_prompt_its_partial_block_included():
    it = desk("a", "b")
    it.place(prompt(x=3), on="b")
    tokens = 9 * BLOCK + BLOCK  # 3/10
    assert it.scores(prompt(x=3, y=6), tokens=tokens)["b"] == 3.0


def test_a_miss_goes_to_the_smallest_tree_loaded_or_not():
    it = desk("a", "b")
    it.place(prompt(x=50), on="a")
    load(it, a=0, b=64)
    assert it.place(prompt(cold=40)) == "b"


def test_out_of_balance_is_more_than_64_requests_and_more_than_half_as_many_again():
    it = desk("a", "b", "c")
    it.place(prompt(x=10), on="a")
    for most, fewest, in_balance in ((64, 0, True), (65, 0, False), (195, 130, True), (196, 130, False)):
        load(it, a=most, b=fewest, c=most)
        assert (it.place(prompt(x=10)) == "a") == in_balance
        it = desk("a", "b", "c")
        it.place(prompt(x=10), on="a")


def test_one_hot_endpoint_drops_the_locality_of_all():
    it = desk("a", "b", "c")
    it.place(prompt(x=10), on="b")
    load(it, a=65, b=1, c=0)
    assert it.scores(prompt(x=10)) == {"a": 65.0, "b": 1.0, "c": 0.0}  # b is not hot, and loses its prompts


def test_placements_out_of_balance_enter_the_tree_too():
    it = desk("a", "b")
    load(it, a=65, b=0)
    assert it.place(prompt(x=10)) == "b"
    load(it, a=0, b=0)
    assert it.scores(prompt(x=10)) == {"a": 1.0, "b": 0.0}


def test_it_counts_requests_not_tokens():
    it = desk("a", "b")
    it.place(prompt(x=10), on="a")
    for _ in range(60):
        it.endpoints["a"].load.inflight += 1
        it.endpoints["a"].load.prefill_tokens += 100_000
    assert it.place(prompt(x=10)) == "a"


def test_a_shared_system_prompt_draws_every_session_to_one_endpoint():
    it = desk("a", "b", "c", "d")
    assert {it.place(prompt(system=10, **{f"user{i}": 2})) for i in range(32)} == {
        it.place(prompt(system=10))
    }


def test_of_several_longest_matches_it_is_always_the_same():
    it = desk("a", "b", "c")
    for name in "cab":
        it.place(prompt(x=10), on=name)
    assert len({it.place(prompt(x=10)) for _ in range(10)}) == 1


def test_trees_are_cut_back_at_a_quarter_as_many_tokens_as_the_original_has_characters():
    large = TREE_CHARACTERS // 4 // 3  # a block of a third of the tree
    it = desk("a", "b", block=large)
    for name in ("x", "y", "z", "w"):
        it.place(prompt(**{name: 1}), on="a")
    assert it.scores(prompt(new=1)) == {"a": 3.0, "b": 0.0}
    assert it.scores(prompt(x=1)) == {"a": 3.0, "b": 0.0}  # the oldest is gone
    assert it.scores(prompt(y=1)) == {"a": 0.0, "b": 1.0}


def test_an_endpoint_that_is_gone_has_no_tree():
    it = desk("a", "b")
    it.place(prompt(x=10), on="b")
    it.policy.gone("b")
    assert it.scores(prompt(x=10)) == {"a": 0.0, "b": 0.0}
