"""Prefill and decode apart behind Envoy: the picker names both engines, a sidecar beside the second one runs
the pair, and what became of the prefill half comes back to the ledger.
"""

import pytest
from faking import chat, respond_json, usage

from sumibi.gateway.options import engine_options
from sumibi.gateway.sidecar import Sidecar, sidecar_options

PARAMETERS = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e"}
PARAMETERS |= {
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_prefill_cached_tokens": 3,
}


async def prefilled(request, writer):
    body = {"choices": [], "usage": {"prompt_tokens": 7}, "kv_transfer_params": PARAMETERS}
    await respond_json(writer, 200, body)


async def answered(request, writer):
    await respond_json(writer, 200, {"choices": [], "usage": usage()})


@pytest.mark.parametrize("fault", [False, True], ids=["well", "the prefill engine is dead"])
async def test_a_pair_is_run_by_a_sidecar_and_the_ledger_hears_of_it(lab, fault):
    async with lab() as it:
        prefill, decode = await it.engine(), await it.engine()
        prefill.behave, decode.behave = prefilled, answered
        allowed = [f"127.0.0.1:{prefill.port}"]
        options = sidecar_options(decode.url, "nixlv2", allowed, host="127.0.0.1", port=0, kv_port=5600)
        sidecar = Sidecar(options)
        await sidecar.start()
        try:
            beside = f"http://127.0.0.1:{sidecar.server.port}"
            urls = [f"{prefill.url},role=prefill", f"{beside},role=decode"]
            await it.start_picker(engines=engine_options(urls), policy="round-robin", scrape_interval_s=60.0)
            await it.until(lambda: all(watch.up for watch in it.picker.watches))
            await it.start_envoy(engine_ports=[prefill.port, sidecar.server.port])
            if fault:
                await prefill.stop()
            answer = await it.ask(body=chat())
            assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 3)
            await it.nothing_is_held()
            legs = it.picker.metrics.legs
            *failed, last = it.picker.router.outcomes()
            assert (last.endpoint, last.reason.value) == (f"{beside}#0", "stop")
            if fault:
                assert legs == {("sidecar", "refused"): 1}
                assert [(one.prefill, one.reason.value) for one in failed] == [(prefill.endpoint, "refused")]
                assert last.prefill == ""
                assert "kv_transfer_params" not in decode.requests[-1].json
            else:
                assert legs == {("sidecar", "ok"): 1}
                assert (failed, last.prefill) == ([], prefill.endpoint)
                assert decode.requests[-1].json["kv_transfer_params"] == PARAMETERS
                (first,) = prefill.requests
                assert first.json["max_tokens"] == 1
        finally:
            await sidecar.stop(0.0)
