"""Routing keys equal those of transformers' rendering and tokens, whichever way they were come by."""

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.core.errors import BadRequest
from sumibi.core.keys import extend_keys, root_key
from sumibi.prompts.chats import CHECK_EVERY
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptGrade, PromptReader
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

BLOCK = 8
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
]
SYSTEM = {"role": "system", "content": "be brief, and never say more than you know"}


def chat(messages, **fields):
    body = {"model": "m", "messages": messages, **fields}
    return parse_request("/v1/chat/completions", json.dumps(body).encode())


def plain(prompt, **fields):
    return parse_request("/v1/completions", json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


def talk(turns, start=0, role="user"):
    """`turns` messages of alternating roles, the first of `role`."""
    order = ["user", "assistant"] if role == "user" else ["assistant", "user"]
    return [{"role": order[at % 2], "content": f"{order[at % 2]} says {start + at}"} for at in range(turns)]


@pytest.fixture
def make_reader(checkpoint):
    """`make_reader(template_name, kind=..., **options)`: a reader of that checkpoint."""

    def make(template="chatml", kind="byte-level", **options):
        directory = checkpoint(kind, template)
        options = {"block_tokens": BLOCK, "keep_token_ids": True, **options}
        return PromptReader(Tokenizer.load(directory), ChatTemplate.load(directory), **options)

    return make


@pytest.fixture
def expected(checkpoint, transformers_tokenizer):
    """`expected(template, seen, ...)`: transformers' token ids for messages in canonical form."""

    def ids(template, seen, *, kind="byte-level", **options):
        oracle = transformers_tokenizer(checkpoint(kind, template))
        options = {"add_generation_prompt": True, **options}
        return oracle.apply_chat_template(seen, tokenize=True, return_dict=False, **options)

    return ids


def assert_is(prompt, token_ids, *, model="m", salt="", block=BLOCK):
    assert prompt.token_ids == token_ids
    assert prompt.prompt_tokens == len(token_ids)
    assert prompt.keys == extend_keys(root_key(model, salt=salt), token_ids, block)
    assert prompt.grade is PromptGrade.EXACT
    assert 0 <= prompt.reused_tokens <= prompt.prompt_tokens


@pytest.mark.parametrize("cache_bytes", [1 << 20, 20_000, 0], ids=["roomy", "tight", "none"])
def test_keys_of_growing_and_forking_conversations_are_exact(
    make_reader, expected, habit, conversations, cache_bytes
):
    reader = make_reader(habit, cache_bytes=cache_bytes)

    @settings(max_examples=25)
    @given(conversations(max_turns=3), conversations(max_turns=2), st.data())
    def check(conversation, other, data):
        for _ in range(3):
            (sent, seen), (more_sent, more_seen) = conversation, other
            cut = data.draw(st.integers(0, len(sent)))
            sent, seen = sent[:cut] + more_sent, seen[:cut] + more_seen  # it forks and grows
            for length in sorted(data.draw(st.sets(st.integers(1, len(sent)), min_size=1, max_size=3))):
                tools = data.draw(st.sampled_from([None, TOOLS]))
                wanted = seen[:length]
                if habit == "parts":
                    wanted = [as_parts(message) for message in wanted]
                try:
                    token_ids = expected(habit, wanted, tools=tools)
                except Exception:
                    with pytest.raises(BadRequest):
                        reader.read(chat(sent[:length], tools=tools))
                    continue
                assert_is(reader.read(chat(sent[:length], tools=tools)), token_ids)

    check()
    stats = reader.stats()
    assert (stats.mismatches, stats.fast_paths_off) == (0, "")
    assert stats.cache_bytes <= cache_bytes


def as_parts(message):
    if message["role"] == "tool":
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def test_a_long_conversation_is_exact_at_every_turn(make_reader, expected, append_only, habit):
    reader = make_reader(habit)
    messages = [SYSTEM, *talk(200)]
    for length in range(2, len(messages) + 1, 2):
        seen = [as_parts(m) for m in messages[:length]] if habit == "parts" else messages[:length]
        assert_is(reader.read(chat(messages[:length])), expected(habit, seen))
    stats = reader.stats()
    assert stats.grown == (99 if habit in append_only else 0)
    assert stats.mismatches == 0


def test_a_conversation_with_any_vocabulary_is_exact(make_reader, checkpoint, kind):
    template = "inst" if kind != "byte-level" else "chatml"
    reader = make_reader(template, kind)
    directory = checkpoint(kind, template)
    tokenizer, rendered = Tokenizer.load(directory), ChatTemplate.load(directory)
    for length in range(1, 20, 2):
        messages = talk(length)
        ids = tokenizer.encode(rendered.render(messages), add_special_tokens=False)
        assert_is(reader.read(chat(messages)), ids)


def test_what_was_seen_before_is_not_tokenised_again(make_reader):
    reader = make_reader()
    messages = [SYSTEM, *talk(5)]
    first = reader.read(chat(messages))
    again = reader.read(chat(messages))
    assert (first.reused_tokens, again.reused_tokens) == (0, again.prompt_tokens)
    assert (again.keys, again.token_ids) == (first.keys, first.token_ids)
    stats = reader.stats()
    assert (stats.whole, stats.seen, stats.grown) == (1, 1, 0)
    assert (stats.prompt_tokens, stats.reused_tokens) == (2 * first.prompt_tokens, first.prompt_tokens)


def test_of_a_grown_conversation_only_the_new_part_is_tokenised(make_reader):
    reader = make_reader()
    messages = [SYSTEM, *talk(5)]
    first = reader.read(chat(messages))
    grown = reader.read(chat([*messages, *talk(2, 5, "assistant")]))
    assert grown.reused_tokens >= first.prompt_tokens - 15  # the generation prompt is written anew
    assert reader.stats().grown == 1


def test_conversations_that_begin_alike_share_their_beginning(make_reader):
    reader = make_reader("drops-thoughts")
    system = {"role": "system", "content": "long " * 50}
    first = reader.read(chat([system, {"role": "user", "content": "one"}]))
    second = reader.read(chat([system, {"role": "user", "content": "two"}]))
    assert second.reused_tokens > 0.9 * first.prompt_tokens
    assert second.keys[: len(first.keys) - 2] == first.keys[:-2]


def test_other_spellings_of_the_same_messages_have_the_same_keys(make_reader):
    reader = make_reader()
    spaced = json.dumps({"messages": [SYSTEM, *talk(3)], "model": "m"}, indent=2).encode()
    prompts = [
        reader.read(chat([SYSTEM, *talk(3)])),
        reader.read(parse_request("/v1/chat/completions", spaced)),
    ]
    assert prompts[0].keys == prompts[1].keys
    assert prompts[1].reused_tokens == prompts[1].prompt_tokens


SEPARATORS = {
    "model": {"model": "other"},
    "salt": {"cache_salt": "s"},
    "tools": {"tools": TOOLS},
    "arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "no prompt": {"add_generation_prompt": False},
    "special tokens": {"add_special_tokens": True},
}


@pytest.mark.parametrize("fields", SEPARATORS.values(), ids=SEPARATORS.keys())
def test_what_changes_the_prompt_is_never_taken_for_the_same(checkpoint, fields):
    directory = checkpoint("metaspace", "tools-block")
    parts = Tokenizer.load(directory), ChatTemplate.load(directory)
    shared = PromptReader(*parts, block_tokens=4, keep_token_ids=True)
    messages = [SYSTEM, *talk(3)]
    requests = [chat(messages), chat(messages, **fields)] * 2
    fresh = [PromptReader(*parts, block_tokens=4, keep_token_ids=True).read(request) for request in requests]
    read = [shared.read(request) for request in requests]
    assert [(p.keys, p.token_ids) for p in read] == [(p.keys, p.token_ids) for p in fresh]
    assert read[0].keys != read[1].keys


def test_a_salt_and_a_model_separate_keys_as_the_router_separates_them(make_reader, expected):
    prompt = make_reader().read(chat([SYSTEM, *talk(3)], model="adapter", cache_salt="s"))
    assert_is(prompt, expected("chatml", [SYSTEM, *talk(3)]), model="adapter", salt="s")


def test_a_continued_message_is_exact(make_reader, expected):
    messages = [SYSTEM, *talk(2)]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for _ in range(2):
        assert_is(make_reader().read(chat(messages, **options)), expected("chatml", messages, **options))


def test_a_new_date_is_not_missed(make_reader, monkeypatch):
    reader = make_reader("dated")
    keys = {}
    for day in ("one", "one", "two", "two"):
        monkeypatch.setattr("sumibi.prompts.template._strftime_now", lambda pattern, day=day: day)
        keys.setdefault(day, []).append(reader.read(chat([SYSTEM, *talk(3)])).prompt_tokens)
    assert reader.stats().seen == 2


def test_texts_are_exact_and_share_beginnings(make_reader, checkpoint, transformers_tokenizer, kind):
    reader = make_reader(None, kind)
    oracle = transformers_tokenizer(checkpoint(kind, None))
    text = "<|im_start|>user\nhi<|im_end|>\n</s>" * 5
    for prompt, special in (
        (text, True),
        (text + "more", True),
        (text, False),
        ("", True),
        ("no special", True),
    ):
        ids = oracle(prompt, add_special_tokens=special)["input_ids"]
        assert_is(reader.read(plain(prompt, add_special_tokens=special)), ids)
    assert reader.read(plain(text + "more")).reused_tokens > 20


def test_a_suffix_that_the_tokenizer_adds_is_part_of_the_prompt(checkpoint):
    from tokenizers import processors

    tokenizer = Tokenizer.load(checkpoint("metaspace"))
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    reader = PromptReader(Tokenizer(tokenizer.backend), block_tokens=4, keep_token_ids=True)
    for text in ("the cache", "the cache</s>", "the cache"):
        assert reader.read(plain(text)).token_ids == tokenizer.encode(text, add_special_tokens=True)


def test_token_ids_are_taken_as_they_are(make_reader):
    reader = make_reader()
    assert_is(reader.read(plain(list(range(100)))), list(range(100)))
    assert_is(PromptReader(block_tokens=BLOCK).read(plain([5] * 20)), [5] * 20)


def test_a_request_with_several_prompts_has_the_keys_of_the_first_and_all_tokens(make_reader):
    reader = make_reader()
    request = plain(["the cache holds blocks of tokens", "user", "def read(path):"])
    each = reader.read_each(request)
    together = reader.read(request)
    assert len(each) == request.prompts == 3
    assert together.keys == each[0].keys
    assert together.prompt_tokens == sum(prompt.prompt_tokens for prompt in each)
    assert together.token_ids is None


def test_what_is_surely_longer_than_any_context_is_not_tokenised(make_reader):
    reader = make_reader()
    reader.allow(40)
    reader.allow(20)  # of another engine; the longest counts
    long = "a" * 4000
    for request in (chat([{"role": "user", "content": long}]), plain(long)):
        assert reader.read(request).grade == PromptGrade.APPROXIMATE
    assert reader.stats().approximate == 2
    assert reader.stats().prompt_tokens == 0  # none was tokenised
    assert reader.read(plain("a" * 30)).grade == PromptGrade.EXACT


def test_without_room_for_tokens_the_keys_are_the_same(make_reader):
    router, engine = make_reader(keep_token_ids=False), make_reader()
    for length in (3, 5, 5, 9):
        request = chat([SYSTEM, *talk(length)])
        prompt = router.read(request)
        assert prompt.keys == engine.read(request).keys
        assert prompt.token_ids is None


def test_messages_that_the_template_refuses_are_a_bad_request_and_lose_nothing(make_reader):
    reader = make_reader("inst", "metaspace")
    reader.read(chat(talk(1)))
    for _ in range(2):
        with pytest.raises(BadRequest, match="Only user and assistant roles"):
            reader.read(chat([*talk(1), {"role": "tool", "content": "x"}]))
    assert reader.read(chat(talk(1))).reused_tokens > 0


def test_half_a_surrogate_pair_in_tool_arguments_is_a_bad_request(make_reader):
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": "\\ud83d"}'}}
    messages = [*talk(1), {"role": "assistant", "content": "", "tool_calls": [call]}]
    reader = make_reader("tools-block")
    for _ in range(2):
        with pytest.raises(BadRequest, match="surrogate"):
            reader.read(chat(messages))


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
names = st.sampled_from(["role", "content", "tool_calls", "function", "name", "arguments", "type", "text"])
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
anything = st.recursive(
    scalars | roles,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)
fields = st.dictionaries(names, anything, max_size=4)


def test_any_request_is_read_or_refused(make_reader, habit):
    reader = make_reader(habit)

    @given(
        st.lists(fields | st.builds(lambda role, rest: {**rest, "role": role}, roles, fields), max_size=3),
        st.none() | st.lists(anything, max_size=2),
        st.dictionaries(
            names | st.sampled_from(["tools", "messages", "enable_thinking"]), anything, max_size=2
        ),
    )
    def check(messages, tools, arguments):
        try:
            prompt = reader.read(chat(messages, tools=tools, chat_template_kwargs=arguments))
        except BadRequest:
            return
        assert len(prompt.keys) <= prompt.prompt_tokens // BLOCK

    check()


@pytest.mark.parametrize("name", ["bos_token", "environment", "documents", "loop"])
def test_template_arguments_may_have_any_name(make_reader, name):
    assert make_reader().read(chat(talk(1), chat_template_kwargs={name: 1})).keys


@pytest.mark.parametrize("name", ["self", "messages", "tools"])
def test_template_arguments_that_mean_something_else_are_a_bad_request(make_reader, name):
    with pytest.raises(BadRequest):
        make_reader().read(chat(talk(1), chat_template_kwargs={name: 1}))


# A template that no script sees through: words in a message change what stands far behind it.
DECEIVING = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if messages | map(attribute='content') | select('eq', 'open sesame') | list %}
    {{- messages | length }}
{%- endif %}
"""


def test_a_template_that_deceived_the_proof_is_found_out(checkpoint, caplog):
    tokenizer = Tokenizer.load(checkpoint("byte-level"))
    template = ChatTemplate({"default": DECEIVING})
    reader = PromptReader(tokenizer, template, block_tokens=BLOCK, keep_token_ids=True)
    messages = [SYSTEM, *talk(1), {"role": "assistant", "content": "open sesame"}]
    right = []
    with caplog.at_level(logging.ERROR):
        for turn in range(CHECK_EVERY + 10):
            messages = [*messages, *talk(2, 2 * turn)]
            whole = tokenizer.encode(template.render(messages), add_special_tokens=False)
            right.append(reader.read(chat(messages)).token_ids == whole)
    stats = reader.stats()
    assert (stats.checks, stats.mismatches) == (1, 1)
    assert "rendered whole" in stats.fast_paths_off
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert not any(right[1:CHECK_EVERY])  # it did deceive
    assert all(right[CHECK_EVERY + 1 :])


def test_one_recognised_prompt_in_a_hundred_is_checked(make_reader):
    reader = make_reader()
    for _ in range(1 + 2 * CHECK_EVERY):
        reader.read(chat([SYSTEM, *talk(3)]))
    stats = reader.stats()
    assert (stats.seen, stats.checks, stats.mismatches) == (2 * CHECK_EVERY, 2, 0)


def test_memory_is_bounded_over_many_conversations(make_reader):
    reader = make_reader(cache_bytes=100_000)
    for number in range(200):
        reader.read(chat([SYSTEM, *talk(3, 1000 * number)]))
    stats = reader.stats()
    assert stats.evicted_segments > 0
    assert stats.cache_bytes <= 100_000
    assert reader.read(chat([SYSTEM, *talk(3, 199_000)])).reused_tokens > 0


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


def test_without_a_tokenizer_keys_are_of_byte_chunks():
    reader = PromptReader(block_tokens=BLOCK)
    assert reader.grade is PromptGrade.APPROXIMATE
    prompts = [reader.read(chat([SYSTEM, *talk(length)])) for length in (3, 5, 3)]
    assert {prompt.grade for prompt in prompts} == {PromptGrade.APPROXIMATE}
    assert prompts[0].keys == prompts[2].keys
    assert prompts[1].keys[: len(prompts[0].keys)] == prompts[0].keys
    assert prompts[1].prompt_tokens > prompts[0].prompt_tokens > len(prompts[0].keys) * BLOCK
    assert reader.read(plain(["x" * 100, "y" * 60])).prompt_tokens == 40
    salted = reader.read(chat([SYSTEM, *talk(3)], cache_salt="s"))
    assert not set(salted.keys) & set(prompts[0].keys)


OPAQUE = {
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}]},
        "no text",
    ),
    "a template of its own": ({"chat_template": "{{ messages }}"}, "chat_template"),
    "a length to cut to": ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens"),
}


@pytest.mark.parametrize(("fields", "cause"), OPAQUE.values(), ids=OPAQUE.keys())
def test_a_prompt_that_cannot_be_read_has_approximate_keys_and_it_is_said_once(
    make_reader, caplog, fields, cause
):
    reader = make_reader()
    prompts = [reader.read(chat(**{"messages": [SYSTEM, *talk(3)], **fields})) for _ in range(2)]
    assert [prompt.grade for prompt in prompts] == 2 * [PromptGrade.APPROXIMATE]
    assert prompts[0].keys == prompts[1].keys != []
    assert reader.stats().approximate == 2
    assert len(caplog.records) == 1
    assert cause in caplog.text


def test_token_ids_that_an_engine_would_cut_are_approximate(make_reader):
    prompt = make_reader().read(plain(list(range(100)), truncate_prompt_tokens=50))
    assert (prompt.grade, prompt.prompt_tokens) == (PromptGrade.APPROXIMATE, 100)


def test_an_image_counts_as_an_image_not_as_its_base64():
    prompt = PromptReader(block_tokens=BLOCK).read(chat([{"role": "user", "content": [IMAGE]}]))
    assert 1000 < prompt.prompt_tokens < 1100


def test_a_chat_for_a_model_without_a_template_is_approximate(make_reader):
    assert make_reader(None).read(chat(talk(1))).grade is PromptGrade.APPROXIMATE


def test_what_an_engine_said_is_remembered_for_the_same_request():
    reader = PromptReader(block_tokens=BLOCK, keep_token_ids=True)
    request, grown = chat([SYSTEM, *talk(3)]), chat([SYSTEM, *talk(5)])
    assert reader.recall(request) is None
    told = reader.read_tokens(request, range(50))
    assert_is(told, list(range(50)))
    again = reader.recall(chat([SYSTEM, *talk(3)]))
    assert (again.keys, again.reused_tokens) == (told.keys, 50)
    assert reader.recall(grown) is None
    assert reader.recall(chat([SYSTEM, *talk(3)], cache_salt="s")) is None
    assert reader.recall(plain("hi")) is None


@pytest.mark.real_model
def test_the_default_model_keys_are_those_of_transformers(smollm2, transformers_tokenizer, conversations):
    tokenizer, oracle = Tokenizer.load(smollm2), transformers_tokenizer(smollm2)
    reader = PromptReader(tokenizer, ChatTemplate.load(smollm2, tokenizer), keep_token_ids=True)

    @settings(max_examples=40)
    @given(conversations())
    def check(conversation):
        sent, seen = conversation
        for length in range(1, len(sent) + 1):
            ids = oracle.apply_chat_template(seen[:length], add_generation_prompt=True, return_dict=False)
            assert_is(reader.read(chat(sent[:length])), ids, block=32)

    check()
    assert reader.stats().mismatches == 0
