"""llm-d's sticky-until-saturated, threshold by threshold."""

import pytest
from policy_lab import BLOCK, Desk, prompt

from sumibi.routing.config import RouterConfig
from sumibi.routing.policies.llmd_sticky import CHUNK_TOKENS, R_PEAK_TOKENS_PER_S

POLICY = "llmd-sticky-until-saturated"


def sticky(*names, **config):
    return Desk(POLICY, *names, **config)


def test_four_fifths_of_the_blocks_make_a_home_and_less_does_not():
    desk = sticky("a", "b")
    desk.place(prompt(x=4), on="b", request="r")
    desk.end("r")
    desk.place(prompt(other=100), on="b", request="busy")  # b is behind, far from saturated
    assert desk.place(prompt(x=4, y=1)) == "b"  # 4/5
    assert desk.place(prompt(x=4, z=2)) == "a"  # 4/6: the turn that adds much has lost its home


def test_stickiness_ends_18_seconds_of_prefill_behind_the_least_busy_other():
    limit = 18 * 15_928
    for behind, on in ((limit, "a"), (limit + 1, "b")):
        desk = sticky("a", "b")
        desk.place(prompt(x=10), on="a", request="r")
        desk.end("r")
        desk.place([], on="b", tokens=1_000, request="small")
        desk.place([], on="a", tokens=1_000 + behind, request="large")
        assert desk.place(prompt(x=10)) == on


def test_the_blog_s_setting_ends_it_at_286_720_tokens():
    for behind, on in ((286_720, "a"), (286_721, "b")):
        desk = sticky("a", "b", r_peak_tokens_per_s=20_480.0, sticky_limit_s=14.0)
        desk.place(prompt(x=10), on="a", request="r")
        desk.end("r")
        desk.place([], on="a", tokens=behind, request="large")
        assert desk.place(prompt(x=10)) == on


def test_the_least_busy_of_those_sticky_counts():
    desk = sticky("a", "b", "c")
    for name in "ab":
        desk.place(prompt(x=10), on=name, request=name)
        desk.end(name)
    desk.place([], on="a", tokens=10_000_000, request="large")
    assert desk.place(prompt(x=10)) == "b"


def test_then_the_fewest_tokens_in_flight_with_this_prompt_s_own_uncached():
    desk = sticky("a", "b")
    desk.place(prompt(x=10), on="a", request="r")  # 640 tokens in flight at a
    # a new prompt of which a has 3 of 20 blocks: no home
    assert desk.scores(prompt(x=3, y=17)) == {"a": 640.0 + 17 * BLOCK, "b": 20.0 * BLOCK}
    desk.first("r")
    assert desk.scores(prompt(x=3, y=17)) == {"a": 17.0 * BLOCK, "b": 20.0 * BLOCK}


def test_once_broken_all_are_equal_and_the_cached_share_is_only_tokens():
    desk = sticky("a", "b", "c")
    desk.place(prompt(x=100), on="a", request="r")
    desk.end("r")
    desk.place([], on="a", tokens=400_000, request="large")
    assert desk.scores(prompt(x=100)) == {"a": 400_000.0, "b": 6_400.0, "c": 6_400.0}


def test_tokens_are_released_with_the_first_byte_or_at_the_end_and_only_once():
    desk = sticky("a", "b")
    for request, ways in (("1", "first end"), ("2", "end"), ("3", "first first end end")):
        desk.place(prompt(**{f"p{request}": 4}), on="a", request=request)
        assert desk.scores([], tokens=1)["a"] == 257.0
        for way in ways.split():
            (desk.first if way == "first" else desk.end)(request)
        assert desk.scores([], tokens=1)["a"] == 1.0


def test_above_the_limit_of_the_token_scorer_all_are_equal():
    desk = sticky("a", "b")
    desk.place([], on="a", tokens=5_000_000)
    desk.place([], on="b", tokens=9_000_000)
    assert desk.scores([], tokens=10) == {"a": 4_194_304.0, "b": 4_194_304.0}


def test_decoding_is_invisible():
    desk = sticky("a", "b")
    for i in range(50):
        desk.place([], on="a", tokens=100, request=str(i))
        desk.first(str(i))
    assert desk.scores([], tokens=1) == {"a": 1.0, "b": 1.0}


def test_only_the_first_131_072_tokens_of_a_prompt_are_looked_at():
    desk = sticky("a", "b")
    desk.place(prompt(x=2048), on="a", request="r")
    desk.end("r")
    desk.place([], on="a", tokens=100_000, request="busy")
    assert desk.place(prompt(x=2048, y=4000)) == "a"  # its whole visible part is there
    wide = sticky("a", "b", approximate_match_tokens=10**9)
    wide.place(prompt(x=2048), on="a", request="r")
    wide.end("r")
    wide.place([], on="a", tokens=300_000, request="busy")
    assert wide.place(prompt(x=2048, y=4000)) == "b"


def test_an_endpoint_that_is_gone_is_forgotten_and_its_requests_may_end_later():
    desk = sticky("a", "b")
    desk.place(prompt(x=4), on="a", request="r")
    desk.policy.gone("a")
    desk.end("r")
    assert desk.scores(prompt(x=4)) == {"a": 256.0, "b": 256.0}


def test_what_is_shipped_is_what_was_published_for_the_first_fleet():
    assert RouterConfig().r_peak_tokens_per_s == R_PEAK_TOKENS_PER_S["qwen3-32b 2xH100"] == 15_928
    blog = R_PEAK_TOKENS_PER_S["qwen3-32b 2xH100 (blog, with a limit of 14 s)"]
    assert blog == pytest.approx(CHUNK_TOKENS / 0.40)  # a chunk took 0.40 s
    assert blog * 14 == 286_720
