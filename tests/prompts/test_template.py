"""Rendering equals transformers', from messages as clients send them; a refusal names the messages."""

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.core.errors import BadRequest, ModelError
from sumibi.prompts.template import ChatTemplate, SharedObject, UnsupportedContent, normalise

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "does <f> & 'é'", "parameters": {"type": "object"}},
    },
    {"type": "function", "function": {"name": "g", "description": None, "parameters": None}},
]
HI = [{"role": "user", "content": "hi"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def outcome(render):
    """What `render` returns, None if it refuses."""
    try:
        return render()
    except Exception:
        return None


def as_parts(message):
    if message["role"] == "tool":
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def test_renders_as_transformers(checkpoint, habit, transformers_tokenizer, conversations):
    directory = checkpoint("byte-level", habit)
    template, oracle = ChatTemplate.load(directory), transformers_tokenizer(directory)

    thinking = st.sampled_from([{}, {"enable_thinking": False}])

    @settings(max_examples=60)
    @given(conversations(), st.sampled_from([None, [], TOOLS]), st.booleans(), thinking)
    def check(conversation, tools, generation, arguments):
        sent, seen = conversation
        if habit == "parts":
            seen = list(map(as_parts, seen))
        options = {"tools": tools, "add_generation_prompt": generation, **arguments}
        expected = outcome(lambda: oracle.apply_chat_template(seen, tokenize=False, **options))
        assert outcome(lambda: template.render(sent, **options)) == expected

    check()


def test_messages_are_not_changed_by_rendering(checkpoint, habit, conversations):
    template = ChatTemplate.load(checkpoint("byte-level", habit))

    @settings(max_examples=20)
    @given(conversations())
    def check(conversation):
        before = json.dumps(conversation[0])
        outcome(lambda: template.render(conversation[0], tools=TOOLS))
        assert json.dumps(conversation[0]) == before

    check()


@pytest.mark.parametrize("content", ["a", "a  ", " ", "", "a\n", [{"type": "text", "text": "x  "}]])
def test_a_final_message_is_continued_as_transformers_does(
    checkpoint, habit, transformers_tokenizer, content
):
    directory = checkpoint("byte-level", habit)
    template, oracle = ChatTemplate.load(directory), transformers_tokenizer(directory)
    messages = [*HI, {"role": "assistant", "content": content}]
    seen = normalise(messages, "parts" if habit == "parts" else "string")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = outcome(lambda: oracle.apply_chat_template(seen, tokenize=False, **options))
    if expected is not None:
        assert template.render(messages, **options) == expected


@pytest.mark.real_model
def test_the_default_model_renders_as_transformers(smollm2, transformers_tokenizer, conversations):
    template, oracle = ChatTemplate.load(smollm2), transformers_tokenizer(smollm2)

    @settings(max_examples=60)
    @given(conversations(), st.booleans())
    def check(conversation, generation):
        sent, seen = conversation
        expected = oracle.apply_chat_template(seen, tokenize=False, add_generation_prompt=generation)
        assert template.render(sent, add_generation_prompt=generation) == expected

    check()


@pytest.mark.real_model
def test_one_user_message_is_31_tokens_with_the_default_model(smollm2, transformers_tokenizer):
    text = ChatTemplate.load(smollm2).render(HI)
    assert len(transformers_tokenizer(smollm2)(text)["input_ids"]) == 31


NORMALISED = [
    ({"role": "user", "content": None}, {"content": ""}),
    ({"role": "user"}, {"content": ""}),
    ({"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, {"content": "a\nb"}),
    ({"role": "user", "content": ["", "a", {"type": "text", "text": ""}, "b"]}, {"content": "a\nb"}),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, {"content": "no"}),
    ({"role": "system", "content": "x-anthropic-billing-header: cch=1;\na\nb"}, {"content": "a\nb"}),
    ({"role": "system", "content": ["x-anthropic-billing-header: cch=1;", "a"]}, {"content": "a"}),
    (
        {"role": "user", "content": "x-anthropic-billing-header: cch=1;\na"},
        {"content": "x-anthropic-billing-header: cch=1;\na"},
    ),
    ({"role": "user", "content": "a", "name": "N", "extra": 1}, {"content": "a", "name": "N"}),
    ({"role": "user", "content": "a", "tool_calls": [1]}, {"content": "a"}),
    ({"role": "assistant", "content": "a", "tool_calls": []}, {"content": "a"}),
    (
        {"role": "assistant", "content": "a", "reasoning": "r"},
        {"content": "a", "reasoning": "r", "reasoning_content": "r"},
    ),
    (
        {"role": "tool", "content": "a", "tool_call_id": "c", "name": None},
        {"content": "a", "tool_call_id": "c"},
    ),
    ({"role": "developer", "content": "a", "tools": [1]}, {"content": "a", "tools": [1]}),
]


@pytest.mark.parametrize(("message", "fields"), NORMALISED)
def test_messages_get_the_form_that_engines_give_to_templates(message, fields):
    assert normalise([message], "string") == [{"role": message["role"], **fields}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("[1]", {}),
        ("3", {}),
        ("", {}),
        ("{", {}),
        pytest.param("[" * 100_000, {}, id="deep"),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        (3, {}),
    ],
)
def test_tool_arguments_become_objects(arguments, expected):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    (message,) = normalise([{"role": "assistant", "tool_calls": [call]}], "string")
    assert message["tool_calls"] == [{"id": "c", "function": {"name": "f", "arguments": expected}}]


def test_tool_calls_show_their_fields_in_the_order_of_the_engine():
    call = {"index": 0, "type": "function", "id": "c", "function": {"name": "f", "x": 1, "arguments": "{}"}}
    template = ChatTemplate({"default": "{{ messages[0].tool_calls | tojson }}"})
    assert template.render([{"role": "assistant", "tool_calls": [call]}]) == (
        '[{"id": "c", "function": {"arguments": {}, "name": "f", "x": 1}, "type": "function", "index": 0}]'
    )


def test_tool_results_stay_strings_where_other_content_is_a_list():
    messages = [
        {"role": "tool", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
    ]
    assert [m["content"] for m in normalise(messages, "parts")] == ["a", [{"type": "text", "text": "b"}]]


def test_parts_that_are_empty_stay_where_content_is_a_list_and_in_tool_results():
    content = [{"type": "text", "text": text} for text in ("", "a")]
    messages = [{"role": "user", "content": content}, {"role": "tool", "content": content}]
    assert [m["content"] for m in normalise(messages, "parts")] == [content, "\na"]


ROLES = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("roles", "shown"),
    [
        ("du", "s:0;u:1;"),
        ("udu", "s:1;u:0;u:2;"),
        ("sdu", "s:0\n\n1;u:2;"),
        ("dus", "s:0\n\n2;u:1;"),
        ("sus", "s:0;u:1;s:2;"),  # no developer: nothing is moved
    ],
)
def test_a_template_without_developers_sees_the_system_speak_once_and_first(roles, shown):
    names = {"d": "developer", "s": "system", "u": "user"}
    messages = [{"role": names[role], "content": str(at)} for at, role in enumerate(roles)]
    assert ChatTemplate({"default": ROLES}).render(messages) == shown


def test_a_template_that_names_developers_sees_them():
    template = ChatTemplate({"default": ROLES + "{% if 'developer' in messages %}{% endif %}"})
    messages = [*HI, {"role": "developer", "content": "a"}, {"role": "system", "content": "b"}]
    assert template.render(messages) == "u:hi;d:a;s:b;"


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"content": "a"}, "messages[1].role"),
        ({"role": 3}, "messages[1].role"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content"),
        ({"role": "user", "content": [3]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[1].content[0].text"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "messages[1].tool_calls[0].function"),
    ],
)
def test_malformed_messages_are_named_by_their_path(message, path):
    with pytest.raises(BadRequest) as refused:
        normalise([*HI, message], "string")
    assert refused.value.param == path
    assert path in str(refused.value)


def test_content_that_is_no_text_is_told_apart():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(
        UnsupportedContent, match=r"messages\[0\]\.content\[1\]\.type: 'image_url' is not text"
    ):
        normalise([{"role": "user", "content": ["a", image]}], "string")


REFUSING = {
    "its own words": "{{ raise_exception('Roles must alternate!') }}",
    "wrong type": "{{ messages[0]['content'] + 3 }}",
    "undefined": "{{ messages[0].missing.field }}",
    "sandbox": "{{ ''.__class__.__mro__ }}",
    "mutation": "{{ messages.append(1) }}",
    "endless": "{% for i in range(10000000) %}{% endfor %}",
}


@pytest.mark.parametrize("source", REFUSING.values(), ids=REFUSING.keys())
def test_what_a_template_refuses_is_a_bad_request_about_the_messages(source):
    with pytest.raises(BadRequest, match="messages: the model's chat template refuses them") as refused:
        ChatTemplate({"default": source}).render(HI)
    assert refused.value.param == "messages"


def test_no_messages_are_a_bad_request():
    with pytest.raises(BadRequest, match="at least one message"):
        ChatTemplate({"default": "x"}).render([])


FEATURES = {
    "{{ bos_token }}{{ eos_token }}": "<s></s>",
    "{{ messages | tojson }}": '[{"role": "user", "content": "hi"}]',
    "{{ {'b': 'é<', 'a': 1} | tojson(indent=1, sort_keys=true) }}": '{\n "a": 1,\n "b": "é<"\n}',
    "a\n  {% if true %}\n  b\n  {% endif %}\nc": "a\n  b\nc",
    "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "1",
    "{% generation %}x{{ messages[0].content }}{% endgeneration %}": "xhi",
    "{{ documents is none }}{{ tools is none }}{{ unknown is defined }}": "TrueTrueFalse",
}


@pytest.mark.parametrize(("source", "expected"), FEATURES.items())
def test_templates_have_what_transformers_gives_them(source, expected, transformers_tokenizer, checkpoint):
    assert ChatTemplate({"default": source}, SPECIAL).render(HI) == expected
    if "token" not in source:
        oracle = transformers_tokenizer(checkpoint("byte-level"))
        assert oracle.apply_chat_template(HI, chat_template=source, tokenize=False) == expected


def test_a_shared_tool_is_written_as_any_other_under_every_option():
    written = ["tojson", "tojson(indent=1)", "tojson(separators=[',', ':'])", "tojson", "list"]
    source = "".join("{{ tools[0] | " + how + " }}" for how in written)
    template = ChatTemplate({"default": source + "{{ tools[0]._texts is defined }}"})
    assert template.render(HI, tools=[SharedObject(TOOLS[0])]) == template.render(HI, tools=TOOLS)


def test_a_date_is_todays_and_known_to_change():
    template = ChatTemplate({"default": "{{ strftime_now('%Y-%m-%d') }}"})
    before = datetime.now().strftime("%Y-%m-%d")
    assert before <= template.render(HI) <= datetime.now().strftime("%Y-%m-%d")
    assert before <= template.now(with_tools=False) <= datetime.now().strftime("%Y-%m-%d")


@pytest.mark.parametrize(
    ("source", "now"),
    [
        ("{{ messages[0].content }}", ""),
        ("{% if strftime_now is defined %}x{% endif %}", ""),
        ("{{ messages | random }}", None),
        ("{{ lipsum() }}", None),
        ("{{ strftime_now(pattern) }}", None),
        ("{% set f = strftime_now %}{{ f('%Y') }}", None),
    ],
)
def test_whether_equal_messages_render_equally_is_read_off_the_source(source, now):
    assert ChatTemplate({"default": source}).now(with_tools=False) == now


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for p in m['content'] %}{% endfor %}{% endfor %}", True),
        (
            "{% set ms = messages %}{% for m in ms %}{% for p in m.content | list %}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", False),
        ("{% for t in tools or [] %}{% for p in t.content %}{% endfor %}{% endfor %}", False),
        (
            "{% macro show(it, x=1) %}{% for p in it %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content, x=2) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(x, it) %}{% for p in it %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(1, it=m['content']) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(x, it) %}{% for p in it %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content, m.tool_calls) }}{% endfor %}",
            False,
        ),
        (
            "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
            "{% for t in tools or [] %}{{ show(t) }}{% endfor %}",
            False,
        ),
        (
            "{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}"
            "{% endfor %}",
            True,
        ),
    ],
)
def test_content_is_a_list_for_templates_that_iterate_over_it(source, parts):
    shown = ChatTemplate({"default": source + "{{ messages[0].content is string }}"}).render(HI)
    assert shown.endswith("False" if parts else "True")


def directory_with(tmp_path, checkpoint, **files):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint("byte-level") / name).read_bytes())
    (tmp_path / "chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name.replace("__", "/")).with_suffix(".jinja").write_text(text)
    return tmp_path


def configure(directory, chat_template):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": chat_template}))


def test_a_template_in_the_config_is_found(tmp_path, checkpoint):
    directory = directory_with(tmp_path, checkpoint)
    assert ChatTemplate.load(directory) is None
    configure(directory, "one")
    assert ChatTemplate.load(directory).render(HI) == "one"
    configure(directory, [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}])
    assert ChatTemplate.load(directory).render(HI) == "two"
    assert ChatTemplate.load(directory).render(HI, tools=TOOLS) == "three"


@pytest.mark.parametrize("wrong", [3, {"default": "x"}, ["x"], [{"name": "default"}]])
def test_a_template_entry_that_is_malformed_is_an_error(tmp_path, checkpoint, wrong):
    directory = directory_with(tmp_path, checkpoint)
    configure(directory, wrong)
    with pytest.raises(ModelError, match="neither a text nor a list"):
        ChatTemplate.load(directory)


def test_template_files_win_over_the_config(tmp_path, checkpoint):
    directory = directory_with(tmp_path, checkpoint, chat_template="file", chat_templates__tool_use="tools")
    configure(directory, "config")
    assert ChatTemplate.load(directory).render(HI) == "file"
    assert ChatTemplate.load(directory).render(HI, tools=TOOLS) == "tools"


def test_a_broken_template_is_named(tmp_path, checkpoint):
    with pytest.raises(ModelError, match=r"chat template default: .*Encountered unknown tag"):
        ChatTemplate.load(directory_with(tmp_path, checkpoint, chat_template="{% nonsense %}"))
    with pytest.raises(ModelError, match="no default among"):
        ChatTemplate({"tool_use": "x"})
