"""A conversation that is read turn by turn has the keys of one that is read whole, in every dialect.

Messages and items are made up without regard to what makes sense: several results at once, nothing said,
systems in the middle, an assistant in many pieces, kinds that nobody knows.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.core.errors import BadRequest
from sumibi.core.keys import extend_keys, root_key
from sumibi.prompts.dialects import parse_request, settled
from sumibi.prompts.keys import PromptGrade, PromptReader
from sumibi.prompts.template import ChatTemplate, UnsupportedContent
from sumibi.prompts.tokenizer import Tokenizer

WORDS = st.sampled_from(
    ["", " ", "yes", "炭火", "a\nb", "<|im_end|>", "x-anthropic-billing-header: 1", "word " * 30]
)
NAMES = st.sampled_from(["f", "g"])
ANY = st.sampled_from([None, 3, [], {}, "x", [3], [{}], [{"type": "text"}], [{"type": "text", "text": 3}]])


def _of(**fields):
    return st.fixed_dictionaries(
        {
            name: value if isinstance(value, st.SearchStrategy) else st.just(value)
            for name, value in fields.items()
        }
    )


TEXT = _of(type="text", text=WORDS)
BLOCK = st.one_of(
    TEXT,
    TEXT,
    _of(type="thinking", thinking=WORDS, signature="s"),
    _of(type="redacted_thinking", data="eA=="),
    _of(type="tool_use", id="1", name=NAMES, input=_of(a=WORDS)),
    _of(type="tool_result", tool_use_id="1", content=WORDS | st.lists(TEXT, max_size=2) | st.none()),
)
ODD_BLOCK = st.one_of(
    _of(type="image", source=_of(type="url", url="u")),
    _of(type="tool_use", id="1", name="f", input=ANY),
    _of(type="tool_result", tool_use_id="1", content=ANY),
    _of(type=st.sampled_from(["text", "thinking", "document"]), text=ANY, thinking=ANY),
)
ROLE = st.sampled_from(["user", "assistant", "user", "assistant", "system"])
MESSAGE = _of(role=ROLE, content=WORDS | st.lists(BLOCK, max_size=3))
ODD_MESSAGE = _of(role=ROLE | ANY, content=ANY | st.lists(BLOCK | ODD_BLOCK, max_size=3))

PART = _of(type=st.sampled_from(["output_text", "input_text"]), text=WORDS)
THOUGHT = _of(type="reasoning_text", text=WORDS)
SPEAKER = st.sampled_from(["user", "assistant"])
ARGUMENTS = st.sampled_from(["{}", '{"a": 1}', "no json"])
ITEM = st.one_of(
    _of(role=SPEAKER, content=WORDS),
    _of(
        type="message",
        role=st.sampled_from(["user", "assistant"]),
        content=st.lists(PART, min_size=1, max_size=2),
    ),
    _of(type="reasoning", summary=st.just([]), content=st.lists(THOUGHT, max_size=2)),
    _of(
        type="function_call",
        call_id="1",
        name=NAMES,
        arguments=st.sampled_from(["{}", '{"a": 1}', "no json"]),
    ),
    _of(type="function_call_output", call_id="1", output=WORDS | st.lists(PART, max_size=2)),
    _of(type="custom_tool_call", call_id="1", name=NAMES, input=WORDS),
)
ODD_ITEM = st.one_of(
    ANY,
    _of(
        type=st.sampled_from(["message", "reasoning", "function_call", "item_reference"]),
        role=ANY,
        content=ANY,
    ),
    _of(type="function_call", call_id=ANY, name=ANY, arguments=ANY),
    _of(role="assistant", content=ANY, status=st.sampled_from(["incomplete", 3])),
)

SYSTEMS = st.sampled_from(
    [None, "", "be brief", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]
)


def said(messages, system):
    return "/v1/messages", {"messages": messages, "system": system, "max_tokens": 1}


def put_in(items, system):
    return "/v1/responses", {"input": items, "instructions": "be brief" if system else None}


SPOKEN = {"messages": (said, MESSAGE, ODD_MESSAGE), "responses": (put_in, ITEM, ODD_ITEM)}


def read(reader, path, body):
    """What comes of a request: its keys, or what is wrong with it; None: they are not exact."""
    request = parse_request(path, json.dumps({"model": "m", **body}).encode())
    try:
        prompt = reader.read(request)
    except BadRequest as error:
        return str(error)
    return prompt.keys if prompt.grade is PromptGrade.EXACT else None


def whole(model, path, body):
    """The same, of all of it rendered and tokenised at once."""
    tokenizer, template = model
    request = settled(parse_request(path, json.dumps({"model": "m", **body}).encode()), template)
    try:
        text = template.render(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
    except UnsupportedContent:
        return None
    except BadRequest as error:
        return str(error)
    return extend_keys(root_key("m"), tokenizer.encode(text, add_special_tokens=False), 4)


@pytest.fixture(scope="module", params=["chatml", "merged-results"])
def model(request, checkpoint):
    directory = checkpoint("byte-level", request.param)
    return Tokenizer.load(directory), ChatTemplate.load(directory)


@pytest.mark.parametrize("dialect", SPOKEN)
def test_read_turn_by_turn_it_has_the_keys_of_the_whole(model, dialect):
    make, message, odd = SPOKEN[dialect]
    shared, bytes_only = PromptReader(*model, block_tokens=4), PromptReader()

    @settings(max_examples=80)
    @given(st.lists(st.lists(message, min_size=1, max_size=3), min_size=2, max_size=5), SYSTEMS)
    def grow(turns, system):
        messages = []
        for turn in turns:
            messages += turn
            path, body = make(messages, system)
            for _ in range(2):
                assert read(shared, path, body) == whole(model, path, body)

    @settings(max_examples=100)
    @given(st.lists(message | odd, min_size=1, max_size=5), SYSTEMS)
    def survive(messages, system):
        path, body = make(messages, system)
        assert read(shared, path, body) == whole(model, path, body)
        read(bytes_only, path, body)

    grow()
    stats = shared.stats()
    assert stats.mismatches == 0
    assert stats.seen > 50
    assert stats.grown > 10
    survive()
