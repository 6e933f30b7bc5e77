"""One request after another through the real Envoy: what it gets, and what the picker knows of it."""

from faking import CHAT, chat


async def test_a_chat_goes_to_an_engine_and_its_usage_is_recorded(lab):
    async with lab() as it:
        await it.start()
        answer = await it.ask(body=chat())
        assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 3)
        await it.nothing_is_held()
        (record,) = it.usage_records()
        assert (record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == (7, 4, 3)
        assert (record["exact"], record["reason"], record["attempts"]) == (True, "stop", 1)
        assert it.picker.picker.ends == {"completed": 1}
        sent = next(engine.requests[0] for engine in it.engines if engine.requests)
        assert (sent.path, sent.json) == (CHAT, chat())
        print(sent.headers)
