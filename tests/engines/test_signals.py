"""Load signals out of metrics pages as vLLM and SGLang write them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sumibi.engines.signals import EngineSignals, parse_signals

VLLM = b"""\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7959e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",num_cpu_blocks="None"} 1.0
vllm:cache_config_info{block_size="32",engine="1",kv_cache_size_tokens="4000",num_gpu_blocks="130"} 1.0
"""

SGLANG = b"""\
sglang:num_running_reqs{model_name="m"} 2.0
sglang:num_queue_reqs{model_name="m"} 7.0
sglang:token_usage{model_name="m"} 0.9
sglang:cache_config_info{page_size="64",num_pages="10"} 1.0
"""


def test_vllm_ranks_are_told_apart():
    assert parse_signals(VLLM, rank=1, ranks=2) == EngineSignals(
        running=4, waiting=0, kv_usage=0.5, block_tokens=32, kv_tokens=4000, process_start_s=1.7959e9
    )
    assert parse_signals(VLLM, rank=0, ranks=2).kv_tokens == 1600


def test_series_of_one_engine_are_summed_up():
    seen = parse_signals(VLLM)
    assert (seen.running, seen.waiting, seen.kv_usage) == (7, 5, 0.5)


def test_an_engine_may_say_how_many_it_runs_at_once():
    page = b'sumibi:max_num_seqs{engine="0",model_name="m"} 64.0\n'
    assert parse_signals(page).max_sequences == 64
    assert parse_signals(b"sumibi:max_num_seqs 0.0\n").max_sequences is None
    assert parse_signals(VLLM).max_sequences is None


def test_sglang_s_names_are_known():
    assert parse_signals(SGLANG) == EngineSignals(
        running=2, waiting=7, kv_usage=0.9, block_tokens=64, kv_tokens=640
    )


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\n\n",
        b"vllm:num_requests_running",
        b"vllm:num_requests_running{",
        b"\xff\xfe\x00",
        b"# nothing",
        b'vllm:cache_config_info{block_size="%b"} 1' % (b"9" * 5000),
        b"vllm:num_requests_running 1e308\nvllm:num_requests_running 1e308\n",
        b"vllm:num_requests_running{" + b"a" * 1_000_000 + b"} x",  # hours, if it took its length squared
    ],
)
def test_a_page_that_says_nothing_is_nothing_known(page):
    assert parse_signals(page) == EngineSignals()


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-3", b"many", b""])
def test_a_value_that_cannot_be_is_not_believed(value):
    assert (
        parse_signals(b"vllm:num_requests_running %b\nvllm:kv_cache_usage_perc %b\n" % (value, value))
        == EngineSignals()
    )


def test_the_fast_reading_agrees_with_the_prometheus_client():
    wanted = {}
    for family in text_string_to_metric_families(VLLM.decode()):
        for sample in family.samples:
            if sample.labels.get("engine") == "1":
                wanted[sample.name] = sample.value
    seen = parse_signals(VLLM, rank=1, ranks=2)
    assert (seen.running, seen.waiting) == (
        wanted["vllm:num_requests_running"],
        wanted["vllm:num_requests_waiting"],
    )
    assert seen.kv_usage == wanted["vllm:kv_cache_usage_perc"]
