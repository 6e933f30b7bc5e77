"""Pairs of engines on the wire: what each half gets, and what the client gets, on every way out."""

import asyncio
import itertools
import json
import random

import pytest

from sumibi.gateway.options import Timeouts, engine_options

CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}]}
PARAMETERS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-1",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 70,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 2,
}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 1,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 2},
}
NOTHING = (0, 0, 0, 0)


def answer(parameters=PARAMETERS, usage=USAGE):
    fields = {"choices": [{"message": {"content": "a"}}], "usage": usage}
    return fields if parameters is None else fields | {"kv_transfer_params": parameters}


class Pools:
    """Prefill and decode engines behind one gateway whose policy always takes a pair."""

    def __init__(self, it, behaviours):
        self.it, self.behaviours = it, behaviours

    async def start(self, connector="nixlv2", prefill=1, decode=1, policy="round-robin", **options):
        self.p = [await self.it.engine() for _ in range(prefill)]
        self.d = [await self.it.engine() for _ in range(decode)]
        for engine in self.p:
            engine.behave = self.behaviours.status(200, answer())
        words = [f"{e.url},role=prefill,connector={connector}" for e in self.p]
        words += [f"{e.url},role=decode,connector={connector}" for e in self.d]
        return await self.it.start(engines=engine_options(words), policy=policy, **options)

    def legs(self):
        return dict(self.it.gateway.metrics.legs)

    async def settled(self):
        await self.it.until(lambda: not self.it.gateway.shell.completions)
        await self.it.until(lambda: self.it.gateway.server.buffered_bytes == 0)
        self.it.assert_nothing_is_held()
        for view in self.it.gateway.router.fleet_view():
            assert (view.inflight, view.prefilling, view.coming, view.decoding) == NOTHING


@pytest.fixture
def pools(behaviours):
    return lambda it: Pools(it, behaviours)


async def test_nixlv2_prefills_waits_and_decodes_with_what_came_back(lab, pools):
    async with lab() as it:
        kit = pools(it)
        await kit.start()
        body = {**CHAT, "max_tokens": 50, "min_tokens": 3, "stream_options": None, "seed": 2**70}
        got = await it.ask(body=body, headers={"x-sumibi-attempt": "7"})  # not for clients to say
        assert got.status == 200
        (first,), (second,) = kit.p[0].requests, kit.d[0].requests
        assert first.json == {
            **{k: v for k, v in body.items() if k != "stream_options"},
            "stream": False,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "min_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        assert second.json == {**body, "kv_transfer_params": PARAMETERS}
        ids = {request.headers["x-request-id"] for request in (first, second)}
        assert ids == {got.headers["x-request-id"]}
        assert not any("x-sumibi-attempt" in request.headers for request in (first, second))
        assert got.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 2, "the prefill engine's"
        (record,) = it.usage_records()
        assert (record["cached_tokens"], record["prefill"]) == (2, kit.p[0].endpoint)
        assert record["endpoint"] == kit.d[0].endpoint
        assert kit.legs() == {("nixlv2", "ok"): 1}
        outcome = it.gateway.router.outcomes()[-1]
        assert (outcome.prefill, outcome.cached_tokens) == (kit.p[0].endpoint, 2)
        await kit.settled()


async def test_other_fields_reach_both_engines_byte_for_byte(lab, pools):
    odd = '[ {"content":"\\u00e9\\ud83d\\ude00", "role":"user" , "x":1.50e2} ]'
    others = '"big":123456789012345678901234567890, "x_unknown":1e400, "model":"test-model"'
    body = f'{{"messages" : {odd}, {others}}}'.encode()
    async with lab() as it:
        kit = pools(it)
        await kit.start()
        assert (await it.ask(body=body)).status == 200
        for engine in (kit.p[0], kit.d[0]):
            assert odd.encode() in engine.requests[0].body
            assert b'"big":123456789012345678901234567890' in engine.requests[0].body
            assert b'"x_unknown":1e400' in engine.requests[0].body


async def test_sglang_s_engines_get_the_same_body_at_once(lab, pools, behaviours):
    async with lab() as it:
        kit = pools(it)
        await kit.start("sglang")
        arrived = asyncio.Event()

        async def prefill(request, writer):
            await arrived.wait()  # nothing comes of it unless both are there
            await behaviours.well(request, writer)

        async def decode(request, writer):
            arrived.set()
            await behaviours.well(request, writer)

        kit.p[0].behave, kit.d[0].behave = prefill, decode
        for stream in (False, True):
            assert (await it.ask(body={**CHAT, "max_tokens": 9, "stream": stream})).status == 200
        rooms = set()
        for first, second in zip(kit.p[0].requests, kit.d[0].requests, strict=True):
            assert first.body == second.body
            sent = first.json
            assert (sent["bootstrap_host"], sent["bootstrap_port"], sent["max_tokens"]) == (
                "127.0.0.1",
                8998,
                9,
            )
            assert 0 <= sent["bootstrap_room"] < 2**63
            rooms.add(sent["bootstrap_room"])
        assert len(rooms) == 2
        await kit.settled()


async def test_stream_agrees_on_an_id_beforehand(lab, pools):
    async with lab() as it:
        kit = pools(it)
        await kit.start("stream")
        kit.p[0].behave = kit.behaviours.status(200, answer(None))
        assert (await it.ask(body={**CHAT, "max_tokens": 9})).status == 200
        (first,), (second,) = kit.p[0].requests, kit.d[0].requests
        there, here = first.json["kv_transfer_params"], second.json["kv_transfer_params"]
        assert there == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": here["transfer_id"],
        }
        assert here == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": there["transfer_id"],
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        }
        assert (first.json["max_tokens"], first.json["stream"]) == (1, False)
        assert second.json["max_tokens"] == 9
        await kit.settled()


@pytest.mark.parametrize("seed", range(6))
async def test_cached_tokens_of_a_stream_are_the_prefill_engine_s_however_it_is_cut(
    lab, pools, behaviours, seed
):
    events = [behaviours.token_event(word) for word in "abc"]
    events += [behaviours.usage_event(4321, 21, 4096), "data: [DONE]\n\n"]
    body = "".join(events)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(body)), rng.randint(1, 60)))
    pieces = [body[a:b] for a, b in itertools.pairwise([0, *cuts, len(body)])]
    wire = behaviours.stream_head + b"".join(map(behaviours.chunk, pieces)) + b"0\r\n\r\n"
    async with lab() as it:
        kit = pools(it)
        await kit.start()
        kit.d[0].behave = behaviours.in_pieces(wire, rng.choice([1, 3, 17, 1000]))
        got = await it.ask(body={**CHAT, "stream": True, "stream_options": {"include_usage": True}})
        assert got.events[:3] == [event.removeprefix("data: ").strip() for event in events[:3]]
        usage = json.loads(got.events[3])["usage"]
        assert usage == {
            "prompt_tokens": 4321,
            "completion_tokens": 21,
            "total_tokens": 4342,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert got.events[4] == "[DONE]"
        (record,) = it.usage_records()
        assert record["cached_tokens"] == 2
        await kit.settled()


async def test_without_a_word_of_the_prefill_engine_nothing_counts_as_cached(lab, pools):
    async with lab() as it:
        kit = pools(it)
        await kit.start()
        bare = {k: v for k, v in PARAMETERS.items() if k != "remote_prefill_cached_tokens"}
        kit.p[0].behave = kit.behaviours.status(200, answer(bare, {"prompt_tokens": 7}))
        got = await it.ask(body=CHAT)
        assert got.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await kit.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("told", [{"device": 1, "host": 1}, None])
async def test_tiers_are_the_prefill_engine_s_if_it_tells_them(lab, pools, behaviours, stream, told):
    def usage(by_tier):
        details = {"cached_tokens": 2} | ({"cached_tokens_by_tier": by_tier} if by_tier else {})
        return USAGE | {"prompt_tokens_details": details}

    theirs = {"device": 1, "p2p": 1}
    async with lab() as it:
        kit = pools(it)
        await kit.start()
        kit.p[0].behave = behaviours.status(200, answer(usage=usage(told)))
        if stream:
            events = [behaviours.token_event("a"), "data: " + json.dumps({"usage": usage(theirs)}) + "\n\n"]
            body = "".join([*events, "data: [DONE]\n\n"])
            wire = behaviours.stream_head + behaviours.chunk(body) + b"0\r\n\r\n"
            kit.d[0].behave = behaviours.in_pieces(wire, 17)
        else:
            kit.d[0].behave = behaviours.status(200, {"choices": [], "usage": usage(theirs)})
        got = await it.ask(body={**CHAT, "stream": stream})
        shown = json.loads(got.events[1]) if stream else got.json
        by_tier = told or theirs
        assert shown["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 2,
            "cached_tokens_by_tier": by_tier,
        }
        (record,) = it.usage_records()
        assert (record["cached_tokens"], record["cached_by_tier"]) == (2, by_tier)
        await kit.settled()


BAD_PARAMETERS = [
    None,
    {},
    "text",
    {**PARAMETERS, "remote_engine_id": None},
    {**PARAMETERS, "remote_request_id": ""},
    {**PARAMETERS, "remote_host": ""},
    {**PARAMETERS, "remote_port": 0},
    {**PARAMETERS, "remote_block_ids": None},
    {**PARAMETERS, "remote_block_ids": [[]]},
    {**PARAMETERS, "do_remote_prefill": False},
    {k: v for k, v in PARAMETERS.items() if k != "remote_engine_id"},
]


@pytest.mark.parametrize("parameters", BAD_PARAMETERS)
async def test_parameters_that_no_engine_could_use_lead_to_a_whole_run(lab, pools, parameters):
    async with lab() as it:
        kit = pools(it)
        await kit.start()
        kit.p[0].behave = kit.behaviours.status(200, answer(parameters))
        assert (await it.ask(body=CHAT)).json["choices"][0]["message"]["content"] == "abc"
        (whole,) = kit.d[0].requests
        assert whole.json == CHAT
        assert kit.legs() == {("nixlv2", "bad-parameters"): 1}
        assert it.gateway.router.counters().disagg["decode-only"] == {"fallback": 1}
        await kit.settled()


@pytest.mark.parametrize("connector", ["nixlv2", "sglang", "stream"])
@pytest.mark.parametrize("fault", ["refuses", "dies", "errs", "too many", "hangs"])
async def test_a_prefill_that_fails_leads_to_a_whole_run_and_one_answer(
    lab, pools, behaviours, connector, fault
):
    faults = {
        "dies": behaviours.write_then_break(b""),
        "errs": behaviours.status(500, {"error": "x"}),
        "too many": behaviours.status(429, {"error": "x"}),
        "hangs": behaviours.hang,
    }
    async with lab() as it:
        kit = pools(it)
        times = Timeouts(connect_s=1.0, first_byte_s=0.2) if fault == "hangs" else Timeouts(connect_s=1.0)
        await kit.start(connector, timeouts=times, scrape_interval_s=5.0)

        async def decode(request, writer):
            # As an engine would: nothing comes of a decode half whose KV never does.
            awaited = {"kv_transfer_params", "bootstrap_room"} & set(request.json)
            await (behaviours.hang if awaited else behaviours.well)(request, writer)

        kit.d[0].behave = decode
        if fault == "refuses":
            await kit.p[0].stop()
        else:
            kit.p[0].behave = faults[fault]
        got = await it.ask(body=CHAT)
        if fault == "hangs" and connector != "nixlv2" and got.status != 200:
            assert got.status == 504  # both halves ran out of time together: no time is left for a third
        else:
            assert (got.status, got.json["choices"][0]["message"]["content"]) == (200, "abc")
            whole = kit.d[0].requests[-1]
            assert whole.json == CHAT
            assert whole.headers["x-sumibi-attempt"] == "2"
        if connector != "nixlv2" and fault != "refuses":
            await it.until(lambda: kit.d[0].lost_clients >= 1)  # its half was called off
        await kit.settled()


@pytest.mark.parametrize("connector", ["nixlv2", "sglang", "stream"])
async def test_a_request_at_fault_is_answered_with_the_engine_s_own_words(lab, pools, behaviours, connector):
    async with lab() as it:
        kit = pools(it)
        await kit.start(connector)
        kit.p[0].behave = behaviours.status(400, {"error": {"message": "too long"}})
        kit.d[0].behave = behaviours.hang
        got = await it.ask(body=CHAT)
        assert (got.status, got.json) == (400, {"error": {"message": "too long"}})
        await kit.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_engine_that_cannot_fetch_computes_it_by_itself(lab, pools, behaviours, stream):
    async with lab() as it:
        kit = pools(it)
        await kit.start()
        error = 'data: {"error": {"message": "KV load failed"}}\n\n'

        async def decode(request, writer):
            if "kv_transfer_params" not in request.json:
                await behaviours.well(request, writer)
            elif stream:
                writer.write(behaviours.stream_head + behaviours.chunk(error) + b"0\r\n\r\n")
            else:
                await behaviours.status(500, {"error": {"message": "KV load failed"}})(request, writer)

        kit.d[0].behave = decode
        got = await it.ask(body={**CHAT, "stream": stream})
        assert got.status == 200
        assert b"error" not in got.body
        assert len(kit.d[0].requests) == 2
        assert "kv_transfer_params" not in kit.d[0].requests[1].json
        assert kit.legs() == {("nixlv2", "ok"): 1, ("nixlv2", "decode-failed"): 1}
        await kit.settled()


@pytest.mark.parametrize("connector", ["sglang", "stream"])
@pytest.mark.parametrize(
    ("status", "outcome"), [(503, "decode-failed"), (429, "decode-failed"), (400, "rejected")]
)
async def test_a_pair_that_its_decode_engine_ends_is_counted_once(
    lab, pools, behaviours, connector, status, outcome
):
    async with lab() as it:
        kit = pools(it)
        await kit.start(connector)
        kit.p[0].behave = behaviours.hang

        async def decode(request, writer):
            fetching = {"kv_transfer_params", "bootstrap_room"} & set(request.json)
            await (behaviours.status(status, {}) if fetching else behaviours.well)(request, writer)

        kit.d[0].behave = decode
        got = await it.ask(body=CHAT)
        assert got.status == (400 if status == 400 else 200)
        await kit.settled()
        assert kit.legs() == {(connector, outcome): 1}


async def test_parameters_go_on_to_another_decode_engine_if_the_first_refuses(lab, pools):
    async with lab() as it:
        kit = pools(it)
        await kit.start(decode=2, scrape_interval_s=5.0)
        await kit.d[0].stop()
        for _ in range(2):  # in turn: one of them meets the engine that is gone
            assert (await it.ask(body=CHAT)).status == 200
        assert all(request.json["kv_transfer_params"] == PARAMETERS for request in kit.d[1].requests)
        assert len(kit.p[0].requests) == 2, "what was computed is not computed again"
        assert kit.legs() == {("nixlv2", "ok"): 2, ("nixlv2", "kept"): 1}
        await kit.settled()


@pytest.mark.parametrize("connector", ["nixlv2", "sglang", "stream"])
@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_both_halves(lab, pools, behaviours, connector, where):
    async with lab() as it:
        kit = pools(it)
        await kit.start(connector)
        kit.d[0].behave = behaviours.hang
        if where == "prefill":
            kit.p[0].behave = behaviours.hang
        async with it.client() as client:
            data = json.dumps(CHAT).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n"
            await client.send(head % len(data) + data)
            awaited = kit.p[0] if where == "prefill" else kit.d[0]
            await it.until(lambda: len(awaited.requests) == 1)
            if where == "decode":
                await it.until(lambda: kit.legs() == {(connector, "ok"): 1})
        await it.until(lambda: awaited.lost_clients == 1)
        if connector != "nixlv2":
            await it.until(lambda: kit.d[0].lost_clients == 1)
        await kit.settled()


@pytest.mark.interpreted
async def test_a_client_that_leaves_right_after_the_prefill_still_has_its_parameters_delivered(
    lab, pools, behaviours
):
    """A prefill engine keeps the KV until a decode engine has heard of it, or for a lease of 30 s."""
    async with lab() as it:
        kit = pools(it)
        await kit.start()
        gone = asyncio.Event()

        async def prefill(request, writer):
            await gone.wait()
            await behaviours.status(200, answer())(request, writer)

        kit.p[0].behave = prefill
        kit.d[0].behave = behaviours.hang
        asking = asyncio.ensure_future(it.ask(body=CHAT))
        await it.until(lambda: len(kit.p[0].requests) == 1)
        (completion,) = it.gateway.shell.completions.values()
        over = completion.prefill_over

        def leave_at_once(pair, came):
            over(pair, came)
            completion.client_gone()  # the decode half's connection is still being made

        completion.prefill_over = leave_at_once
        gone.set()
        await it.until(lambda: len(kit.d[0].requests) == 1)
        assert kit.d[0].requests[0].json["kv_transfer_params"] == PARAMETERS
        await it.until(lambda: kit.d[0].lost_clients == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await kit.settled()


async def test_a_decode_engine_that_waits_for_good_is_given_up(lab, pools, behaviours):
    async with lab() as it:
        kit = pools(it)
        await kit.start(timeouts=Timeouts(connect_s=1.0, decode_wait_s=0.1))
        kit.d[0].behave = behaviours.hang
        got = await it.ask(body={**CHAT, "stream": True})
        assert got.status == 504
        assert kit.legs() == {("nixlv2", "ok"): 1, ("nixlv2", "decode-failed"): 1}
        await it.until(lambda: kit.d[0].lost_clients == 1)
        await kit.settled()


async def test_a_client_that_leaves_long_after_the_decode_engine_began_ends_its_work(lab, pools, behaviours):
    """The time for a first byte is over by then, and is nothing to an answer that is under way."""

    async def begin_and_hang(request, writer):
        writer.write(behaviours.stream_head + behaviours.chunk(behaviours.token_event("a")))
        await behaviours.hang(request, writer)

    async with lab() as it:
        kit = pools(it)
        await kit.start(timeouts=Timeouts(connect_s=1.0, decode_wait_s=0.1))
        kit.d[0].behave = begin_and_hang
        async with it.client() as client:
            asking = asyncio.ensure_future(client.ask(body={**CHAT, "stream": True}))
            await it.until(lambda: len(kit.d[0].requests) == 1)
            await asyncio.sleep(0.3)
            assert kit.d[0].lost_clients == 0
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await it.until(lambda: kit.d[0].lost_clients == 1)
        await kit.settled()


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"prompt_logprobs": 0}, {"use_beam_search": True}, {"best_of": 3}]
)
async def test_a_request_that_is_several_is_run_whole(lab, pools, fields):
    async with lab() as it:
        kit = pools(it)
        await kit.start()
        assert (await it.ask(body={**CHAT, **fields})).status == 200
        assert (len(kit.p[0].requests), kit.d[0].requests[0].json) == (0, {**CHAT, **fields})
        assert kit.legs() == {("nixlv2", "unfit-request"): 1}
        await kit.settled()


async def test_one_revision_s_prefill_never_feeds_another_s_decode(lab, pools, behaviours):
    async with lab() as it:
        engines = [await it.engine() for _ in range(4)]
        words = []
        for engine, role, revision in zip(
            engines, ("prefill", "decode") * 2, ("v1", "v1", "v2", "v2"), strict=True
        ):
            words.append(f"{engine.url},role={role},connector=nixlv2,revision={revision}")
        for number in (0, 2):
            named = {**PARAMETERS, "remote_engine_id": f"v{number // 2 + 1}"}
            engines[number].behave = behaviours.status(200, answer(named))
        await it.start(engines=engine_options(words), policy="round-robin")
        for _ in range(8):
            assert (await it.ask(body=CHAT)).status == 200
        for number in (1, 3):
            came = {r.json["kv_transfer_params"]["remote_engine_id"] for r in engines[number].requests}
            assert came == {f"v{number // 2 + 1}"}
        await it.gateway.stop(0.0)
        del it.gateway


@pytest.mark.parametrize("connector", ["nixlv2", "sglang", "stream"])
async def test_a_storm_of_failing_halves_leaves_nothing_and_answers_each_once(
    lab, pools, behaviours, connector
):
    rng = random.Random(11)
    begun = behaviours.stream_head + behaviours.chunk(behaviours.token_event("a"))
    faults = [
        behaviours.write_then_break(b""),
        behaviours.write_then_break(begun),
        behaviours.write_then_break(b"nonsense\r\n\r\n"),
        behaviours.status(500, {}),
        behaviours.status(400, {}),
        behaviours.status(429, {}),
        behaviours.status(200, answer(None)),
        behaviours.status(200, answer({**PARAMETERS, "remote_port": "x"})),
    ]

    def moody(well):
        async def behave(request, writer):
            await asyncio.sleep(rng.choice((0, 0, 0.002, 0.01)))
            await (rng.choice(faults) if rng.random() < 0.4 else well)(request, writer)

        return behave

    async with lab() as it:
        kit = pools(it)
        await kit.start(connector, prefill=2, decode=2)
        for engine in kit.p:
            engine.behave = moody(behaviours.status(200, answer()))
        for engine in kit.d:
            engine.behave = moody(behaviours.well)
        answered = left = 0

        async def client():
            nonlocal answered, left
            for _ in range(20):
                async with it.client() as connection:
                    body = {**CHAT, "stream": rng.random() < 0.5}
                    asking = asyncio.ensure_future(connection.ask(body=body))
                    if rng.random() < 0.2:
                        await asyncio.sleep(rng.choice((0, 0.002, 0.008)))
                        asking.cancel()
                        await asyncio.gather(asking, return_exceptions=True)
                        left += 1
                        continue
                    try:
                        got = await asking
                        assert not got.whole or got.status in (200, 400, 429, 500, 502, 503, 504)
                    except ConnectionError:
                        pass  # cut off after its head: it cannot pass for whole
                    answered += 1

        await asyncio.gather(*(client() for _ in range(10)))
        assert answered + left == 200
        await kit.settled()
        assert it.gateway.server.faults == 0
        assert len(it.usage_records()) == it.gateway.metrics.model("test-model").requests


def told(role, *, port=5701, connector="stream", host="127.0.0.1"):
    """What the embedded engine says of itself at /kv_transfer."""
    return {
        "engine_id": "e",
        "kv_connector": connector,
        "kv_role": role,
        "remote_host": host,
        "remote_port": port,
        "namespace": "n",
        "block_size": 16,
        "kv_lease_duration": 30.0,
    }


async def test_engines_that_say_how_they_hand_kv_over_need_no_words(lab):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        first.transfer, second.transfer = told("kv_producer", host="10.0.0.7"), told("kv_consumer", port=0)
        await it.start(engines=engine_options([first.url, second.url]), policy="round-robin")
        roles = {view.endpoint: view.role for view in it.gateway.router.fleet_view()}
        assert roles == {first.endpoint: "prefill", second.endpoint: "decode"}
        assert (await it.ask(body=CHAT)).status == 200
        (body,) = [request.json["kv_transfer_params"] for request in second.requests]
        assert (body["remote_host"], body["remote_port"]) == ("10.0.0.7", 5701)
        assert dict(it.gateway.metrics.legs) == {("stream", "ok"): 1}
        # It is started again, and its side channel is elsewhere.
        await first.stop()
        await it.until(lambda: not it.gateway.watches[0].up)
        first.transfer = told("kv_producer", port=5999)
        await first.start()
        await it.until(lambda: it.gateway.watches[0].up)
        assert (await it.ask(body=CHAT)).status == 200
        assert second.requests[-1].json["kv_transfer_params"]["remote_port"] == 5999


async def test_the_user_s_words_count_before_the_engine_s(lab):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        first.transfer, second.transfer = told("kv_both"), told("kv_producer")
        words = [f"{first.url},role=prefill,connector=sglang,kv_port=7000", f"{second.url},role=decode"]
        words[1] += ",connector=sglang"
        await it.start(engines=engine_options(words), policy="round-robin")
        roles = {view.endpoint: view.role for view in it.gateway.router.fleet_view()}
        assert roles == {first.endpoint: "prefill", second.endpoint: "decode"}
        assert (await it.ask(body=CHAT)).status == 200
        assert second.requests[0].json["bootstrap_port"] == 7000
        view = it.gateway.metrics.endpoint(first.endpoint).transfer
        assert (view.connector, view.kv_port, view.port_from, view.told_port) == (
            "sglang",
            7000,
            "said",
            5701,
        )


async def test_roles_that_nobody_asked_for_are_not_made_under_a_policy_without_pairs(lab, caplog):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        first.transfer, second.transfer = told("kv_producer"), told("kv_consumer", port=0)
        await it.start(engines=engine_options([first.url, second.url]), policy="least-loaded")
        assert {view.role for view in it.gateway.router.fleet_view()} == {"both"}
        assert (await it.ask(body=CHAT)).status == 200
        assert f"engine {first.url} is for prefill, which the policy has no use for" in caplog.text


async def test_a_role_without_any_word_on_how_kv_is_handed_over_is_said_and_counted(lab, caplog):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        first.transfer = {"kv_connector": 5}  # no answer that means anything
        words = [f"{first.url},role=prefill", f"{second.url},role=decode"]
        await it.start(engines=engine_options(words), policy="round-robin")
        assert (await it.ask(body=CHAT)).status == 200, "a whole run"
        assert (len(first.requests), len(second.requests)) == (0, 1)
        assert dict(it.gateway.metrics.legs) == {("none", "no-connector"): 1}
        assert f"engine {first.url} has a role and does not say how it hands KV over" in caplog.text


async def test_prefill_engines_are_paired_with_whole_ones(lab, behaviours):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        first.behave = behaviours.status(200, answer())
        words = [f"{first.url},role=prefill,connector=nixlv2", f"{second.url},role=both,connector=nixlv2"]
        await it.start(engines=engine_options(words), policy="round-robin")
        assert (await it.ask(body=CHAT)).status == 200
        assert (len(first.requests), len(second.requests)) == (1, 1)
        assert dict(it.gateway.metrics.legs) == {("nixlv2", "ok"): 1}
