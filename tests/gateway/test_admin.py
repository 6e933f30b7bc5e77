"""The admin door, the explanation of one's own request, and what is exported and recorded."""

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sumibi.core.errors import BadRequest, EnvironmentProblem
from sumibi.core.kvevents import BlockStored
from sumibi.gateway.exposition import TABLE
from sumibi.gateway.main import Gateway
from sumibi.gateway.options import GatewayOptions, engine_options
from sumibi.routing.decisions import read_decisions
from sumibi.routing.policies import rerun
from sumibi.routing.recording import replay

CHAT = "/v1/chat/completions"
KEY = "test-admin-key-0123456789"
BODY = {"model": "test-model", "messages": [{"role": "user", "content": "a secret question"}]}


async def look(it, path, headers=None):
    if headers is None:
        headers = {"Authorization": f"Bearer {KEY}"}
    async with it.admin() as client:
        return await client.ask(path, headers=headers)


async def test_every_view_wants_the_key(lab):
    async with lab() as it:
        await it.engine()
        await it.start()
        for path in ("/decisions", "/decisions/x", "/requests/x", "/fleet", "/prompts", "/nothing"):
            for bad in (
                {},
                {"Authorization": "Bearer x"},
                {"X-Admin-Key": KEY[:-1]},
                {"Authorization": KEY},
            ):
                assert (await look(it, path, bad)).status == 401
        assert (await look(it, "/healthz", {})).status == 200
        assert (await look(it, "/fleet", {"X-Admin-Key": KEY})).status == 200
        assert (await it.ask("/fleet", headers={"X-Admin-Key": KEY})).status == 404  # not on the data port


async def test_a_request_is_explained_by_its_id(lab):
    async with lab() as it:
        await it.engine()
        await it.engine()
        await it.start()
        answer = await it.ask(body=BODY)
        explained = (await look(it, f"/requests/{answer.headers['x-request-id']}")).json
        (decision,), (outcome,) = explained["decisions"], explained["outcomes"]
        assert len(decision["candidates"]) == 2
        assert decision["candidates"][decision["pick"]]["endpoint"] == outcome["endpoint"]
        assert outcome["cached_tokens"] == 4
        assert (await look(it, f"/decisions/{decision['id']}")).json["decisions"] == [decision]
        assert "secret" not in json.dumps(explained)
        assert (await look(it, "/requests/unknown")).status == 404


async def test_decisions_are_listed_up_to_a_limit(lab):
    async with lab() as it:
        await it.engine()
        await it.start()
        for _ in range(5):
            await it.ask(body=BODY)
        assert len((await look(it, "/decisions")).json["decisions"]) == 5
        assert len((await look(it, "/decisions?limit=2")).json["decisions"]) == 2
        for wrong in ("0", "-1", "x", "1001", "9" * 5000):
            assert (await look(it, f"/decisions?limit={wrong}")).status == 400


async def test_the_fleet_and_the_readers_are_shown(lab):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        await it.ask(body=BODY)
        fleet = (await look(it, "/fleet")).json
        assert fleet["endpoints"][0]["endpoint"] == engine.endpoint
        assert fleet["wire"][engine.endpoint]["up"] is True
        assert fleet["counters"]["decisions"] == 1
        assert (await look(it, "/prompts")).json["models"]["test-model"]["source"] == "bytes"


async def test_only_the_admin_key_gets_an_explanation_in_the_answer(lab):
    async with lab() as it:
        for _ in range(8):
            await it.engine()
        await it.start()
        for headers in ({}, {"X-Sumibi-Explain": "guess"}, {"X-Sumibi-Explain": ""}):
            assert "x-sumibi-decision" not in (await it.ask(body=BODY, headers=headers)).headers
        answer = await it.ask(body=BODY, headers={"X-Sumibi-Explain": KEY})
        explanation = answer.headers["x-sumibi-decision"]
        assert len(explanation) <= 2048
        assert json.loads(explanation)["endpoint"] in {engine.endpoint for engine in it.engines}
        assert not any("x-sumibi-explain" in r.headers for engine in it.engines for r in engine.requests)


async def test_metrics_have_our_names_and_llm_d_s(lab):
    async with lab() as it:
        await it.engine()
        await it.start()
        await it.ask(body=BODY)
        await it.ask(body={**BODY, "model": "nope"})
        page = (await it.ask("/metrics")).body.decode()
        samples = {s.name: s for f in text_string_to_metric_families(page) for s in f.samples}
        assert samples["sumibi_requests_total"].value == 1
        assert samples["sumibi_requests_total"].labels == {"model": "test-model"}
        assert samples["llm_d_epp_request_total"].labels == {"model_name": "test-model"}
        assert samples["llm_d_epp_request_input_tokens_count"].value == 1
        assert samples["sumibi_requests_refused_total"].labels == {"status": "404"}
        assert samples["llm_d_epp_ready_endpoints"].value == 1


async def test_a_model_s_name_is_a_label_only_once_an_engine_has_named_it(lab):
    async with lab() as it:
        engine = await it.engine()
        await engine.stop()
        gateway = await it.start_only()
        asked = [
            asyncio.ensure_future(it.ask(body={**BODY, "model": model}))
            for model in ("test-model", "made-up", "y" * 300)
        ]
        await it.until(lambda: len(gateway.shell.completions) == 2 and asked[2].done())
        assert (await asked[2]).status == 404  # no engine has such a name
        await engine.start()
        assert (await asked[0]).status == 200
        await it.ask(body=BODY)
        assert {name: c.requests for name, c in gateway.metrics.models.items()} == {
            "other": 2,
            "test-model": 1,
        }
        asked[1].cancel()
        await it.until(lambda: not gateway.shell.completions)
        assert {c.in_flight for c in gateway.metrics.models.values()} == {0}


def test_every_metric_s_name_says_its_unit_or_kind_and_is_named_once():
    names = [row.name for row in TABLE] + [row.twin for row in TABLE if row.twin]
    assert len(names) == len(set(names))
    for row in TABLE:
        assert row.name.startswith("sumibi_")
        assert row.name.endswith("_total") == (row.kind == "counter")
        assert row.help.endswith(".")


async def test_a_recording_holds_no_text_and_reruns_to_the_same_picks(lab, tmp_path):
    async with lab() as it:
        await it.engine()
        await it.engine()
        gateway = await it.start(record=tmp_path / "record")
        for number in range(6):
            messages = [{"role": "user", "content": f"a secret question {number}"}]
            await it.ask(body={**BODY, "messages": messages})
        await gateway.stop(1.0)
        for name in ("events", "decisions", "outcomes"):
            assert "secret" not in (tmp_path / "record" / f"{name}.jsonl").read_text()
        with (tmp_path / "record" / "decisions.jsonl").open("rb") as file:
            again = list(rerun(read_decisions(file)))
        assert len(again) == 6
        assert all(pick.same for pick in again)
        assert len((tmp_path / "record" / "outcomes.jsonl").read_text().splitlines()) == 6


async def test_a_recorded_run_fed_to_a_fresh_router_gives_the_same_decisions(lab, tmp_path):
    tokens = list(range(64))
    async with lab() as it:
        for _ in range(3):
            (await it.engine()).events = it.publisher()
        before = await it.start(record=tmp_path / "record", policy="round-robin")
        await it.ask("/v1/completions", {"model": "test-model", "prompt": tokens})
        await before.stop(1.0)
        gateway = await it.start(record=tmp_path / "record", policy="least-loaded")
        for number in range(12):
            await it.ask(
                "/v1/completions", {"model": "test-model", "prompt": [number % 4, *tokens], "max_tokens": 5}
            )
            stored = BlockStored([number], None, [number % 4, *tokens[:15]], 16, medium="GPU")
            await it.engines[number % 3].events.publish(stored)
        await it.until(lambda: gateway.router.counters().batches == 12)
        await it.ask("/v1/completions", {"model": "test-model", "prompt": [1, *tokens]})
        live = gateway.router.decisions(100)
        await gateway.stop(1.0)
    lines = (tmp_path / "record" / "events.jsonl").read_bytes().splitlines()
    first, fresh = replay(lines)
    assert len(live) == 13
    assert fresh.decisions(100) == live
    assert first.decisions(100) == before.router.decisions(100)
    with pytest.raises(BadRequest, match="line 1: the beginning of this run is not in the log"):
        replay(lines[1:])
    with pytest.raises(BadRequest, match="line 2 is not a recorded event"):
        replay([lines[0], b"{}"])


async def test_a_port_in_use_is_named_with_its_flag(lab):
    async with lab() as it:
        await it.engine()
        first = await it.start()
        options = GatewayOptions(
            engines=engine_options([it.engines[0].url]), port=first.server.port, admin_port=None
        )
        second = Gateway(options)
        with pytest.raises(EnvironmentProblem, match=rf"{first.server.port} \(--port\)"):
            await second.start()
        await second.stop(0.0)
