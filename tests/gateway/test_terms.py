"""Whose a request is, how urgent and how long it waits: what headers say, and what clients are told."""

import asyncio
import json

import msgspec
import pytest

from sumibi.core.errors import BadRequest, ConfigError
from sumibi.gateway.terms import FAIRNESS_HEADERS, OBJECTIVE_HEADERS, objectives_of, terms_of

BODY = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}], "stream": True}
OBJECTIVES = {"critical": 100, "batch": -10}


def terms(tenant="", **headers):
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return terms_of(named, tenant, OBJECTIVES)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2s", 2.0),
        ("1m30s", 90.0),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("0s", None),
        ("0", None),
    ],
)
def test_a_time_limit_is_a_go_duration(text, seconds):
    assert terms(x_llm_d_inference_ttl=text).ttl_s == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("text", ["2", "", "-2s", "2 s", "two", "1e3s", "s", "5d", "9" * 80 + "s"])
def test_anything_else_is_the_client_s_mistake(text):
    with pytest.raises(BadRequest, match="x-llm-d-inference-ttl") as error:
        terms(x_llm_d_inference_ttl=text)
    assert error.value.param == "x-llm-d-inference-ttl"


@pytest.mark.parametrize("header", OBJECTIVE_HEADERS)
@pytest.mark.parametrize(("word", "priority"), [("critical", 100), ("batch", -10), ("100", 0), ("none", 0)])
def test_an_objective_is_a_word_of_the_operator_s(header, word, priority):
    assert terms_of({header: word.encode()}, "", OBJECTIVES).priority == priority


def test_a_fairness_id_is_hidden_and_apart_from_sessions_and_other_tenants():
    ids = {terms_of({header: b"agent 7"}, "", {}).program for header in FAIRNESS_HEADERS}
    assert len(ids) == 1
    named = terms(x_session_id="agent 7", x_llm_d_inference_fairness_id="agent 7")
    assert named.program in ids
    assert named.session not in {"", named.program}
    assert terms("tenant", x_llm_d_inference_fairness_id="agent 7").program not in ids
    assert terms(x_session_id="agent 7").program == ""


@pytest.mark.parametrize("word", ["critical", "=5", "critical=high", "critical=1.5", "a=1=x"])
def test_objectives_on_the_command_line_are_words_with_whole_numbers(word):
    assert objectives_of(["critical=100", "a=b=-5"]) == {"critical": 100, "a=b": -5}
    with pytest.raises(ConfigError, match="--objective"):
        objectives_of([word])
    with pytest.raises(ConfigError, match="twice"):
        objectives_of(["a=1", "a=2"])


async def test_the_router_hears_all_of_it(lab, tmp_path):
    async with lab() as it:
        await it.engine()
        gateway = await it.start(record=tmp_path / "record", objectives=OBJECTIVES)
        headers = {
            "X-LLM-D-Inference-Objective": "critical",
            "X-LLM-D-Inference-Fairness-Id": "my secret agent",
            "X-LLM-D-Inference-TTL": "1m30s",
        }
        assert (await it.ask(body=BODY, headers=headers)).status == 200
        wrong = await it.ask(body=BODY, headers={"x-llm-d-inference-ttl": "soon"})
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "x-llm-d-inference-ttl")
        await gateway.stop(1.0)
        lines = (tmp_path / "record" / "events.jsonl").read_text().splitlines()
        assert not any("secret" in line for line in lines)
        (arrived,) = [event for line in lines if (event := json.loads(line))["type"] == "Arrived"]
        assert (arrived["priority"], arrived["ttl_s"], len(arrived["program"])) == (100, 90.0, 32)


def hold(gateway, bound_s):
    """From now on the gateway holds what cannot begin within `bound_s`."""
    gate = gateway.router._gate
    gate._config = msgspec.structs.replace(gate._config, hold_above_s=bound_s)
    for flow in gate._flows.values():
        flow._config = gate._config


async def busy(it, behaviours):
    """A gateway before one engine that does not answer; further requests are held."""
    engine = await it.engine()
    engine.behave = behaviours.hang
    gateway = await it.start(objectives=OBJECTIVES)
    hold(gateway, 1e-9)
    first = asyncio.ensure_future(it.ask(body=BODY))
    await it.until(lambda: len(engine.requests) == 1)
    return engine, gateway, first


def held(gateway):
    return {(queue.priority, queue.requests) for queue in gateway.router.counters().held_now}


async def test_what_is_held_goes_in_order_of_priority_when_the_engine_is_free(lab, behaviours):
    async with lab() as it:
        engine = await it.engine()
        release = asyncio.Event()

        async def wait(request, writer):
            await release.wait()
            await behaviours.well(request, writer)

        engine.behave = wait
        gateway = await it.start(objectives=OBJECTIVES)
        hold(gateway, 1e-9)
        asked = []
        for number, word in enumerate(["none", "batch", "none", "critical"]):
            headers = {"x-llm-d-inference-objective": word, "x-request-id": f"{word}-{number}"}
            body = {**BODY, "messages": [{"role": "user", "content": f"{word} {number}"}]}
            asked.append(asyncio.ensure_future(it.ask(body=body, headers=headers)))
            await it.until(lambda number=number: len(gateway.shell.completions) == number + 1)
        await it.until(lambda: held(gateway) == {(100, 1), (0, 1), (-10, 1)})
        page = (await it.ask("/metrics", method="GET")).body.decode()
        for line in (
            'sumibi_requests_held{model="test-model",priority="-10"} 1.0',
            'llm_d_epp_flow_control_queue_size{model_name="test-model",priority="100"} 1.0',
            'sumibi_pool_saturation{model="test-model"} 1.0',
        ):
            assert line in page
        release.set()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 4
        ids = [request.headers["x-request-id"] for request in engine.requests]
        assert ids == ["none-0", "critical-3", "none-2", "batch-1"]
        page = (await it.ask("/metrics", method="GET")).body.decode()
        assert 'sumibi_queue_seconds_count{outcome="dispatched"} 4.0' in page
        assert "sumibi_requests_held_total 3.0" in page
        it.assert_nothing_is_held()


async def test_a_client_that_gives_up_and_a_deadline_end_a_wait(lab, behaviours):
    async with lab() as it:
        _, gateway, first = await busy(it, behaviours)
        async with it.client() as leaves:
            asked = asyncio.ensure_future(leaves.ask(body=BODY))
            await it.until(lambda: held(gateway) == {(0, 1)})
            asked.cancel()
        await it.until(lambda: held(gateway) == set())
        late = await it.ask(body=BODY, headers={"x-llm-d-inference-ttl": "50ms"})
        assert (late.status, late.json["error"]["code"]) == (429, "rejected-ttl-expired")
        assert late.headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
        counted = gateway.router.counters().refused
        assert counted == {"rejected-context-cancelled": 1, "rejected-ttl-expired": 1}
        first.cancel()


async def test_who_is_held_when_the_gateway_goes_down_is_told_so(lab, behaviours):
    async with lab() as it:
        _, gateway, first = await busy(it, behaviours)
        asked = asyncio.ensure_future(it.ask(body=BODY))
        await it.until(lambda: held(gateway) == {(0, 1)})
        await gateway.stop(0.05)
        answer = await asked
        assert (answer.status, answer.json["error"]["code"]) == (503, "rejected-shutting-down")
        for header in ("x-sumibi-dropped-reason", "x-llm-d-request-dropped-reason"):
            assert answer.headers[header] == "rejected-shutting-down"
        assert (await first).status == 503
        it.assert_nothing_is_held()
