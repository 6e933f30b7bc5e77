"""The official clients take the gateway's answers and errors for what they are, in classes of their own."""

import asyncio

import anthropic
import openai
import pytest
from speaking import STREAMS, answering

MODEL, HI = "test-model", [{"role": "user", "content": "hello"}]


class Clients:
    """Both, before one gateway; called in threads, as the gateway runs in this loop."""

    def __init__(self, it):
        url = f"http://127.0.0.1:{it.gateway.server.port}"
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)

    def message(self, **fields):
        return self.anthropic.messages.create(**{"model": MODEL, "messages": HI, "max_tokens": 9, **fields})

    def response(self, **fields):
        return self.openai.responses.create(**{"model": MODEL, "input": "hello", **fields})

    def chat(self, **fields):
        return self.openai.chat.completions.create(**{"model": MODEL, "messages": HI, **fields})

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_exc):
        self.openai.close()
        self.anthropic.close()


async def test_answers_are_those_of_the_engine(lab):
    async with lab() as it:
        engine = await it.engine()
        engine.behave = answering()
        await it.start()
        async with Clients(it) as to:
            message = await asyncio.to_thread(to.message)
            assert (message.content[0].text, message.usage.cache_read_input_tokens) == ("abc", 4)
            count = await asyncio.to_thread(to.anthropic.messages.count_tokens, model=MODEL, messages=HI)
            assert count.input_tokens == 7
            response = await asyncio.to_thread(to.response)
            assert response.output_text == "abc"
            events = await asyncio.to_thread(lambda: list(to.message(stream=True)))
            assert [event.type for event in events][-1] == "message_stop"
            events = await asyncio.to_thread(lambda: list(to.response(stream=True)))
            assert events[-1].type == "response.completed"
        assert {request.headers["authorization"] for request in engine.requests} == {"Bearer k"}


ASK = [Clients.message, Clients.response, Clients.chat]


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize(
    ("status", "fields", "kind"),
    [
        (404, {"model": "other"}, "NotFoundError"),
        (400, {"extra_body": {"kv_transfer_params": {}}}, "BadRequestError"),
        (502, {}, "InternalServerError"),
    ],
)
async def test_errors_are_of_the_class_that_their_status_has(lab, behaviours, ask, status, fields, kind):
    sdk = anthropic if ask is Clients.message else openai
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.write_then_break(b"")
        await it.start()
        async with Clients(it) as to:
            with pytest.raises(getattr(sdk, kind)) as error:
                await asyncio.to_thread(ask, to, **fields)
        assert error.value.status_code == status
        if status == 502:  # it was a request, and has an id for whoever is asked what became of it
            assert error.value.request_id.startswith("req")
        assert error.value.body is not None


@pytest.mark.parametrize(
    ("path", "ask"), list(zip(("/v1/messages", "/v1/responses", "/v1/chat/completions"), ASK, strict=True))
)
async def test_a_stream_that_breaks_is_an_error_and_no_end(lab, behaviours, path, ask):
    begun = "".join(STREAMS[path][:3])
    sdk = anthropic if ask is Clients.message else openai
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.write_then_break(behaviours.stream_head + behaviours.chunk(begun))
        await it.start()
        seen = []
        async with Clients(it) as to:

            def read():
                for event in ask(to, stream=True):
                    seen.append(event)

            with pytest.raises(sdk.APIError, match="broke off"):
                await asyncio.to_thread(read)
        assert len(seen) == 3
        it.assert_nothing_is_held()
