"""Prompts computed on one engine and continued on another say what one engine says alone."""

import os
import re
import sys
import threading
from typing import ClassVar

import pytest

from sumibi.core.content import content_id, content_root
from sumibi.engine.transfer import connector
from sumibi.engine.transfer.pulling import pull
from sumibi.tiers import TiersConfig

SEEDS = iter(range(1, 1000))

VLLM_FIELDS = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
    "remote_prefill_cached_tokens",
}


def counted(engine, name, page=None):
    """The sum of a metric's series."""
    page = page or engine.http.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.M))


class Watch:
    """What changed on the decode side since it was made."""

    NAMES: ClassVar = {
        "loaded": "sumibi:kv_load_tokens_total",
        "blocks": "sumibi:kv_transfer_blocks_total",
        "failed": "vllm:nixl_num_failed_transfers_total",
        "unnotified": "vllm:nixl_num_failed_notifications_total",
        "bytes": "vllm:nixl_bytes_transferred_sum",
        "external": "vllm:external_prefix_cache_hits_total",
    }

    def __init__(self, engine):
        self._engine = engine
        page = engine.http.get("/metrics").text
        self._before = {short: counted(engine, name, page) for short, name in self.NAMES.items()}

    def __call__(self, short):
        return counted(self._engine, self.NAMES[short]) - self._before[short]


@pytest.fixture(scope="module")
def tcp_pair(make_served, make_config, make_pair, pair):
    with make_served(kv_transfer=make_config(transports=["tcp"])) as d:
        yield make_pair(pair.p, d)


@pytest.mark.parametrize("tokens", [1, 5, 31, 32, 33, 64, 200, 500])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_serial(pair, tcp_pair, served, make_prompt, tokens, transport):
    both = pair if transport == "shm" else tcp_pair
    token_ids = make_prompt(next(SEEDS), tokens)
    alone = served.complete(token_ids, max_tokens=12, ignore_eos=True, logprobs=2)
    changed = Watch(both.d)
    apart = both.serial(token_ids, max_tokens=12, ignore_eos=True, logprobs=2)
    assert apart["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    # The last token of a prompt is computed by itself here, with the others there: other roundings.
    told = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (apart, alone)]
    assert told[0] == pytest.approx(told[1], abs=1e-4)
    assert apart["usage"] == alone["usage"]
    both.idle()
    # Everything but the last token came from the peer, the partial block with it.
    assert changed("loaded") == changed("external") == tokens - 1
    assert changed("blocks") == -(-(tokens - 1) // 32)
    assert changed("bytes") == changed("blocks") * both.d.door.engine._model.block_bytes
    assert changed("failed") == changed("unnotified") == 0
    used = re.findall(r'kv_transfer_blocks_total{.*transport="(\w+)"', both.d.http.get("/metrics").text)
    assert set(used) <= {transport}


@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_stream(pair, tcp_pair, served, make_prompt, transport, tokens, decode_first):
    both = pair if transport == "shm" else tcp_pair
    token_ids = make_prompt(next(SEEDS), tokens)
    alone = served.tokens(token_ids, max_tokens=12, ignore_eos=True)
    changed = Watch(both.d)
    name = f"xfer-{transport}-{tokens}-{decode_first}"
    answer = both.stream(token_ids, name, decode_first=decode_first, max_tokens=12, ignore_eos=True)
    assert answer["choices"][0]["token_ids"] == alone
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert changed("loaded") == tokens - 1
    both.idle()


def test_the_answer_has_exactly_vllms_fields(pair, make_prompt):
    token_ids = make_prompt(next(SEEDS), 70)
    params = pair.prefill(token_ids)["kv_transfer_params"]
    assert set(params) == VLLM_FIELDS
    page = pair.p.http.get("/kv_transfer").json()
    assert params["remote_engine_id"] == page["engine_id"]
    assert (params["remote_host"], params["remote_port"]) == (page["remote_host"], page["remote_port"])
    ((*blocks,),) = params["remote_block_ids"]
    assert len(set(blocks)) == 3  # 70 tokens: two full blocks and a partial one
    expected = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_num_tokens": 70,
        "remote_prefill_cached_tokens": 0,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
    }
    assert {field: params[field] for field in expected} == expected
    pair.decode(token_ids, params, max_tokens=1)
    pair.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_and_chats_tell_the_parameters_too(pair, path):
    ask = {"prompt": "a hearth"} if "chat" not in path else {"messages": [{"role": "user", "content": "hm"}]}
    keep = {"do_remote_decode": True, "do_remote_prefill": False}
    ask |= {"max_tokens": 1, "temperature": 0, "kv_transfer_params": keep}
    events = pair.p.stream(path, **ask)
    told = [event["kv_transfer_params"] for event in events if "kv_transfer_params" in event]
    assert [set(params) for params in told] == [VLLM_FIELDS]
    whole = pair.p.http.post(path, json={"model": pair.p.name, **ask}).json()
    for params in (*told, whole["kv_transfer_params"]):
        body = ask | {"model": pair.d.name, "max_tokens": 3, "kv_transfer_params": params}
        answer = pair.d.http.post(path, json=body).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert "kv_transfer_params" not in answer
    pair.idle()


HEARTH = [{"role": "user", "content": "A hearth, a kettle, and nobody home. " * 4}]
KETTLE = [{"role": "user", "content": "A kettle, a hearth, and everybody out. " * 4}]  # a cache knows no API
SAMPLED = {"temperature": 0, "max_tokens": 6}


@pytest.mark.parametrize(
    ("path", "ask", "limited", "said"),
    [
        (
            "/v1/messages",
            {"messages": HEARTH, **SAMPLED},
            {"max_tokens": 1},
            lambda answer: answer["content"][0]["text"],
        ),
        (
            "/v1/responses",
            {"input": KETTLE, "temperature": 0, "max_output_tokens": 6},
            {"max_output_tokens": 1},
            lambda answer: answer["output"][0]["content"][0]["text"],
        ),
        (
            "/inference/v1/generate",
            {"token_ids": list(range(3, 150)), "sampling_params": SAMPLED},
            {"sampling_params": {"temperature": 0, "max_tokens": 1}},
            lambda answer: answer["choices"][0]["token_ids"],
        ),
    ],
)
def test_pairs_in_every_dialect(pair, served, path, ask, limited, said):
    def post(engine, **more):
        answer = engine.http.post(path, json={"model": engine.name, **ask, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    alone = post(served)
    keep = {"do_remote_decode": True, "do_remote_prefill": False}
    params = post(pair.p, kv_transfer_params=keep, **limited)["kv_transfer_params"]
    assert set(params) == VLLM_FIELDS
    changed = Watch(pair.d)
    apart = post(pair.d, kv_transfer_params=params)
    assert said(apart) == said(alone)
    assert "kv_transfer_params" not in apart
    assert changed("loaded") == params["remote_num_tokens"] - 1
    pair.idle()


def test_only_what_the_decode_side_lacks_travels(pair, served, make_prompt):
    token_ids = make_prompt(next(SEEDS), 300)
    pair.d.complete(token_ids[:100], max_tokens=1)
    changed = Watch(pair.d)
    assert pair.serial(token_ids, max_tokens=5)["choices"][0]["token_ids"] == served.tokens(
        token_ids, max_tokens=5
    )
    assert changed("loaded") == 299 - 96
    pair.idle()


def test_a_prompt_that_the_decode_side_has_frees_the_peers_blocks(pair, make_prompt):
    token_ids = make_prompt(next(SEEDS), 97)  # three full blocks and the token that is computed anyway
    pair.d.complete(token_ids, max_tokens=1)
    changed = Watch(pair.d)
    answer = pair.serial(token_ids, max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # the peer computed it all
    pair.idle()
    assert changed("blocks") == changed("failed") == 0


def test_cached_tokens_are_what_neither_side_computed(pair, make_prompt):
    token_ids = make_prompt(next(SEEDS), 200)
    pair.p.complete(token_ids[:130], max_tokens=1)
    first = pair.prefill(token_ids)
    assert first["kv_transfer_params"]["remote_prefill_cached_tokens"] == 128
    answer = pair.decode(token_ids, first["kv_transfer_params"], max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    more = make_prompt(next(SEEDS), 64)
    pair.p.complete(more, max_tokens=1)
    assert pair.stream(more, "xfer-cached")["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    pair.idle()


def test_the_prefill_half_tells_which_tier_gave_its_blocks(
    make_served, make_config, make_prompt, make_pair, pair
):
    token_ids = make_prompt(next(SEEDS), 200)
    below = TiersConfig.parse({"host_bytes": "64MiB"})
    with make_served(kv_transfer=make_config(), kv_tiers=below) as p:
        p.complete(token_ids[:130], max_tokens=1)
        assert p.http.post("/reset_prefix_cache").json() == {"success": True}  # the device only
        first = make_pair(p, pair.d).prefill(token_ids)
        details = {"cached_tokens": 128, "cached_tokens_by_tier": {"host": 128}}
        assert first["usage"]["prompt_tokens_details"] == details
        answer = make_pair(p, pair.d).decode(token_ids, first["kv_transfer_params"], max_tokens=2)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == {"p2p": 128}


def test_blocks_that_came_are_known_by_their_content(pair, make_prompt):
    token_ids = make_prompt(next(SEEDS), 70)
    pair.serial(token_ids, max_tokens=1, cache_salt="s")
    other = pair.prefill(token_ids)["kv_transfer_params"]
    root = content_root(pair.d.door.engine._namespace)
    first = content_id(root, token_ids[:32])
    pool = pair.d.door.engine._scheduler.pool
    assert first not in pool.known_contents()  # what was salted is another content
    pair.decode(token_ids, other, max_tokens=1)
    assert {first, content_id(first, token_ids[32:64])} <= pool.known_contents()
    pair.idle()


def test_several_choices_share_what_came(pair, served, make_prompt):
    token_ids = make_prompt(next(SEEDS), 45)
    params = pair.prefill(token_ids)["kv_transfer_params"]
    ask = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
    apart, alone = pair.decode(token_ids, params, **ask), served.complete(token_ids, **ask)
    assert [c["token_ids"] for c in apart["choices"]] == [c["token_ids"] for c in alone["choices"]]
    pair.idle()


def test_many_pairs_at_once(pair, served, make_prompt):
    prompts = [make_prompt(next(SEEDS), 40 + 37 * number) for number in range(8)]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        apart = list(pool.map(lambda token_ids: pair.serial(token_ids, max_tokens=6), prompts))
    for token_ids, answer in zip(prompts, apart, strict=True):
        assert answer["choices"][0]["token_ids"] == served.tokens(token_ids, max_tokens=6)
    pair.idle()


@pytest.mark.real_model
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_real_model_says_the_same_apart(make_served, make_config, make_pair, smollm2, transport):
    options = {"model": str(smollm2), "kv_transfer": make_config(transports=[transport])}
    text = "The blacksmith banked the charcoal for the night, because " * 8
    with make_served(**options) as p, make_served(**options) as d, make_served(**options) as alone:
        token_ids = alone.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        expected = alone.tokens(token_ids, max_tokens=24)
        both = make_pair(p, d)
        assert both.serial(token_ids, max_tokens=24)["choices"][0]["token_ids"] == expected
        changed = Watch(d)
        longer = token_ids[1:]
        streamed = both.stream(longer, "xfer-real", max_tokens=24)["choices"][0]["token_ids"]
        assert changed("loaded") == len(longer) - 1
        assert streamed == alone.tokens(longer, max_tokens=24)
        both.idle()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_pulls_give_way_to_steps(pair, make_prompt, monkeypatch):
    priorities = []

    def watched(*args, **kwargs):
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return pull(*args, **kwargs)

    monkeypatch.setattr(connector, "pull", watched)
    pair.serial(make_prompt(next(SEEDS), 100), max_tokens=4)
    usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert priorities == [min(usual + 5, 19)]
    steps = pair.d.door.engine._thread.native_id
    assert os.getpriority(os.PRIO_PROCESS, steps) == usual
