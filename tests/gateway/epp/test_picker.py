"""A picker as a whole, with a client in the place of Envoy (the real one: tests/envoy)."""

import asyncio
import json

import pytest
from faking import chat, token_event, usage, usage_event

from sumibi.core.errors import ConfigError
from sumibi.gateway.epp.endpoints import Listed, write
from sumibi.gateway.epp.options import EppOptions, ResponsePhase, check_source, response_phase_of
from sumibi.gateway.epp.pods import Selection
from sumibi.gateway.epp.stream import NO_BODY
from sumibi.gateway.options import GatewayOptions, engine_options

JSON = json.dumps({"choices": [], "usage": usage()}).encode()


def address(engine):
    return f"127.0.0.1:{engine.port}"


async def test_a_request_is_placed_seen_and_forgotten(epp):
    async with epp() as it:
        await it.start()
        call = it.call()
        first, second = (await call.ask()).split(",")
        assert {first, second} == {address(engine) for engine in it.engines}
        picked = next(engine for engine in it.engines if address(engine) == first)
        assert it.view(picked).inflight == 1
        await call.answer(JSON, served=first)
        await it.nothing_is_held()
        (record,) = it.records()
        assert (record["endpoint"], record["output_tokens"], record["exact"]) == (picked.endpoint, 3, True)
        assert call.headers["x-request-id"] == record["request"]


async def test_a_stream_s_first_token_and_end_are_seen(epp):
    async with epp(1) as it:
        await it.start()
        call = it.call()
        await call.ask(chat(stream=True))
        kind = {"content-type": "text/event-stream"}
        await call.answer(token_event("a").encode(), headers=kind, end=False)
        assert (it.view(it.engines[0]).prefilling, it.view(it.engines[0]).decoding) == (0, 1)
        await call.send(response_body={"body": usage_event().encode()})
        await call.send(response_body={"body": b"data: [DONE]\n\n", "end_of_stream": True})
        await it.nothing_is_held()
        assert it.records()[0]["cached_tokens"] == 4


async def test_where_envoy_went_by_itself_is_where_it_was_answered(epp):
    async with epp(3) as it:
        await it.start(scrape_interval_s=60)
        call = it.call()
        first, second, third = (await call.ask()).split(",")
        await call.answer(JSON, served=third)
        await it.nothing_is_held()
        outcomes = [(o.endpoint, o.reason.value) for o in it.server.router.outcomes()]
        assert outcomes == [(f"http://{first}#0", "refused"), (f"http://{third}#0", "stop")]
        assert it.records()[0]["attempts"] == 2
        assert (await it.call().ask(subset=second)) == second


async def test_no_fallbacks_if_none_are_wanted(epp):
    async with epp() as it:
        await it.start(fallbacks=0)
        assert "," not in await it.call().ask()


async def test_a_stream_that_breaks_off_frees_everything(epp):
    async with epp(1) as it:
        await it.start()
        for steps in (1, 2):
            call = it.call()
            await call.ask()
            if steps == 2:
                await call.answer(b"{", end=False)
            await call.leave()
            await it.nothing_is_held()
        assert it.server.picker.ends == {"aborted": 2}


async def test_a_client_that_leaves_while_it_is_held_is_forgotten(epp):
    async with epp(1) as it:
        await it.start(hold_above_s=0.01, max_sequences=1)
        running, held = it.call(), it.call()
        await running.ask(chat("one " * 4000))
        await held.send_request(chat("two " * 4000))
        await it.until(lambda: it.server.router.counters().held == 1)
        await held.leave()
        await it.until(lambda: len(it.server.shell.completions) == 1)
        assert it.server.router.counters().refused == {"rejected-context-cancelled": 1}
        await running.answer(JSON)
        await it.nothing_is_held()


async def test_prompts_that_an_engine_tokenises_are_placed_later(epp):
    async with epp(1) as it:
        it.engines[0].tokens = list(range(40))
        await it.start()
        call = it.call()
        assert await call.ask() == address(it.engines[0])
        await call.answer(JSON)
        await it.nothing_is_held()
        (decision,) = it.server.router.decisions()
        assert decision.prompt_tokens == 40
        leaving = it.call()
        await leaving.send_request(chat("another"))
        await leaving.leave()
        await it.nothing_is_held()


@pytest.mark.interpreted
async def test_a_bug_costs_one_request(epp, monkeypatch):
    async with epp(1) as it:
        await it.start()
        monkeypatch.setattr("sumibi.gateway.epp.visit.terms_of", lambda *_: 1 / 0)
        call = it.call()
        assert await call.ask() == 500
        assert b"internal error" in call.immediate.body
        monkeypatch.undo()
        assert await it.call().ask() == address(it.engines[0])


# -- response phase off


@pytest.mark.parametrize("by", ["the picker", "envoy"])
async def test_without_answers_the_ledger_is_an_estimate_that_engines_set_right(epp, by):
    async with epp(1) as it:
        engine = it.engines[0]
        phase = ResponsePhase.OFF if by == "the picker" else ResponsePhase.AUTO
        await it.start(response_phase=phase)
        assert 'sumibi_ledger_grade{grade="exact"} 1.0' in await it.metrics() or by == "the picker"
        engine.metrics["vllm:num_requests_running"] = 2.0
        for _ in range(3):
            call = it.call()
            await call.ask(chat(max_tokens=100_000), mode=NO_BODY)
            await call.leave()
        page = await it.metrics()
        assert 'sumibi_ledger_grade{grade="estimated"} 1.0' in page
        assert "sumibi_ledger_estimated_requests 3.0" in page
        assert 'sumibi_epp_streams_total{end="unseen"} 3.0' in page
        assert it.view(engine).inflight == 3
        await it.until(lambda: it.view(engine).inflight == 2)  # a scrape said so
        await asyncio.sleep(0.3)
        assert it.view(engine).inflight == 2  # others said the same
        engine.metrics["vllm:num_requests_running"] = 0.0
        await it.until(lambda: it.view(engine).inflight == 0)
        await it.nothing_is_held()
        assert it.server.router.counters().finished == {"stop": 3}


async def test_without_answers_nothing_is_held(epp):
    async with epp(1) as it:
        phase = ResponsePhase.OFF
        await it.start(response_phase=phase, hold_above_s=0.01, max_sequences=1, scrape_interval_s=60)
        for word in ("one ", "two ", "three "):
            assert await it.call().ask(chat(word * 4000)) == address(it.engines[0])
        assert it.server.router.counters().held == 0


async def test_a_short_request_ends_as_predicted_where_no_scrape_says_otherwise(epp):
    async with epp(1) as it:
        await it.start(response_phase=ResponsePhase.OFF, scrape_interval_s=60)
        call = it.call()
        await call.ask(chat(max_tokens=1))
        assert it.view(it.engines[0]).inflight == 1
        await it.nothing_is_held()


# -- pairs by sidecars


def role_of(it, engine):
    return next(v.role for v in it.server.router.fleet_view() if v.endpoint == engine.endpoint)


async def pair(it, told=None, **answer):
    """A prefill engine, two decode engines, and a request that was placed on a pair and answered."""
    prefill, *decodes = it.engines
    words = [",role=prefill", ",role=decode", ",role=decode"]
    urls = [engine.url + word for engine, word in zip(it.engines, words, strict=True)]
    await it.start(engines=engine_options(urls), policy="round-robin", scrape_interval_s=60)
    call = it.call()
    where = (await call.ask()).split(",")
    assert set(where) == {address(engine) for engine in decodes}
    assert call.headers["x-prefiller-host-port"] == address(prefill)
    headers = {} if told is None else {"x-sumibi-prefill": told}
    decode = next(engine for engine in decodes if address(engine) == where[0])
    other = next(engine for engine in decodes if engine is not decode)
    assert (it.view(prefill).prefilling, it.view(decode).inflight) == (1, 1)
    await call.answer(JSON, headers=headers, end=False, **answer)
    return call, prefill, decode, other


async def end(it, call):
    await call.send(response_body={"body": b"", "end_of_stream": True})
    await it.nothing_is_held()


async def test_a_prefill_half_that_a_sidecar_ran_is_told_to_the_ledger(epp):
    async with epp(3) as it:
        call, prefill, decode, _ = await pair(it, "ok; prompt_tokens=7; cached_tokens=3")
        assert (it.view(prefill).inflight, it.view(decode).decoding) == (0, 1)
        await end(it, call)
        (outcome,) = it.server.router.outcomes()
        assert (outcome.endpoint, outcome.prefill) == (decode.endpoint, prefill.endpoint)
        assert it.server.metrics.legs == {("sidecar", "ok"): 1}


@pytest.mark.parametrize("told", [None, "nonsense", "failed; reason=nonsense"])
async def test_a_sidecar_that_says_nothing_is_taken_for_having_run_it(epp, told):
    async with epp(3) as it:
        call, prefill, decode, _ = await pair(it, told)
        assert (it.view(prefill).inflight, it.view(decode).decoding) == (0, 1)
        await end(it, call)


async def test_a_prefill_half_that_failed_is_a_whole_run_where_the_answer_comes_from(epp):
    async with epp(3) as it:
        call, prefill, decode, _ = await pair(it, "failed; reason=refused")
        assert (it.view(prefill).inflight, it.view(decode).decoding) == (0, 1)
        await end(it, call)
        first, second = it.server.router.outcomes()
        assert (first.reason.value, second.reason.value) == ("refused", "stop")
        assert (second.endpoint, second.prefill) == (decode.endpoint, "")
        assert it.server.metrics.legs == {("sidecar", "refused"): 1}


# -- where endpoints come from, health, metrics, drain


async def test_endpoints_come_and_go_with_their_file(epp):
    async with epp(2) as it:
        first, second = it.engines
        path = it.directory / "endpoints.yaml"
        await it.start(wait=False, endpoints_file=path)
        server = it.server
        assert await it.health(server.grpc_port) == 2  # it is not known yet where to go
        write(path, [Listed(name="a", address="127.0.0.1", port=str(first.port))])
        await it.until(lambda: server.ready)
        assert await it.health(server.grpc_port) == 1
        held = it.call()
        assert await held.ask() == address(first)
        write(path, [Listed(name="b", address="127.0.0.1", port=str(second.port))])
        await it.until(lambda: [watch.url for watch in server.watches if watch.up] == [second.url])
        assert [view.endpoint for view in server.router.fleet_view()] == [second.endpoint]
        assert await it.call().ask() == address(second)
        await held.answer(JSON, served=address(first))
        write(path, [])
        await it.until(lambda: not server.watches)
        assert await it.call().ask() == 503
        assert await it.health(server.grpc_port) == 1


@pytest.mark.parametrize(
    "service",
    ["", "liveness", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor", "x"],
)
async def test_every_name_has_the_same_health(epp, service):
    async with epp(1) as it:
        await it.start()
        for port in (it.server.grpc_port, it.server.health_port):
            assert await it.health(port, service) == 1
        stopping = asyncio.create_task(it.server.stop(0.3))
        await it.until(lambda: it.server.draining)
        for port in (it.server.grpc_port, it.server.health_port):
            assert await it.health(port, service) == 2
        await stopping


async def test_metrics_have_llm_d_s_names(epp):
    async with epp(1) as it:
        await it.start()
        call = it.call()
        await call.ask()
        page = await it.metrics()
        assert 'llm_d_epp_request_running{model_name="test-model"} 1.0' in page
        await call.answer(JSON)
        await it.nothing_is_held()
        page = await it.metrics()
        assert 'llm_d_epp_request_total{model_name="test-model"} 1.0' in page
        assert 'sumibi_epp_streams_total{end="completed"} 1.0' in page
        assert "llm_d_epp_ready_endpoints 1.0" in page
        assert 'llm_d_epp_info{name="sumibi"' in page
        assert "llm_d_epp_request_output_tokens_sum" in page


async def test_a_drained_picker_serves_first_and_then_refuses(epp):
    async with epp(1) as it:
        await it.start()
        held, answered = it.call(), it.call()
        await held.ask()
        stopping = asyncio.create_task(it.server.stop(0.5))
        await it.until(lambda: it.server.draining)
        await answered.ask()
        await answered.answer(JSON)
        assert (await held.read()).immediate_response.status.code == 503
        await stopping
        assert it.server.picker.ends == {"completed": 1, "rejected": 1}


def test_endpoints_come_from_one_source():
    one = engine_options(["http://10.0.0.1:80"])
    named = engine_options(["http://localhost:80"])
    check_source(EppOptions(gateway=GatewayOptions(engines=one)))
    check_source(EppOptions(gateway=GatewayOptions(engines=()), pool_name="pool"))
    for engines, more, word in (
        ((), {}, "none is given"),
        (one, {"pool_name": "pool"}, "--engine and --pool-name are given"),
        ((), {"pool_name": "pool", "selection": Selection("a=b", (1,))}, "--endpoint-selector are given"),
        (named, {}, "IP address"),
    ):
        with pytest.raises(ConfigError, match=word):
            check_source(EppOptions(gateway=GatewayOptions(engines=engines), **more))
    with pytest.raises(ConfigError, match="auto or off"):
        response_phase_of("on")
