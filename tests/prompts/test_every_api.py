"""F17: the same conversation has the same keys on every API, turn by turn as an agent would ask.

Generated conversations are said in the words of chats, of Anthropic's messages and of responses; what cannot
be said in one of them is left out there. With `TEMPLATES` (`make test-templates`) for real chat templates,
too.
"""

import json
import os
from pathlib import Path

import pytest
from sayings import as_chat, as_input, as_messages, plain

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
