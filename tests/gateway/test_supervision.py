"""Engines that come, go, restart and tell what their caches hold."""

import asyncio
import json
import socket

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sumibi.core.keys import extend_keys, root_key
from sumibi.core.kvevents import AllBlocksCleared, BlockStored
from sumibi.gateway import supervision
from sumibi.gateway.options import engine_options
from sumibi.routing.events import EngineBatch

CHAT = "/v1/chat/completions"
BLOCK = 16
TOKENS = list(range(100, 100 + 8 * BLOCK))


def completion(tokens=TOKENS, **fields):
    """A prompt given as token ids: its keys need no tokenizer."""
    return {"model": "test-model", "prompt": tokens, **fields}


def stored(tokens, *, first_hash=1):
    """The event of an engine that computed `tokens` (full blocks) from the start."""
    count = len(tokens) // BLOCK
    return BlockStored(
        block_hashes=list(range(first_hash, first_hash + count)),
        parent_block_hash=None,
        token_ids=tokens[: count * BLOCK],
        block_size=BLOCK,
        medium="GPU",
    )


def view(it, engine):
    return next(v for v in it.gateway.router.fleet_view() if v.endpoint == engine.endpoint)


async def ask(it, body=None):
    return await it.ask("/v1/completions", body or completion())


async def test_events_send_a_prompt_where_its_blocks_are(lab):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        first.events, second.events = it.publisher(), it.publisher()
        await it.start()
        await it.until(lambda: all(view(it, e).grade == "exact" for e in it.engines))
        await second.events.publish(stored(TOKENS))
        await it.until(lambda: view(it, second).blocks == 8)
        for _ in range(3):
            assert (await ask(it)).status == 200
        assert (len(first.requests), len(second.requests)) == (0, 3)


async def test_the_keys_of_a_prompt_and_of_events_are_the_same(lab):
    async with lab() as it:
        engine = await it.engine()
        engine.events = it.publisher()
        await it.start()
        await engine.events.publish(stored(TOKENS))
        await it.until(lambda: view(it, engine).blocks == 8)
        await ask(it)
        (decision,) = it.gateway.router.decisions(1)
        assert decision.picked.matched_tokens == 7 * BLOCK  # the last token is always computed
        assert len(extend_keys(root_key("test-model"), TOKENS, BLOCK)) == 8


async def test_a_prompt_for_another_name_of_the_model_goes_where_its_blocks_are(lab):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        for engine in (first, second):
            engine.models, engine.root, engine.events = ["test-model", "alias"], "/weights", it.publisher()
        await it.start()
        await it.until(lambda: all(view(it, e).grade == "exact" for e in it.engines))
        await second.events.publish(stored(TOKENS))
        await it.until(lambda: view(it, second).blocks == 8)
        assert (await ask(it, completion(model="alias"))).status == 200
        assert (await ask(it, completion(model="test-model"))).status == 200
        assert [d.picked.matched_tokens for d in it.gateway.router.decisions()] == [7 * BLOCK] * 2
        assert [r.json["model"] for r in second.requests] == ["alias", "test-model"]  # as the client wrote it


async def test_batches_lost_on_the_way_are_replayed(lab):
    async with lab() as it:
        engine = await it.engine()
        engine.events = it.publisher()
        await it.start()
        await it.until(lambda: view(it, engine).grade == "exact")
        await engine.events.publish(stored(TOKENS[: 2 * BLOCK]))
        await it.until(lambda: view(it, engine).blocks == 2)
        await engine.events.publish(stored(TOKENS[: 4 * BLOCK], first_hash=1), lose=True)
        await engine.events.publish(stored(TOKENS[: 6 * BLOCK], first_hash=1))
        await it.until(lambda: view(it, engine).blocks == 6 and view(it, engine).grade == "exact")
        assert len(engine.events.replays_asked) == 2  # at first, and for the gap
        assert it.gateway.metrics.endpoint(engine.endpoint).replays_failed == 0


async def test_what_was_published_before_the_gateway_came_is_replayed(lab):
    async with lab() as it:
        engine = await it.engine()
        engine.events = it.publisher(topic_in_replay=False)
        await engine.events.publish(stored(TOKENS))
        await it.start()
        await it.until(lambda: view(it, engine).blocks == 8 and view(it, engine).grade == "exact")
        assert engine.events.replays_asked == [0]


async def test_an_engine_that_is_killed_leaves_the_index_at_once_and_returns_when_it_is_ready(lab):
    async with lab() as it:
        engine = await it.engine()
        other = await it.engine()
        engine.events = it.publisher()
        await it.start()
        await engine.events.publish(stored(TOKENS))
        await it.until(lambda: view(it, engine).blocks == 8)
        await ask(it)
        assert len(engine.requests) == 1
        # kill -9, and a new process whose sequence has already passed the old one's
        await engine.stop()
        await it.until(lambda: not it.gateway.watches[0].up)
        await ask(it)
        assert len(other.requests) == 1
        engine.process_start_s += 50
        engine.events.batches.clear()
        engine.events.next_seq += 5
        await engine.start()
        await it.until(lambda: it.gateway.watches[0].up)
        await it.until(lambda: view(it, engine).blocks == 0)
        assert view(it, engine).epoch == 2
        before = len(engine.requests)
        for token in range(20):
            await ask(it, completion([token] * 8))
        assert len(engine.requests) > before
        it.assert_nothing_is_held()


async def test_an_engine_that_moves_its_events_or_drops_a_rank_without_going_down_is_followed_there(lab):
    async with lab() as it:
        engine = await it.engine()
        engine.rank_events = [it.publisher(), it.publisher()]
        await it.start()
        (watch,) = it.gateway.watches
        assert len(it.gateway.router.fleet_view()) == 2
        engine.rank_events = [it.publisher()]
        watch.look()
        await it.until(lambda: len(it.gateway.router.fleet_view()) == 1)
        await it.until(lambda: view(it, engine).grade == "exact")
        await engine.rank_events[0].publish(stored(TOKENS))
        await it.until(lambda: view(it, engine).blocks == 8)
        assert list(it.gateway.metrics.endpoints) == [engine.endpoint]


@pytest.mark.interpreted
async def test_a_fault_of_ours_does_not_end_the_following_of_events(lab, monkeypatch):
    monkeypatch.setattr(supervision, "_REBIND_S", 0.01)
    async with lab() as it:
        engine = await it.engine()
        engine.events = it.publisher()
        gateway = await it.start()
        await it.until(lambda: view(it, engine).grade == "exact")
        handle = gateway.router.handle

        def faulty(event):
            if isinstance(event, EngineBatch):
                gateway.router.handle = handle
                raise ZeroDivisionError
            return handle(event)

        gateway.router.handle = faulty
        await engine.events.publish(stored(TOKENS))
        await it.until(lambda: view(it, engine).blocks == 8 and view(it, engine).grade == "exact")
        assert gateway.metrics.endpoint(engine.endpoint).streams_lost >= 1


async def test_nothing_that_uses_a_zmq_socket_outlives_the_gateway(lab):
    async with lab() as it:
        before = asyncio.all_tasks()
        for _ in range(2):
            engine = await it.engine()
            engine.events = it.publisher()
            engine.events.ends_replays = False
        gateway = await it.start()
        for engine in it.engines:
            for _ in range(3):  # each takes the place of the one before, which is to be cancelled
                gateway.shell.ask_replay(engine.endpoint, 0)
                await asyncio.sleep(0)
        publishers = {task for task in asyncio.all_tasks() if "_serve" in str(task.get_coro())}
        await gateway.stop(0.0)
        for watch in gateway.watches:
            watch.ask_replay(watch.endpoints[0], 0)
        assert asyncio.all_tasks() - before - publishers == set()


async def test_ranks_of_one_engine_are_told_apart_and_addressed(lab):
    async with lab() as it:
        engine = await it.engine()
        engine.rank_events = [it.publisher(), it.publisher()]
        await it.start()
        views = lambda: {v.endpoint: v for v in it.gateway.router.fleet_view()}  # noqa: E731
        assert set(views()) == {f"{engine.url}#0", f"{engine.url}#1"}
        await it.until(lambda: all(v.grade == "exact" for v in views().values()))
        await engine.rank_events[1].publish(stored(TOKENS))
        await it.until(lambda: views()[f"{engine.url}#1"].blocks == 8)
        await ask(it)
        assert engine.requests[-1].headers["x-data-parallel-rank"] == "1"


@pytest.mark.parametrize("binds", ["publisher", "gateway"])
async def test_events_are_followed_where_the_user_says(lab, binds):
    async with lab() as it:
        engine = await it.engine()
        publisher = it.publisher()
        port = publisher.config["endpoint"].rpartition(":")[2]
        address = f"tcp://127.0.0.1:{port}"
        if binds == "gateway":
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            publisher.connect(f"tcp://127.0.0.1:{port}")
            address = f"tcp://*:{port}"
        await it.start(engines=engine_options([engine.url], [f"{engine.url}={address}"]))
        await it.until(lambda: view(it, engine).has_events)
        while view(it, engine).blocks != 8:  # until the subscription has reached the publisher
            await publisher.publish(stored(TOKENS))
            await asyncio.sleep(0.01)


async def test_a_cleared_cache_is_forgotten(lab):
    async with lab() as it:
        engine = await it.engine()
        engine.events = it.publisher()
        await it.start()
        await engine.events.publish(stored(TOKENS))
        await it.until(lambda: view(it, engine).blocks == 8)
        await engine.events.publish(AllBlocksCleared())
        await it.until(lambda: view(it, engine).blocks == 0)


async def test_load_of_others_is_read_from_the_engine_s_metrics(lab):
    async with lab() as it:
        busy, idle = await it.engine(), await it.engine()
        await it.start(policy="least-loaded")
        busy.metrics["vllm:num_requests_running"] = 6.0
        await it.until(lambda: view(it, busy).running == 6)
        for token in range(4):
            await ask(it, completion([token] * 8))
        assert (len(busy.requests), len(idle.requests)) == (0, 4)


async def test_the_router_knows_how_many_an_engine_runs_at_once(lab):
    """By its own word; else by the operator's."""
    async with lab() as it:
        says, silent = await it.engine(), await it.engine()
        says.metrics["sumibi:max_num_seqs"] = 3.0
        await it.start(max_sequences=256)
        assert (view(it, says).max_sequences, view(it, silent).max_sequences) == (3, 256)


async def test_an_engine_that_says_it_is_not_well_gets_no_requests_until_it_is(lab):
    async with lab() as it:
        ill, well = await it.engine(), await it.engine()
        await it.start()
        ill.healthy = False
        await it.until(lambda: not it.gateway.watches[0].up)
        for token in range(4):
            assert (await ask(it, completion([token] * 8))).status == 200
        assert (len(ill.requests), len(well.requests)) == (0, 4)
        ill.healthy = True
        await it.until(lambda: it.gateway.watches[0].up)


async def test_a_model_that_an_engine_begins_to_serve_is_found(lab):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        assert (await ask(it, completion(model="adapter"))).status == 404
        engine.models.append("adapter")
        await it.until(lambda: "adapter" in it.gateway.readers.readers)
        assert (await ask(it, completion(model="adapter"))).status == 200


async def test_prompts_are_tokenised_by_one_engine_once_when_there_is_no_tokenizer_here(lab):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        first.tokens = second.tokens = TOKENS
        await it.start()
        body = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}]}
        before = first.tokenize_calls + second.tokenize_calls
        for _ in range(3):
            assert (await it.ask(CHAT, body)).status == 200
        assert first.tokenize_calls + second.tokenize_calls - before == 1
        assert it.gateway.router.decisions(1)[0].prompt_tokens == len(TOKENS)


async def test_a_tokenising_engine_is_told_thoughts_under_the_name_that_it_reads(lab):
    async with lab() as it:
        engine = await it.engine()
        engine.tokens = TOKENS
        await it.start()
        user = {"role": "user", "content": "hello"}
        answer = {"role": "assistant", "content": "hi", "reasoning_content": "a guest"}
        body = {"model": "test-model", "messages": [user, answer, user]}
        assert (await it.ask(CHAT, body)).status == 200
        assert engine.tokenized["messages"][1]["reasoning"] == "a guest"
        assert engine.requests[-1].json["messages"] == body["messages"]


async def test_an_engine_that_can_tokenise_takes_over_from_those_that_cannot_any_more(lab):
    async with lab() as it:
        _, second, third = await it.engine(), await it.engine(), await it.engine()
        second.tokens = third.tokens = TOKENS
        await second.stop()
        await third.stop()
        gateway = await it.start_only()
        await it.until(lambda: gateway.watches[0].up)
        assert gateway.snapshot().reader_sources == {"test-model": "bytes"}
        for engine, watch in zip(it.engines[1:], gateway.watches[1:], strict=True):
            await engine.start()
            await it.until(lambda watch=watch: watch.up)
        assert gateway.snapshot().reader_sources == {"test-model": "engine"}
        second.tokens = None
        for text in ("one", "two", "three"):
            await ask(it, completion(text))
        lengths = [decision.prompt_tokens for decision in gateway.router.decisions()]
        assert lengths == [1, len(TOKENS), len(TOKENS)]  # one was counted in bytes before the third was asked


async def test_adapters_share_the_reader_of_their_model_and_have_keys_of_their_own(lab, tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.save(str(tmp_path / "tokenizer.json"))
    async with lab() as it:
        engine = await it.engine()
        engine.models, engine.root = ["test-model", "adapter", "another"], str(tmp_path)
        engine.parents = {"adapter": "test-model", "another": "test-model"}
        gateway = await it.start(record=tmp_path / "record")
        for model in engine.models:
            await ask(it, {"model": model, "prompt": "a" * 2 * BLOCK})
        await gateway.stop(1.0)
        log = map(json.loads, (tmp_path / "record" / "events.jsonl").read_text().splitlines())
        keys = [event["keys"] for event in log if event["type"] == "Arrived"]
        ids = bytewise.encode("a" * 2 * BLOCK).ids
        assert keys == [extend_keys(root_key(model), ids, BLOCK).tolist() for model in engine.models]
        readers = gateway.readers.readers
        assert len({id(readers[model].reader) for model in engine.models}) == 1
        assert gateway.snapshot().reader_mismatches == {"test-model": 0}


async def test_without_any_tokenizer_prompts_are_still_told_apart(lab):
    async with lab() as it:
        await it.engine()
        await it.start()
        assert it.gateway.snapshot().reader_sources == {"test-model": "bytes"}
        text = "tell me about fire, " * 200
        body = {"model": "test-model", "messages": [{"role": "user", "content": text}]}
        await it.ask(CHAT, body)
        await it.ask(CHAT, body)
        first, second = it.gateway.router.decisions(2)
        assert (first.picked.matched_tokens, second.picked.matched_tokens > 500) == (0, True)


async def test_an_engine_that_is_not_there_at_start_is_named_and_waited_for(lab, caplog):
    async with lab() as it:
        engine = await it.engine()
        await engine.stop()
        await it.start_only()
        await it.until(lambda: engine.url in caplog.text)
        assert "still trying" in caplog.text
        assert (await it.ask("/health")).status == 503
        await engine.start()
        await it.until(lambda: it.gateway.watches[0].up)
        assert (await it.ask("/health")).status == 200


async def test_many_requests_in_flight_survive_the_death_of_an_engine(lab, behaviours):
    async def slow(request, writer):
        await asyncio.sleep(0.05)
        await behaviours.well(request, writer)

    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        first.behave = second.behave = slow
        await it.start()
        asked = [asyncio.ensure_future(ask(it, completion([i] * 8))) for i in range(40)]
        await it.until(lambda: len(first.requests) >= 10 and len(second.requests) >= 10)
        await first.stop()
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers] == [200] * 40
        it.assert_nothing_is_held()


def hinted(it, engine):
    return it.gateway.metrics.endpoint(engine.endpoint).hints


@pytest.mark.interpreted
async def test_an_idle_conversation_that_sank_is_brought_up_by_the_engine_that_answered_it(lab, monkeypatch):
    # Anybody who is idle for a moment counts as due: how long that is usually is for the router's own tests.
    monkeypatch.setattr("sumibi.routing.hints.SOON", 1e-6)
    monkeypatch.setattr("sumibi.routing.hints.WINDOW_S", 1.0)
    async with lab() as it:
        engine = await it.engine()
        engine.events = it.publisher()
        engine.sources = {
            "kv_prefetch": True,
            "kv_bytes_per_token": 100_000,
            "kv_tiers": [{"name": "cpu", "tokens": 10_000}, {"name": "storage", "tokens": 100_000}],
        }
        await it.start()
        await it.until(lambda: view(it, engine).grade == "exact")
        headers = {"x-request-id": "turn-1"}
        assert (await it.ask("/v1/completions", completion(), headers)).status == 200
        event = msgspec.structs.replace(stored(TOKENS), medium="STORAGE")
        await engine.events.publish(event)
        await it.until(lambda: engine.hints == ["turn-1"] and hinted(it, engine) == {"taken": 1})
        page = (await it.ask("/metrics")).body.decode()
        assert f'sumibi_kv_prefetch_hints_total{{endpoint="{engine.endpoint}",outcome="taken"}} 1.0' in page
        assert "sumibi_kv_prefetch_decided_total 1.0" in page


async def test_a_hint_that_goes_wrong_is_counted_and_breaks_nothing(lab, monkeypatch):
    monkeypatch.setattr(supervision, "_HINT_TIMEOUT_S", 0.2)
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        for status, outcome in ((404, "unknown"), (503, "busy"), (500, "failed")):
            engine.hint_status = status
            it.gateway.shell.hint(engine.endpoint, "r")
            await it.until(lambda outcome=outcome: hinted(it, engine).get(outcome) == 1)
        engine.hint_status = None  # it hangs: four are under way, others are not sent
        for _ in range(7):
            it.gateway.shell.hint(engine.endpoint, "r")
        assert hinted(it, engine)["dropped"] == 3
        assert (await ask(it)).status == 200
        await it.until(lambda: hinted(it, engine)["failed"] == 5)
        engine.hint_status = 202
        it.gateway.shell.hint(engine.endpoint, "r")
        await it.until(lambda: hinted(it, engine).get("taken") == 1)
        await engine.stop()
        it.gateway.shell.hint(engine.endpoint, "r")
        it.gateway.shell.hint("http://nobody:1#0", "r")
        await it.until(lambda: hinted(it, engine)["failed"] + hinted(it, engine)["dropped"] == 9)


async def test_speeds_that_an_engine_has_measured_meanwhile_are_the_router_s(lab, monkeypatch):
    monkeypatch.setattr(supervision, "_MODELS_EVERY", 1)
    async with lab() as it:
        engine = await it.engine()
        engine.events = it.publisher()
        engine.sources = {"kv_tiers": [{"name": "storage", "tokens": 100_000}]}
        await it.start()
        await it.until(lambda: [t.gb_per_s for t in view(it, engine).tiers] == [pytest.approx(7.0)])
        tier = {"name": "storage", "tokens": 100_000, "gb_per_s": 0.5, "latency_s": 0.01}
        engine.sources = {"kv_tiers": [tier]}
        await it.until(lambda: [t.gb_per_s for t in view(it, engine).tiers] == [pytest.approx(0.5)])
        assert view(it, engine).tiers[0].latency_s == 0.01


async def test_what_is_known_of_a_cache_is_told_within_bounds(lab, behaviours, caplog):
    """An engine that breaks every connection changes it with every request."""
    caplog.set_level("INFO")
    async with lab() as it:
        (await it.engine()).behave = behaviours.write_then_break(b"")
        await it.start()
        for _ in range(20):
            await ask(it)
            await it.until(lambda: it.gateway.router.fleet_view()[0].suspect is None)
        lines = [line for line in caplog.messages if "cache knowledge" in line]
        assert len(lines) == 7
        assert "no more is told" in lines[-1]
