"""F17, F18, F25, F31, F44: prompts that are not read as engines read them, and names that do not match."""

import base64
import json
import random

import pytest
from routing_lab import BLOCK, Lab, keys_of, prompt

from sumibi.core.keys import extend_keys, root_key
from sumibi.core.kvevents import BlockStored, EventBatch
from sumibi.engines.discovery import endpoint_id
from sumibi.gateway import agreement
from sumibi.gateway.agreement import Agreement
from sumibi.gateway.options import engine_options
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptGrade, PromptReader
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer
from sumibi.prompts.words import Words
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import EndpointDown, FinishReason
from sumibi.routing.router import Router

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "find",
            "parameters": {"type": "object", "b": 1, "a": 2},
        },
    }
]
TALK = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is sumibi? 炭火 <|im_end|> is no end."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "search", "arguments": {"q": "炭火"}}}
        ],
    },
    {"role": "tool", "content": "charcoal fire", "tool_call_id": "1"},
]


def sent(messages):
    """As a client sends them: arguments as JSON text."""
    out = json.loads(json.dumps(messages))
    for message in out:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return out


def request(path, **fields):
    return parse_request(path, json.dumps({"model": "m", **fields}).encode())


def chat(messages, **fields):
    return request("/v1/chat/completions", messages=sent(messages), **fields)


@pytest.fixture
def reader(checkpoint):
    directory = checkpoint("byte-level", "tools-block")
    return PromptReader(Tokenizer.load(directory), ChatTemplate.load(directory), block_tokens=BLOCK)


@pytest.fixture
def oracle(checkpoint, transformers_tokenizer):
    """transformers' rendering and tokens of the same model."""
    return transformers_tokenizer(checkpoint("byte-level", "tools-block"))


def test_f17_the_same_prompt_has_the_same_keys_on_every_api(reader, oracle):
    """R#1861: one API's prompts are not tokenised, so their requests never hit what the others cached."""
    rendered = oracle.apply_chat_template(TALK, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    token_ids = oracle.encode(rendered, add_special_tokens=False)
    assert len(token_ids) > 4 * BLOCK
    as_chat = reader.read(chat(TALK, tools=TOOLS))
    as_text = reader.read(request("/v1/completions", prompt=rendered, add_special_tokens=False))
    as_ids = reader.read(request("/v1/completions", prompt=token_ids))
    system, user, _, result = TALK
    function = TOOLS[0]["function"]
    tool = {"name": "search", "description": "find", "input_schema": function["parameters"]}
    use = {"type": "tool_use", "id": "1", "name": "search", "input": {"q": "炭火"}}
    found = {"type": "tool_result", "tool_use_id": "1", "content": result["content"]}
    said = [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
    as_messages = {"system": system["content"], "messages": said, "tools": [tool]}
    items = [
        user,
        {"type": "function_call", "call_id": "1", "name": "search", "arguments": '{"q": "炭火"}'},
        {"type": "function_call_output", "call_id": "1", "output": result["content"]},
    ]
    tools = [{"type": "function", **function}]
    ways = [
        as_chat,
        as_text,
        as_ids,
        reader.read(request("/v1/messages", **as_messages, max_tokens=1)),
        reader.read(request("/v1/messages/count_tokens", **as_messages)),
        reader.read(request("/v1/responses", instructions=system["content"], input=items, tools=tools)),
        reader.read(request("/inference/v1/generate", token_ids=token_ids, sampling_params={})),
        reader.read(request("/generate", input_ids=token_ids)),
    ]
    expected = extend_keys(root_key("m"), token_ids, BLOCK)
    for read in ways:
        assert (read.keys, read.prompt_tokens) == (expected, len(token_ids))
        assert read.grade is PromptGrade.EXACT


@pytest.mark.parametrize("wrapped", [False, True])
def test_f17_pictures_in_anthropic_s_words_are_sized_as_pictures(reader, wrapped):
    """R#2220, on the other API, also as what a tool brought."""
    text = "what is this? " * 40
    data = base64.b64encode(random.Random(1).randbytes(600_000)).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    if wrapped:
        picture = {"type": "tool_result", "tool_use_id": "1", "content": [picture]}
    said = [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]
    read = reader.read(request("/v1/messages", messages=said, max_tokens=1))
    assert 1024 < read.prompt_tokens < 1024 + len(text)
    assert read.grade is PromptGrade.APPROXIMATE


@pytest.mark.parametrize(
    ("part", "field"), [("image_url", "url"), ("input_audio", "data"), ("video_url", "url")]
)
def test_f17_media_are_sized_as_media_not_as_the_text_they_are_sent_in(reader, part, field):
    """R#2220: a picture in base64 counts as hundreds of thousands of text tokens."""
    text = "what is this? " * 40

    def ask(seed):
        data = base64.b64encode(random.Random(seed).randbytes(600_000)).decode()
        content = [{"type": part, part: {field: data}}, {"type": "text", "text": text}]
        return reader.read(chat([{"role": "user", "content": content}]))

    first, again, other = ask(1), ask(1), ask(2)
    assert 1024 < first.prompt_tokens < 1024 + len(text)
    assert first.keys == again.keys
    assert not set(first.keys) & set(other.keys[2:])
    assert first.grade is PromptGrade.APPROXIMATE


def test_f18_an_engine_s_events_match_the_prompts_it_was_sent(reader, oracle):
    """R#2641, ps#1045, KV#96, KV#147, KV#245: the router renders tools otherwise, or hashes with another
    seed, so its keys match nothing of the engine's. Here the engine's hashes are arbitrary.
    """
    token_ids = oracle.apply_chat_template(
        TALK, tools=TOOLS, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    full = len(token_ids) // BLOCK
    hashes = [random.Random(f"seed {i}").randbytes(32) for i in range(full)]
    lab = Lab()
    lab.up("e", has_events=True)
    event = BlockStored(hashes, None, token_ids[: full * BLOCK], BLOCK, medium="GPU")
    lab.batch("e", EventBatch(seq=0, ts=0.0, events=[event]))
    asked = reader.read(chat(TALK, tools=TOOLS))
    lab.arrive("r", token_ids, keys=asked.keys, prompt_tokens=asked.prompt_tokens)
    spared = min(full, (len(token_ids) - 1) // BLOCK)
    assert lab.candidates("r")["e"].matched_tokens == spared * BLOCK


@pytest.mark.parametrize(
    ("predicted", "actual", "alarm"),
    [(1000, 0, agreement.NOT_FOUND), (0, 1000, agreement.NOT_FORESEEN), (1000, 900, ""), (0, 0, "")],
)
def test_f18_repeats_that_are_never_found_raise_an_alarm(predicted, actual, alarm):
    """The same, when it happens all the same: it is not told by any error, only by sums."""
    agrees, told = Agreement(), []
    for _ in range(50):
        told.append(agrees.observe(predicted, actual))
    assert agrees.alarm == alarm
    assert [text for text in told if text] == ([alarm] if alarm else [])  # once
    for _ in range(500):
        agrees.observe(1000, 1000)
    assert agrees.alarm == ""


async def test_f18_the_alarm_is_logged_and_exported(lab, behaviours, caplog):
    """Requests of a conversation come again and again, and the engine has nothing of them."""
    async with lab() as it:
        engine = await it.engine()
        answer = {"choices": [], "usage": {"prompt_tokens": 1500, "completion_tokens": 1}}
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}
        engine.behave = behaviours.status(200, answer)
        await it.start()
        gauge = 'sumibi_cached_tokens_disagree{model="test-model"}'
        body = {"model": "test-model", "prompt": list(range(1500))}
        for _ in range(3):
            await it.ask("/v1/completions", body)
        page = (await it.ask("/metrics")).body.decode()
        assert f"{gauge} 0.0" in page
        for i in range(15):
            # Each time another prompt, twice: what was believed of it is corrected after the second.
            for _ in range(2):
                await it.ask("/v1/completions", {**body, "prompt": [i + 1, *range(1500)]})
        page = (await it.ask("/metrics")).body.decode()
        assert f"{gauge} 1.0" in page
        assert caplog.text.count(agreement.NOT_FOUND) == 1


SPELLINGS = [
    "http://10.0.0.7:8000",
    "http://10.0.0.7:8000/",
    "HTTP://10.0.0.7:8000",
    " http://10.0.0.7:8000 ",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_f25_one_endpoint_has_one_name_however_it_is_spelt(spelling):
    """L#1008: events name the ip, the pool ip:port: every score is 0."""
    (option,) = engine_options([spelling], [f"{spelling.strip()}=tcp://10.0.0.7:5557"])
    assert endpoint_id(option.url) == "http://10.0.0.7:8000#0"
    assert option.kv_events == "tcp://10.0.0.7:5557"


def test_f25_the_port_is_never_left_out():
    """The default one is written out, and another one is another endpoint."""
    names = {endpoint_id(url) for url in ("http://h", "http://h:80", "http://H:80/")}
    assert names == {"http://h:80#0"}
    assert endpoint_id("http://h:8000") != endpoint_id("http://h:8001") != endpoint_id("http://h")


def adapter_blocks(token_ids, *, name="ad", first=1, lora_id=1):
    count = len(token_ids) // BLOCK
    hashes = list(range(first, first + count))
    return BlockStored(hashes, None, token_ids, BLOCK, lora_name=name, lora_id=lora_id, medium="GPU")


def matched(lab, token_ids, endpoint, model):
    name = f"probe{len(lab.router.decisions(1000))}"
    lab.arrive(name, [*token_ids, 1], model=model)
    tokens = lab.candidates(name)[endpoint].matched_tokens
    lab.finish(name, FinishReason.CLIENT_GONE)
    return tokens


def test_f31_an_adapter_that_is_named_is_not_taken_for_cached():
    """R#2605: an adapter that is "active" somewhere counts as resident; a tier of the score that nothing
    reaches. What is there is what events said, for this adapter and no other.
    """
    lab = Lab()
    lab.up("a", "b", models=["m", "ad", "other"], has_events=True)
    token_ids = prompt("p", 4 * BLOCK)
    lab.batch("b", EventBatch(seq=0, ts=0.0, events=[adapter_blocks(token_ids)]))
    found = {(e, m): matched(lab, token_ids, e, m) for e in "ab" for m in ("m", "ad", "other")}
    assert {where for where, tokens in found.items() if tokens} == {("b", "ad")}
    assert found["b", "ad"] == 4 * BLOCK
    assert lab.ask("r", [*token_ids, 1], model="ad") == "b"
    lab.up("a", models=["m", "ad"], has_events=True)
    assert lab.ask("s", [*token_ids, 1], model="other") == "b"  # the only one that has it


def test_f31_the_version_of_an_adapter_is_in_its_keys():
    """vllm#30931, the means: the same name in another version is another cache."""
    token_ids = prompt("p", 4 * BLOCK)
    roots = [root_key("m", adapter="ad", adapter_version=version) for version in ("", "1", "2")]
    keys = [extend_keys(root, token_ids, BLOCK) for root in roots]
    assert len({key for each in keys for key in each}) == 12


@pytest.mark.parametrize("has_events", [True, False])
def test_f31_an_adapter_reloaded_under_its_name_hits_nothing_of_the_old_one(has_events):
    """vllm#30931: an adapter is reloaded under one name and the KV of the old weights counts as hits."""
    lab = Lab()
    lab.up("e", models=["m", "ad"], has_events=has_events)
    token_ids = prompt("p", 4 * BLOCK)
    if has_events:
        lab.batch("e", EventBatch(seq=0, ts=0.0, events=[adapter_blocks(token_ids)]))
    else:
        lab.ask("r", [*token_ids, 1], model="ad")
        lab.first("r")
        lab.finish("r")
    assert matched(lab, token_ids, "e", "ad") == 4 * BLOCK
    lab.up("e", models=["m"], has_events=has_events)
    lab.up("e", models=["m", "ad"], has_events=has_events)
    assert matched(lab, token_ids, "e", "ad") == 0


@pytest.mark.parametrize("has_events", [True, False])
def test_f31_what_others_have_stays_when_an_adapter_leaves(has_events):
    """vllm#30931, the price: no more is forgotten than the adapter's own, there; and a log says the same."""
    lab, names, token_ids = Lab(), ["m", "ad", "other"], prompt("p", 4 * BLOCK)
    for endpoint in "ef":
        lab.up(endpoint, models=names, has_events=has_events, process_start_s=1.0)
        for n, model in enumerate(names):
            if has_events:
                stored = adapter_blocks(
                    token_ids, first=10 * n, name=None if model == "m" else model, lora_id=None
                )
                lab.batch(endpoint, EventBatch(seq=n, ts=0.0, events=[stored]))
            else:
                lab.ask(f"{endpoint}{model}", [*token_ids, 1], model=model)
                lab.first(f"{endpoint}{model}")
                lab.finish(f"{endpoint}{model}")
        lab.tell(EndpointDown, endpoint=endpoint, cause="away for a moment")
    for endpoint in "ef":
        lab.up(endpoint, models=names, has_events=has_events, process_start_s=1.0)
    if has_events:
        for endpoint in "ef":
            lab.batch(endpoint, EventBatch(seq=3, ts=0.0, events=[]))
    everything = {(e, m): 4 * BLOCK for e in "ef" for m in names}
    assert {(e, m): matched(lab, token_ids, e, m) for e, m in everything} == everything
    lab.up("e", models=["m", "other"], has_events=has_events, process_start_s=1.0)
    lab.up("e", models=names, has_events=has_events, process_start_s=1.0)
    found = {(e, m): matched(lab, token_ids, e, m) for e, m in everything}
    assert found == everything | {("e", "ad"): 0}
    fresh = Router(RouterConfig(hold_above_s=None))
    for event in lab.recorded:
        fresh.handle(event)
    assert fresh.decisions(1000) == lab.router.decisions(1000)


def test_f31_a_prompt_that_was_under_way_when_its_adapter_left_is_not_remembered():
    """vllm#30931: it ends after the old weights have gone."""
    lab, token_ids = Lab(), prompt("p", 4 * BLOCK)
    lab.up("e", models=["m", "ad"])
    lab.ask("r", [*token_ids, 1], model="ad")
    lab.up("e", models=["m"])
    lab.first("r")
    lab.finish("r")
    lab.up("e", models=["m", "ad"])
    assert matched(lab, token_ids, "e", "ad") == 0


class Counting:
    """How many characters are tokenised from now on: by words, or by the tokenizers library."""

    def __init__(self, monkeypatch):
        self.characters = 0
        one, many, by_words = Tokenizer.encode, Tokenizer.encode_batch, Words.ids

        def ids(words, text):
            self.characters += len(text)
            return by_words(words, text)

        def encode(tokenizer, text, **options):
            self.characters += len(text)
            return one(tokenizer, text, **options)

        def encode_batch(tokenizer, texts, **options):
            self.characters += sum(map(len, texts))
            return many(tokenizer, texts, **options)

        monkeypatch.setattr(Tokenizer, "encode", encode)
        monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
        monkeypatch.setattr(Words, "ids", ids)


@pytest.mark.interpreted
def test_f44_a_long_conversation_costs_what_a_turn_adds(checkpoint, monkeypatch):
    """R#1109, R#1287, R#1342, R#1239, R#1290, R#1906: prompts of 220 KB cost more than a second each, as
    every turn is rendered and tokenised from its beginning. (Times: `benchmarks/prompts`.)
    """
    directory = checkpoint("byte-level", "chatml")
    tokenizer = Tokenizer.load(directory)
    reader = PromptReader(tokenizer, ChatTemplate.load(directory), block_tokens=BLOCK)
    counting = Counting(monkeypatch)
    words = "the cache holds blocks of tokens, each named by a chain of hashes. " * 30
    messages = [{"role": "system", "content": words}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": f"{i} {words}"} for i in range(109)]
    assert len(json.dumps(messages)) > 220_000
    first = reader.read(chat(messages))
    assert counting.characters > 200_000
    for turn in range(5):
        counting.characters = 0
        again = reader.read(chat(messages))
        assert counting.characters == 0
        assert again.keys == first.keys
        messages.append({"role": "assistant", "content": f"answer {turn}"})
        messages.append({"role": "user", "content": f"question {turn}"})
        first = reader.read(chat(messages))
        assert 0 < counting.characters < 500
        assert first.prompt_tokens - first.reused_tokens < 200
    stats = reader.stats()
    assert (stats.whole, stats.seen, stats.grown, stats.mismatches) == (1, 5, 5, 0)


async def test_f44_an_engine_is_asked_for_the_tokens_of_a_prompt_once(lab):
    """The same where the gateway has no tokenizer: one question a new prompt, to one engine of all."""
    async with lab() as it:
        engines = [await it.engine() for _ in range(3)]
        for engine in engines:
            engine.tokens = list(range(100))
        await it.start()
        for engine in engines:
            engine.tokenize_calls = 0
        for _ in range(5):
            await it.ask("/v1/completions", {"model": "test-model", "prompt": "one prompt"})
        assert sum(engine.tokenize_calls for engine in engines) == 1
        decisions = it.gateway.router.decisions()
        assert [d.prompt_tokens for d in decisions] == [100] * 5


def test_f18_keys_of_chats_with_salts_do_not_meet(reader):
    """Tenants with salts of their own share no keys, with the same text on any API."""
    keys = [
        reader.read(chat(TALK, **fields)).keys for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    ]
    assert len({key for each in keys for key in each}) == sum(map(len, keys)) > 0
    assert keys_of([1] * BLOCK) != keys_of([1] * BLOCK, salt="a")


def test_f42_children_without_any_header_are_charged_to_their_parent():
    """R#2794, the other half: child agents that name nothing, told by what their prompts go on with."""
    lab = Lab(hold_above_s=1.0)
    lab.up("e")
    system = prompt("system", 4 * BLOCK)

    def program(name, token_ids):
        lab.arrive(name, token_ids)
        whose = lab.router._requests[name].program
        lab.finish(name, FinishReason.CLIENT_GONE)
        return whose

    def first(user):
        return system + prompt(user, 4 * BLOCK)

    def second(user):
        return first(user) + prompt(f"{user} again", 4 * BLOCK)

    parent = program("parent", first("a"))
    assert program("parent, next turn", second("a")) == parent
    children = [program(f"child{i}", second("a") + prompt(f"task{i}", 4 * BLOCK)) for i in range(20)]
    assert set(children) == {parent}
    grandchild = second("a") + prompt("task7", 4 * BLOCK) + prompt("deeper", 4 * BLOCK)
    assert program("grandchild", grandchild) == parent
    others = [program(f"user{i}", first(f"user{i}")) for i in range(20)]
    assert len({*others, parent}) == 21
