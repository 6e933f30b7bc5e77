"""The embedded engine with KV below the device: what comes back computes the same tokens as what was never
there. The reference is the engine's own first, cold run in float32, so equality is exact."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from sumibi.admin import metrics
from sumibi.core.content import content_id, content_root
from sumibi.core.kvevents import BlockRemoved, BlockStored
from sumibi.engine import kvtiers
from sumibi.engine.blocks import wire_hash
from sumibi.status import TierStatus, tiers_on
from sumibi.tiers import TiersConfig
from sumibi.tiers.blockfile import HEADER_BYTES, decode_header

PROMPT = [(7 * i) % 90 + 3 for i in range(150)]  # 4 full blocks of 32 can be found again, and 22 tokens
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 32  # keys and values, layers, heads, dimensions, float32, tokens
OTHERS = [[(11 * i + 5 * k) % 90 + 3 for i in range(300)] for k in range(4)]


def tiers(**fields):
    return TiersConfig.parse(fields)


def ask(engine, prompt, **fields):
    """Tokens, their log-probabilities, and the usage of a greedy completion."""
    answer = engine.complete(prompt, max_tokens=8, logprobs=0, ignore_eos=True, **fields)
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], answer["usage"]


def settle(engine):
    engine.door.tiers.settle()
    assert engine.door.tiers._tiers.flush(10)


def blocks_in(directory):
    """File and end of every block, in bytes from the file's start."""
    found = []
    for path in sorted(directory.rglob("*.kv")):
        content = path.read_bytes()
        each = HEADER_BYTES + decode_header(content[:HEADER_BYTES]).payload_bytes
        found += [(path, end) for end in range(each, len(content) + 1, each)]
    return found


def reset(engine, query=""):
    assert engine.http.post(f"/reset_prefix_cache{query}").json() == {"success": True}


def series(engine, name):
    """A metric's values by its last label."""
    page = engine.http.get("/metrics").text
    found = re.findall(
        rf'^{re.escape(name)}{{[^}}]*(?:tier|source)="(\w+)"[^}}]*}} (\S+)$', page, re.MULTILINE
    )
    return {label: float(value) for label, value in found}


@pytest.mark.parametrize("where", ["host", "disk", "store"])
def test_what_comes_from_below_gives_exactly_the_tokens_of_a_computation(make_served, tmp_path, where):
    below = {
        "host": {"host_bytes": "64MiB"},
        "disk": {"disk": {"path": str(tmp_path), "bytes": "64MiB"}},
        "store": {"store": {"url": str(tmp_path), "bytes": "64MiB"}},
    }[where]
    with make_served(kv_tiers=tiers(**below)) as engine:
        tokens, logprobs, usage = ask(engine, PROMPT)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        settle(engine)
        reset(engine)  # the device only
        again, same, usage = ask(engine, PROMPT)
        assert (again, same) == (tokens, logprobs)
        details = {"cached_tokens": 128, "cached_tokens_by_tier": {where: 128}}
        assert usage["prompt_tokens_details"] == details
        # The device has it now; and a longer prompt finds part here, part below.
        assert ask(engine, PROMPT)[2]["prompt_tokens_details"] == {"cached_tokens": 128}
        assert engine.metric("vllm:external_prefix_cache_hits_total") == 128
        assert engine.metric("vllm:external_prefix_cache_queries_total") == 150 + 150 + 22
        assert engine.metric("vllm:prefix_cache_hits_total") == 128
        by_source = series(engine, "vllm:prompt_tokens_by_source_total")
        assert by_source == {
            "local_compute": 150 + 22 + 22,
            "local_cache_hit": 128,
            "external_kv_transfer": 128,
        }
        name = {"store": "external_unspecified"}.get(where, where)
        assert series(engine, "vllm:prompt_tokens_cached_by_source_total") == {name: 128, "device": 128}
        assert series(engine, "sumibi:kv_tier_hits_total")[where] == 4
        assert engine.metric("sumibi:kv_load_failed_tokens_total") == 0
        assert engine.door.engine._scheduler.pool.held == 0
        engine.door.engine._scheduler.check_integrity()


def test_what_the_device_evicted_is_found_in_host_memory(make_served):
    with make_served(kv_tiers=tiers(host_bytes="64MiB"), num_gpu_blocks_override=16) as engine:
        tokens, logprobs, _ = ask(engine, PROMPT)
        for other in OTHERS:
            ask(engine, other)
            settle(engine)
        again, same, usage = ask(engine, PROMPT)
        assert (again, same) == (tokens, logprobs)
        assert usage["prompt_tokens_details"]["cached_tokens_by_tier"] == {"host": 128}


def test_a_step_s_blocks_go_down_although_those_of_the_step_before_wait(make_served, monkeypatch):
    """Also where the device holds few steps: what is computed while a copy is made must find room."""
    prompt = [(13 * i) % 90 + 3 for i in range(512)]  # 2 steps of 8 blocks
    below = tiers(host_bytes="64MiB")
    with make_served(kv_tiers=below, num_gpu_blocks_override=40, max_model_len=600) as engine:
        answered = threading.Event()
        copy = engine.door.tiers._model.read_blocks
        monkeypatch.setattr(
            engine.door.tiers._model, "read_blocks", lambda *a: answered.wait(10) and copy(*a)
        )
        ask(engine, prompt)
        answered.set()
        settle(engine)
        assert series(engine, "sumibi:kv_tier_stored_total")["host"] == 16
        assert engine.metric("sumibi:kv_tier_copy_dropped_total") == 0
        reset(engine)
        assert ask(engine, prompt)[2]["prompt_tokens_details"]["cached_tokens_by_tier"] == {"host": 511}


def test_requests_that_press_one_another_off_a_small_device_answer_as_if_alone(make_served):
    below = tiers(host_bytes="64MiB")
    with make_served(kv_tiers=below, num_gpu_blocks_override=24, max_model_len=512) as engine:
        alone = [ask(engine, prompt)[0] for prompt in (PROMPT, *OTHERS)]
        for _ in range(3):
            requests = [
                {"prompt": prompt, "max_tokens": 8, "ignore_eos": True} for prompt in (PROMPT, *OTHERS)
            ]
            assert engine.together(requests) == alone
        settle(engine)
        engine.door.engine._scheduler.check_integrity()
        assert engine.door.engine._scheduler.pool.held == 0
        assert engine.metric("vllm:external_prefix_cache_hits_total") > 0


def test_a_corrupt_file_is_computed_and_counted(make_served, tmp_path):
    below = tiers(disk={"path": str(tmp_path), "bytes": "64MiB"})
    with make_served(kv_tiers=below) as engine:
        tokens, logprobs, _ = ask(engine, PROMPT)
        settle(engine)
        blocks = blocks_in(tmp_path)
        assert len(blocks) == 4
        for path, end in blocks:
            content = bytearray(path.read_bytes())
            content[end - 1000] ^= 1
            path.write_bytes(content)
        reset(engine)
        again, same, usage = ask(engine, PROMPT)
        assert (again, same) == (tokens, logprobs)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert series(engine, "sumibi:kv_tier_corrupt_total")["disk"] >= 1
        assert engine.metric("sumibi:kv_load_failed_tokens_total") == 128


def test_another_engine_finds_what_one_put_into_a_shared_directory(make_served, tmp_path):
    below = tiers(store={"url": str(tmp_path), "bytes": "64MiB"})
    with make_served(kv_tiers=below) as one, make_served(kv_tiers=below) as other:
        tokens, logprobs, _ = ask(one, PROMPT)
        settle(one)
        again, same, usage = ask(other, PROMPT)
        assert (again, same) == (tokens, logprobs)
        assert usage["prompt_tokens_details"]["cached_tokens_by_tier"] == {"store": 128}
        # Another salt is another cache.
        assert ask(other, PROMPT, cache_salt="x")[2]["prompt_tokens_details"]["cached_tokens"] == 0


def test_resetting_the_outside_too_leaves_nothing(make_served, tmp_path):
    below = tiers(host_bytes="64MiB", disk={"path": str(tmp_path), "bytes": "64MiB"})
    with make_served(kv_tiers=below) as engine:
        ask(engine, PROMPT)
        settle(engine)
        reset(engine, "?reset_external=true")
        assert ask(engine, PROMPT)[2]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_reset_of_one_engine_leaves_the_shared_store_to_the_others(make_served, tmp_path):
    below = tiers(store={"url": str(tmp_path), "bytes": "64MiB"})
    with make_served(kv_tiers=below) as one, make_served(kv_tiers=below) as other:
        (before,) = one.http.get("/kv_event_sources").json()["0"]["kv_tiers"]
        published = published_by(one)
        tokens, _, _ = ask(one, PROMPT)
        settle(one)
        assert ask(one, PROMPT)[2]["prompt_tokens_details"]["cached_tokens"] == 128
        reset(one, "?reset_external=true")
        again, _, usage = ask(one, PROMPT)
        assert (again, usage["prompt_tokens_details"]) == (tokens, {"cached_tokens": 0})
        again, _, usage = ask(other, PROMPT)
        assert again == tokens
        assert usage["prompt_tokens_details"]["cached_tokens_by_tier"] == {"store": 128}
        # What it computes after the reset it finds again below, but not the others.
        settle(one)
        reset(one)
        assert ask(one, PROMPT)[2]["prompt_tokens_details"]["cached_tokens_by_tier"] == {"store": 128}
        ask(one, OTHERS[0])
        settle(one)
        assert ask(other, OTHERS[0])[2]["prompt_tokens_details"]["cached_tokens"] == 0
        # To a gateway nothing has left the store of all; what came since is in one of another name.
        (after,) = one.http.get("/kv_event_sources").json()["0"]["kv_tiers"]
        assert after == before | {"name": after["name"]}
        assert after["name"] != before["name"]
        assert other.http.get("/kv_event_sources").json()["0"]["kv_tiers"] == [before]
        eventually(lambda: len(stored_in(published, after)) >= 4 + 9)
        assert set(stored_in(published, after)) == {*chain_of(one, PROMPT), *chain_of(one, OTHERS[0])}
        assert set(stored_in(published, before)) == set(chain_of(one, PROMPT))
        removed = [event for event in published if isinstance(event, BlockRemoved)]
        assert before["name"] not in {event.medium for event in removed}


def stored_in(published, tier):
    """The blocks that came to it by its events."""
    return hashes_of(e for e in published if isinstance(e, BlockStored) and e.medium == tier["name"])


def test_other_weights_never_meet_in_a_shared_directory(make_served, tmp_path):
    below = tiers(store={"url": str(tmp_path), "bytes": "64MiB"})
    with make_served(kv_tiers=below, seed=1) as one:
        ask(one, PROMPT)
        settle(one)
    with make_served(kv_tiers=below, seed=2) as other:
        assert ask(other, PROMPT)[2]["prompt_tokens_details"] == {"cached_tokens": 0}


def published_by(engine):
    """The list to which all its KV events are added."""
    published = []
    sink = engine.door.tiers._events
    publish = sink.publish
    sink.publish = lambda ts, events: (published.extend(events), publish(ts, events))
    return published


def in_host(published, kind):
    """Events of one kind about host memory."""
    return [event for event in published if isinstance(event, kind) and event.medium == "CPU"]


def hashes_of(events):
    return [name for event in events for name in event.block_hashes]


def chain_of(engine, tokens):
    chain = [content_root(engine.door.engine._namespace)]
    for start in range(0, len(tokens) // 32 * 32, 32):
        chain.append(content_id(chain[-1], tokens[start : start + 32]))
    return [wire_hash(each) for each in chain[1:]]


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_tell_what_lies_below_with_its_tokens_and_what_left_it(make_served):
    with make_served(kv_tiers=tiers(host_bytes="64MiB")) as engine:
        published = published_by(engine)
        ask(engine, PROMPT)
        settle(engine)
        eventually(lambda: len(hashes_of(in_host(published, BlockStored))) >= 4)
        stored = in_host(published, BlockStored)
        assert hashes_of(stored) == chain_of(engine, PROMPT)
        assert [t for event in stored for t in event.token_ids] == PROMPT[:128]
        assert stored[0].parent_block_hash is None
        reset(engine, "?reset_external=true")
        eventually(lambda: len(hashes_of(in_host(published, BlockRemoved))) >= 4)
        assert set(hashes_of(in_host(published, BlockRemoved))) == set(chain_of(engine, PROMPT))


def test_what_was_announced_is_taken_back_although_its_tokens_are_forgotten(make_served, monkeypatch):
    monkeypatch.setattr(kvtiers, "_REMEMBERED", 4)
    with make_served(kv_tiers=tiers(host_bytes="64MiB")) as engine:
        published = published_by(engine)
        ask(engine, PROMPT)
        settle(engine)
        eventually(lambda: len(hashes_of(in_host(published, BlockStored))) >= 4)
        ask(engine, OTHERS[0])
        settle(engine)
        reset(engine, "?reset_external=true")
        announced = hashes_of(in_host(published, BlockStored))
        assert set(chain_of(engine, PROMPT)) <= set(announced)
        eventually(lambda: len(hashes_of(in_host(published, BlockRemoved))) >= len(announced))
        assert sorted(hashes_of(in_host(published, BlockRemoved))) == sorted(announced)


def test_the_engine_says_what_tiers_it_has(make_served, tmp_path):
    below = tiers(
        host_bytes="64MiB",
        disk={"path": str(tmp_path / "disk"), "bytes": "1GiB"},
        store={"url": str(tmp_path / "store"), "bytes": "2GiB"},
    )
    with make_served(kv_tiers=below) as engine:
        page = engine.http.get("/kv_event_sources").json()["0"]
        token_bytes = page["kv_bytes_per_token"]
        host, disk, store = page["kv_tiers"]
        assert host == {"name": "cpu", "tokens": (64 << 20) // token_bytes}
        assert disk == {"name": "storage", "tokens": (1 << 30) // token_bytes}
        assert store == {"name": store["name"], "shared": True, "tokens": (2 << 30) // token_bytes}
        # Events call it by the same name; another engine with the same store does too, however it is written.
        published = published_by(engine)
        ask(engine, PROMPT)
        eventually(lambda: {e.medium for e in published} >= {"GPU", "CPU", "STORAGE", store["name"]})
    (tmp_path / "link").symlink_to(tmp_path / "store")
    other = tiers(store={"url": f"file://{tmp_path / 'link'}/", "bytes": "2GiB"})
    with make_served(kv_tiers=other) as engine:
        assert engine.http.get("/kv_event_sources").json()["0"]["kv_tiers"] == [store]
    with make_served(kv_tiers=other, seed=1) as engine:  # other weights have another part of it
        assert engine.http.get("/kv_event_sources").json()["0"]["kv_tiers"][0]["name"] != store["name"]


def test_the_engine_says_how_fast_its_tiers_are_once_it_has_measured(make_served, tmp_path):
    below = tiers(disk={"path": str(tmp_path), "bytes": "64MiB"})
    with make_served(kv_tiers=below) as engine:
        ask(engine, PROMPT)
        for loads in range(3):
            assert "gb_per_s" not in engine.http.get("/kv_event_sources").json()["0"]["kv_tiers"][0], loads
            settle(engine)
            reset(engine)
            begun_s = time.monotonic()
            ask(engine, PROMPT)
            took_s = time.monotonic() - begun_s
        eventually(lambda: series(engine, "sumibi:kv_tier_gb_per_s"))
        (disk,) = engine.http.get("/kv_event_sources").json()["0"]["kv_tiers"]
        # All loads were of four blocks: no latency can be told from bandwidth. Each was part of a request.
        assert disk["latency_s"] == 0
        assert 4 * BLOCK_BYTES / (disk["gb_per_s"] * 1e9) < 2 * took_s
        assert 0 < disk["gb_per_s"] < 100
        assert series(engine, "sumibi:kv_tier_gb_per_s") == {"disk": disk["gb_per_s"]}


def test_status_reads_from_an_engine_what_lies_below(make_served, tmp_path):
    below = tiers(host_bytes="64MiB", store={"url": str(tmp_path), "bytes": "1GiB"})
    with make_served(kv_tiers=below) as engine:
        ask(engine, PROMPT)
        settle(engine)
        reset(engine)
        ask(engine, PROMPT)
        host, store = tiers_on(metrics(f"{engine.http.base_url}/metrics"))
        assert host == TierStatus(
            tier="host", bytes=4 * BLOCK_BYTES, limit_bytes=64 << 20, blocks=4, prompt_share=128 / 300
        )
        assert (store.tier, store.limit_bytes, store.blocks, store.prompt_share) == ("store", 1 << 30, 4, 0)


def test_without_tiers_nothing_is_looked_up_outside(served):
    assert tiers_on(metrics(f"{served.http.base_url}/metrics")) == []
    assert served.http.get("/kv_event_sources").json()["0"]["kv_tiers"] == []
    assert served.metric("vllm:external_prefix_cache_queries_total") == 0


@contextlib.contextmanager
def engine_process(directory):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sumibi", "engine", "--model", "tiny", "--port", "0", "--threads", "1"),
            *("--dtype", "float32", "--kv-tiers"),
            f'{{"host_bytes": "8MiB", "disk": {{"path": "{directory}", "bytes": "64MiB"}}}}',
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.kill()
        process.communicate()


def complete(url):
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]


def test_an_engine_killed_and_started_again_finds_its_blocks_on_disk(tmp_path):
    with engine_process(tmp_path) as (process, url):
        tokens, _ = complete(url)
        deadline = time.monotonic() + 20
        while len(blocks_in(tmp_path)) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    with engine_process(tmp_path) as (_, url):
        again, details = complete(url)
        assert again == tokens
        assert details == {"cached_tokens": 128, "cached_tokens_by_tier": {"disk": 128}}


def test_a_hint_brings_a_request_up_from_disk_before_the_next_one_asks(make_served, tmp_path):
    below = tiers(host_bytes=f"{10 * BLOCK_BYTES}", disk={"path": str(tmp_path), "bytes": "64MiB"})
    with make_served(kv_tiers=below, num_gpu_blocks_override=24, max_model_len=640) as engine:
        name = {"x-request-id": "the-agent's-turn"}
        tokens, logprobs, _ = ask(engine, PROMPT, headers=name)
        settle(engine)
        for other in OTHERS:  # 9 blocks each: the device's 24 and host memory's 10 are gone
            ask(engine, other)
        settle(engine)
        before = engine.http.get("/kv_event_sources").json()["0"]
        assert before["kv_prefetch"] is True
        assert hint(engine, "nobody's") == (404, "unknown")
        assert hint(engine, "the-agent's-turn") == (202, "taken")
        eventually(lambda: engine.metric("sumibi:kv_tier_prefetched_total") == 4)
        again, same, usage = ask(engine, PROMPT)
        assert (again, same) == (tokens, logprobs)
        assert usage["prompt_tokens_details"]["cached_tokens_by_tier"] == {"host": 128}
        assert engine.metric("sumibi:kv_tier_prefetch_used_total") == 4
        # Once more: host memory has it, nothing is read; then others press it out unused.
        assert hint(engine, "the-agent's-turn") == (202, "taken")
        for other in OTHERS:
            ask(engine, other)
        settle(engine)
        assert hint(engine, "the-agent's-turn") == (202, "taken")
        eventually(lambda: engine.metric("sumibi:kv_tier_prefetched_total") == 8)
        for other in OTHERS:
            ask(engine, other)
        settle(engine)
        assert engine.metric("sumibi:kv_tier_prefetch_wasted_total") == 4
        page = engine.http.get("/metrics").text
        assert re.search(r'kv_prefetch_hints_total{.*outcome="taken"} 3.0', page)
        assert re.search(r'kv_prefetch_hints_total{.*outcome="unknown"} 1.0', page)


def test_hints_are_answered_whatever_they_say(make_served, served):
    assert served.http.post("/kv_prefetch", json={"request_id": "r"}).status_code == 404
    with make_served(kv_tiers=tiers(host_bytes="64MiB")) as engine:  # nothing below: nothing to bring up
        assert engine.http.get("/kv_event_sources").json()["0"]["kv_prefetch"] is False
        assert hint(engine, "r") == (404, "unknown")
        for body in (b"", b"[]", b'{"request_id": 5}', b'{"request_id": ""}'):
            answer = engine.http.post("/kv_prefetch", content=body)
            assert answer.status_code == 400
        assert "request_id" in answer.json()["error"]["message"]


def hint(engine, request):
    answer = engine.http.post("/kv_prefetch", json={"request_id": request})
    return answer.status_code, answer.json()["outcome"]
