"""Generated conversations, fed turn by turn as an agent would: text, tokens and keys are transformers'.

With `TEMPLATES` naming a directory that `scripts/fetch_templates.py` made (`make test-templates`), the same
for real chat templates of every habit; without it for the model that is always there and our own templates.
"""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from sumibi.core.errors import BadRequest
from sumibi.core.keys import extend_keys, root_key
from sumibi.prompts import samples
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptGrade, PromptReader
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

CONVERSATIONS = 200
BLOCK = 16
PATH = "/v1/chat/completions"


def real_models():
    named = os.environ.get("TEMPLATES")
    if not named:
        return []
    found = sorted(path.parent for path in Path(named).glob("*/habits.json"))
    assert len(found) >= 5, f"TEMPLATES={named}: no templates there; `make test-templates` fetches them"
    return found


REAL = [pytest.param(path, id=path.name) for path in real_models()]


@pytest.fixture
def oracle(monkeypatch):
    """transformers' own loading of a directory."""
    import transformers

    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "disabled", True)
    return transformers.AutoTokenizer.from_pretrained


def reads_as(directory, load, conversations, *, parts=False, record=lambda name, value: None):
    """Feed `conversations` to a reader and to transformers; a refusal must be both's."""
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, tokenizer)
    reader = PromptReader(tokenizer, template, block_tokens=BLOCK, keep_token_ids=True)
    theirs = load(directory)
    source = "".join(path.read_text() for path in directory.glob("*.jinja"))
    root = root_key("m")
    requests = refused = 0
    for conversation in conversations:
        for length in conversation.lengths():
            requests += 1
            request = parse_request(PATH, json.dumps(conversation.body(length, "m")).encode())
            seen = as_engines_see(conversation, length, parts=parts, developers="developer" in source)
            where = (directory.name, conversation.habit, length, seen)
            try:
                text = theirs.apply_chat_template(
                    seen,
                    tools=conversation.seen_tools,
                    add_generation_prompt=True,
                    tokenize=False,
                    **conversation.arguments,
                )
            except Exception:
                refused += 1
                with pytest.raises(BadRequest):
                    reader.read(request)
                continue
            ours = template.render(request.messages, tools=request.tools, **request.template_arguments)
            assert ours == text, where
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            for _ in range(2):  # the second time it is recognised
                prompt = reader.read(request)
                assert prompt.grade is PromptGrade.EXACT
                assert prompt.token_ids == ids, where
                assert prompt.keys == extend_keys(root, ids, BLOCK), where
    stats = reader.stats()
    for name in ("seen", "grown", "whole", "mismatches"):
        record(name, getattr(stats, name))
    record("requests", requests)
    record("refused", refused)
    assert stats.mismatches == 0
    assert stats.seen > requests / 4
    return requests, refused, stats


def as_engines_see(conversation, length, *, parts, developers):
    """The first messages as vLLM gives them to a template."""
    out = []
    for sent, seen in zip(conversation.sent[:length], conversation.seen[:length], strict=True):
        content = seen["content"]
        if parts and seen["role"] != "tool":
            content = [] if sent["content"] is None else [{"type": "text", "text": content}]
        out.append({**seen, "content": content})
    if developers or all(message["role"] != "developer" for message in out):
        return out
    spoken = [m for m in out if m["role"] in ("system", "developer")]
    if len(spoken) == 1 and spoken[0] is out[0]:
        return [{"role": "system", "content": spoken[0]["content"]}, *out[1:]]
    words = [m["content"] if isinstance(m["content"], str) else m["content"][0]["text"] for m in spoken]
    return [
        {"role": "system", "content": "\n\n".join(words)},
        *(m for m in out if m["role"] not in ("system", "developer")),
    ]


DEFAULT = pytest.param(None, id="smollm2", marks=pytest.mark.real_model)


@pytest.mark.parametrize("directory", [DEFAULT, *REAL])
def test_real_templates_read_every_conversation_as_transformers(directory, smollm2, oracle, record_property):
    about = {} if directory is None else json.loads((directory / "habits.json").read_text())
    requests, refused, _ = reads_as(
        directory or smollm2,
        oracle,
        samples.conversations(CONVERSATIONS, 1),
        parts=about.get("content") == "parts",
        record=record_property,
    )
    assert refused < requests / 2, "what is compared must be more than refusals"


def test_templates_of_every_habit_read_conversations_as_transformers(checkpoint, habit, oracle):
    directory = checkpoint("llama" if habit == "inst" else "byte-level", habit)
    reads_as(directory, oracle, samples.conversations(39, 2), parts=habit == "parts")


class Clock(datetime):
    """Stands for `datetime`; `at` is now."""

    at = datetime(2026, 2, 28, 23, 59, 50)

    @classmethod
    def now(cls, tz=None):
        return cls.at


@pytest.fixture
def clock(monkeypatch):
    """The clock that templates are shown, ours and transformers'."""
    clock = type("_Clock", (Clock,), {})
    monkeypatch.setattr("sumibi.prompts.template.datetime", clock)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
    return clock


def dated_directories():
    sources = {param.id: (param.values[0] / "chat_template.jinja").read_text() for param in REAL}
    dated = [param for param in REAL if "strftime_now" in sources[param.id]]
    assert dated or not REAL
    return [pytest.param(None, id="our-own"), *dated]


@pytest.mark.parametrize("directory", dated_directories())
def test_across_midnight_the_date_is_the_new_one(directory, checkpoint, oracle, clock):
    directory = directory or checkpoint("byte-level", "dated")
    tokenizer = Tokenizer.load(directory)
    reader = PromptReader(tokenizer, ChatTemplate.load(directory, tokenizer), keep_token_ids=True)
    theirs = oracle(directory)
    conversations = [one for one in samples.conversations(65, 3) if one.habit in ("plain", "code", "long")]
    for conversation in conversations:
        clock.at = datetime(2026, 2, 28, 23, 59, 50)
        lengths = list(conversation.lengths())
        for at, length in enumerate(lengths):
            if at == len(lengths) // 2:
                clock.at = datetime(2026, 3, 1, 0, 0, 10)
            for known in {lengths[0], length}:  # the first one again, on another day
                request = parse_request(PATH, json.dumps(conversation.body(known, "m")).encode())
                text = theirs.apply_chat_template(
                    conversation.seen[:known], tokenize=False, add_generation_prompt=True
                )
                assert clock.at.strftime("%d") in text
                assert reader.read(request).token_ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert reader.stats().mismatches == 0


def test_a_seed_gives_the_same_conversations_and_more_of_them_begin_with_the_fewer():
    once, again, other = (list(samples.conversations(26, seed)) for seed in (5, 5, 6))
    assert once == again
    assert once != other
    assert list(samples.conversations(13, 5)) == once[:13]
    assert [one.habit for one in once[:13]] == list(samples.HABITS)


def test_a_conversation_is_asked_after_users_and_after_the_last_of_results_in_a_row():
    for conversation in samples.conversations(130, 7):
        roles = [message["role"] for message in conversation.sent]
        for length in conversation.lengths():
            assert roles[length - 1] in ("user", "tool")
            assert roles[length - 1 : length + 1] != ["tool", "tool"]
        calls = [m for m in conversation.sent if m.get("tool_calls")]
        for message in calls:
            at = conversation.sent.index(message)
            ids = [call["id"] for call in message["tool_calls"]]
            assert [m.get("tool_call_id") for m in conversation.sent[at + 1 : at + 1 + len(ids)]] == ids
