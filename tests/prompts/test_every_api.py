"""F17: the same conversation has the same keys on every API, turn by turn as an agent would ask.

Generated conversations are said in the words of chats, of Anthropic's messages and of responses; what cannot
be said in one of them is left out there. With `TEMPLATES` (`make test-templates`) for real chat templates,
too.
"""

import json
import os
from pathlib import Path

import pytest

from sumibi.core.errors import BadRequest
from sumibi.prompts import samples
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptGrade, PromptReader
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
_named = os.environ.get("TEMPLATES")
REAL = [
    pytest.param(path.parent, id=path.parent.name)
    for path in (sorted(Path(_named).glob("*/habits.json")) if _named else [])
]


def plain(conversation):
    """The messages with what every API can say."""
    return [
        {name: value for name, value in message.items() if name not in ("name", "reasoning_content")}
        for message in conversation.seen
    ]


def as_chat(messages, tools, arguments):
    return {"messages": messages, "tools": tools, "chat_template_kwargs": arguments}


def blocks(message):
    thought, content = message.get("reasoning"), message["content"]
    out = [] if thought is None else [{"type": "thinking", "thinking": thought, "signature": "s"}]
    if content:
        out.append({"type": "text", "text": content})
    for call in message.get("tool_calls", []):
        function = call["function"]
        block = {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": function["arguments"],
        }
        out.append(block)
    return out


def as_messages(messages, tools, arguments):
    """None if they cannot be said: late systems are moved for templates that refuse them in chats."""
    said = []
    system, rest = None, messages
    if messages[0]["role"] == "system":
        system, rest = messages[0]["content"] or None, messages[1:]
        if system is None:
            return None
    for message in rest:
        role, content = message["role"], message["content"]
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            if said and said[-1]["role"] == "user" and said[-1]["content"][0]["type"] == "tool_result":
                said[-1]["content"].append(block)
            else:
                said.append({"role": "user", "content": [block]})
        elif role == "assistant":
            said.append({"role": role, "content": blocks(message) or ""})
        elif role == "user":
            said.append({"role": role, "content": content})
        else:
            return None
        if isinstance(said[-1]["content"], str) and role == "user":
            said[-1]["content"] = [{"type": "text", "text": content}] if content else content
    if tools is not None:
        functions = [tool["function"] for tool in tools]
        if any(
            function["parameters"] is None or "type" not in function["parameters"] for function in functions
        ):
            return None
        tools = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
            for f in functions
        ]
    return {
        "system": system,
        "messages": said,
        "tools": tools,
        "max_tokens": 9,
        "chat_template_kwargs": arguments,
    }


def as_input(messages, tools, arguments):
    """None if they cannot be said: what an assistant says in two messages would be one."""
    items = []
    last = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == last == "assistant":
            return None
        last = role
        if role == "tool":
            call = message["tool_call_id"]
            items.append({"type": "function_call_output", "call_id": call, "output": content})
            continue
        if role != "assistant":
            items.append({"role": role, "content": content})
            continue
        if message.get("reasoning") is not None:
            thought = [{"type": "reasoning_text", "text": message["reasoning"]}]
            items.append({"type": "reasoning", "summary": [], "content": thought})
        if content or len(message) == 2:
            part = {"type": "output_text", "text": content}
            items.append({"type": "message", "role": role, "content": [part]})
        for call in message.get("tool_calls", []):
            function = call["function"]
            spelt = json.dumps(function["arguments"], ensure_ascii=False)
            items.append(
                {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": spelt}
            )
    if tools is not None:
        if not tools:
            return None
        tools = [{"type": "function", **tool["function"]} for tool in tools]
    return {"input": items, "tools": tools, "chat_template_kwargs": arguments}


OTHERS = {MESSAGES: as_messages, RESPONSES: as_input}


def request(path, body):
    return parse_request(path, json.dumps({"model": "m", **body}).encode())


def check_every_api(directory, conversations):
    """How many requests were compared on each API, and how many of them were recognised as grown."""
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, tokenizer)
    readers = {
        path: PromptReader(tokenizer, template, block_tokens=16, keep_token_ids=True)
        for path in (CHAT, *OTHERS)
    }
    compared = dict.fromkeys(OTHERS, 0)
    for conversation in conversations:
        messages = plain(conversation)
        for length in conversation.lengths():
            parts = messages[:length], conversation.seen_tools, conversation.arguments
            chat = request(CHAT, as_chat(*parts))
            try:
                wanted = readers[CHAT].read(chat)
            except BadRequest:
                wanted = None  # the template refuses it, in whatever words
            for path, say in OTHERS.items():
                body = say(*parts)
                if body is None:
                    continue
                if wanted is None:
                    with pytest.raises(BadRequest):
                        readers[path].read(request(path, body))
                    continue
                compared[path] += 1
                for _ in range(2):
                    prompt = readers[path].read(request(path, body))
                    where = (directory.name, path, conversation.habit, body)
                    assert prompt.grade is PromptGrade.EXACT
                    assert prompt.token_ids == wanted.token_ids, where
                    assert prompt.keys == wanted.keys, where
    stats = {path: readers[path].stats() for path in OTHERS}
    assert all(one.mismatches == one.approximate == 0 for one in stats.values())
    return compared, {path: one.grown for path, one in stats.items()}


DEFAULT = pytest.param(None, id="smollm2", marks=pytest.mark.real_model)


@pytest.mark.parametrize("directory", [DEFAULT, *REAL])
def test_f17_the_same_conversation_has_the_same_keys_on_every_api(directory, smollm2):
    compared, _ = check_every_api(directory or smollm2, samples.conversations(65, 4))
    assert min(compared.values()) > 40


def test_f17_and_under_templates_of_every_habit(checkpoint, habit):
    compared, grown = check_every_api(
        checkpoint("llama" if habit == "inst" else "byte-level", habit), samples.conversations(39, 5)
    )
    assert min(compared.values()) > 20
    if habit == "chatml":  # of such templates a turn's new messages alone are rendered, on every API
        assert all(grown[path] > compared[path] / 3 for path in compared)
