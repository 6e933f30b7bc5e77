"""`keys check` against an engine that reads prompts in some way of its own: what it says of it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sumibi.console import print_key_check
from sumibi.core.errors import BadRequest, ConfigError, EngineUnavailable
from sumibi.keycheck.checking import check_keys
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.samples import HABITS
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

TEMPLATE = """
{{- thinking }}{{ reasoning_effort }}{{ date_string }}
{%- if tools %}<tools>{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
    {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
    {%- if m.content is string %}{{ m.content }}{% else %}{{ m.content | length }} parts{% endif %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {%- if enable_thinking is false %}<think></think>{% endif %}
{%- endif %}
"""
RENDER, TOKENIZE = "/v1/chat/completions/render", "/tokenize"


def write_model(directory, merges=()):
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    backend = Backend(models.BPE({entry: at for at, entry in enumerate(entries)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    named = ["<s>", "<|end|>", "<|user|>", "<|assistant|>"]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in named])
    directory.mkdir()
    (directory / "tokenizer.json").write_text(backend.to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def directory(tmp_path):
    return write_model(tmp_path / "model")


class Engine(BaseHTTPRequestHandler):
    """Answers with the tokens of its own reading; attributes are set by `engine`."""

    protocol_version = "HTTP/1.1"
    paths = (RENDER, TOKENIZE)
    root = "elsewhere"

    def do_GET(self):
        self.answer(200, {"data": [{"id": "m", "root": self.root, "max_model_len": 4000}]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        refusal = self.refuses(json.loads(body))
        try:
            tokens = self.reads(parse_request("/v1/chat/completions", body))
        except BadRequest as cause:
            refusal = str(cause)
        if self.path not in self.paths:
            self.answer(404, {"error": {"message": "Not Found"}})
        elif refusal:
            self.answer(400, {"error": {"message": refusal}})
        else:
            self.answer(200, {"token_ids": tokens, "tokens": tokens})

    def answer(self, status, content):
        data = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n"
        self.wfile.write(head.encode() + data)  # at once, or the kernel makes each answer wait

    def refuses(self, body):
        return ""

    def log_message(self, *words):
        pass


@pytest.fixture
def engine():
    """`engine(reads, ...)`: the URL of one that makes the tokens `reads(request)`."""
    running = []

    def start(reads, **attributes):
        handler = type("_Engine", (Engine,), {"reads": staticmethod(reads), **attributes})
        server = HTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def reading(directory, source=TEMPLATE, *, change=lambda kwargs: kwargs, content=None, before=()):
    """How an engine reads: its tokenizer and template, and what it does otherwise."""
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate({"default": source}, tokenizer.special_tokens)
    if content is not None:
        template = template.with_content_format(content)

    def reads(asked):
        kwargs = change({"tools": asked.tools, **asked.template_arguments})
        text = template.render(asked.messages, **kwargs)
        return [*before, *tokenizer.encode(text, add_special_tokens=False)]

    return reads


def check(url, directory, count=13, **options):
    options = {"model": None, "template": None, "seed": 0, **options}
    return check_keys(url, tokenizer=directory, count=count, report=lambda *step: None, **options)


@pytest.mark.parametrize("path", [RENDER, TOKENIZE])
def test_an_engine_that_reads_alike_is_exact_on_either_route(engine, directory, path):
    found = check(engine(reading(directory), paths=(path,)), directory)
    assert found.ok
    assert found.route == path
    assert [habit.habit for habit in found.habits] == list(HABITS)
    assert all(habit.same == habit.requests - habit.too_long > 0 for habit in found.habits[:11])
    assert found.habits[11].too_long > 0  # `long` in a context of 4,000 tokens of one byte


def only(asked_of, name):
    return {key: value for key, value in asked_of.items() if key != name}


CAUSES = {
    "puts BOS in front once more": {"before": [257]},
    "gives content to templates as `openai`": {"content": "parts"},
    "does not show tools": {"change": lambda kwargs: only(kwargs, "tools")},
    "overlooks the reasoning": {"source": TEMPLATE.replace("m.reasoning_content", "m.other")},
    "overlooks chat_template_kwargs": {"change": lambda kwargs: {"tools": kwargs["tools"]}},
    "(--default-chat-template-kwargs): enable_thinking false": {
        "change": lambda kwargs: {"enable_thinking": False, **kwargs}
    },
    "has another template": {"source": TEMPLATE.replace("<|end|>", "<|end|>~")},
}


@pytest.mark.parametrize("said", CAUSES)
def test_a_difference_is_said_with_its_cause(engine, directory, said):
    found = check(engine(reading(directory, **CAUSES[said])), directory, count=52)
    assert not found.ok
    assert [one for one in found.differences if said in one.cause]


def test_the_first_difference_is_shown_where_it_is(engine, directory):
    other = TEMPLATE.replace("<|end|>", "<|end|>!")
    found = check(engine(reading(directory, other)), directory, count=1)
    (difference,) = found.differences
    words = json.loads(bytes(difference.body))["messages"]
    assert difference.habit == "plain"
    first_end = difference.engine.index("<|end|>!")
    assert difference.here[:first_end] == difference.engine[:first_end]
    assert difference.messages == len(words)


def test_another_vocabulary_is_told_by_its_ids(engine, directory):
    found = check(engine(lambda asked: [7, 9999]), directory, count=1)
    assert "has another vocabulary" in found.differences[0].cause


def test_the_same_text_cut_otherwise_is_another_revision(engine, directory, tmp_path):
    other = write_model(tmp_path / "other", merges=[("t", "h")])
    found = check(engine(reading(directory)), other)
    assert any("cut otherwise" in one.cause for one in found.differences)


def test_what_both_refuse_is_no_difference_and_what_one_refuses_is(engine, directory):
    strict = TEMPLATE + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    file = directory / "chat_template.jinja"
    lenient = engine(reading(directory, strict))
    one_sided = check(lenient, directory)
    assert {"only the engine refuses the request" in one.cause for one in one_sided.differences} == {True}
    assert "no tools" in one_sided.differences[0].engine
    file.write_text(strict)
    both = check(lenient, directory)
    assert both.ok
    assert sum(habit.refused for habit in both.habits) > 0


def test_habits_that_no_conversation_was_made_for_are_named(engine, directory, capsys):
    url = engine(reading(directory))
    few = check(url, directory, count=2)
    assert len(few.not_tried) == len(HABITS) - 2
    print_key_check(few, json=False)
    assert f"not tried: {few.not_tried[0]}, " in capsys.readouterr().out
    assert check(url, directory, count=13).not_tried == []


def test_nothing_compared_is_not_exact(engine, directory):
    never = "{% if messages[0].content != 'hi' %}{{ raise_exception('never') }}{% endif %}"
    (directory / "chat_template.jinja").write_text(never)
    found = check(engine(reading(directory, never)), directory)
    assert not found.ok
    assert found.differences == []


def test_tools_are_asked_for_without_a_call_where_the_engine_has_no_parser(engine, directory):
    def refuses(self, body):
        no_parser = "tools" in body and body.get("tool_choice", "auto") == "auto"
        return '"auto" tool choice requires --enable-auto-tool-choice' if no_parser else ""

    found = check(engine(reading(directory), refuses=refuses), directory)
    assert found.ok
    assert not any(habit.refused for habit in found.habits)


def test_an_engine_without_a_route_and_one_without_files_here_are_explained(engine, directory):
    with pytest.raises(EngineUnavailable, match=r"shows no tokens: .*render answered 404 \(Not Found\)"):
        check(engine(reading(directory), paths=()), directory)
    with pytest.raises(ConfigError, match=r"--tokenizer DIR is needed: .* serves m from elsewhere"):
        check(engine(reading(directory)), None)
    with pytest.raises(ConfigError, match=r"--model x: .* serves m"):
        check(engine(reading(directory)), directory, model="x")
    assert check(engine(reading(directory), root=str(directory)), None, count=1).ok
