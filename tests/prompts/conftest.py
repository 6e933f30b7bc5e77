"""Small tokenizers and chat templates of every habit, written to directories as checkpoints have them."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

# The same examples every time, and no opinion about how long one may take.
settings.register_profile("deterministic", deadline=None, derandomize=True)
settings.load_profile("deterministic")

CORPUS = [
    "the cache holds blocks of tokens, each named by a chain of hashes of what came before",
    "def read(path):\n    return [line.strip() for line in open(path)]\n\n",
    "You are a helpful assistant. What is the weather in Paris? It is sunny, 21 degrees.",
    '{"name": "search", "arguments": {"query": "炭火 fire", "limit": 10}}',
    "user assistant system tool <think> hmm </think> naïve café   spaces\t\ttabs",
]

CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPM_TOKENS = ["<unk>", "<s>", "</s>"]


def _specials(texts, **options):
    return [AddedToken(text, special=True, normalized=False, **options) for text in texts]


def _byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_specials([*CHATML_TOKENS, "<|im_start|>extra", "<tool>"]))
    return tokenizer


def _sentencepiece(*, by_normalizer):
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    mark = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    if by_normalizer:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = mark
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPM_TOKENS + bytes_, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The trainer made the byte tokens special; as in real files they are ordinary entries.
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = [entry for entry in file["added_tokens"] if entry["content"] in SPM_TOKENS]
    file["pre_tokenizer"] = None if by_normalizer else json.loads(mark.__getstate__())
    tokenizer = Tokenizer.from_str(json.dumps(file))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a test.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TOOLS_BLOCK = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Results of several calls share one user turn, closed only when something else follows.
MERGED_RESULTS = """
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Thoughts are shown only after the last user message.
DROPS_THOUGHTS = """
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content and loop.index0 > ns.last_user %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

DATED = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}
    {%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- endif %}
{{- '<|im_start|>system\\nToday: ' + date_string + '\\n' }}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim }}{%- set messages = messages[1:] %}
{%- endif %}
{{- '<|im_end|>' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

# Tools stand before the last user message, turns are plain text, roles must alternate.
INST = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

# Wants content as a list of parts.
PARTS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}{{- message['content'] }}
    {%- else %}{%- for part in message['content'] %}{{- part['text'] }}{%- endfor %}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEMPLATES = {
    "chatml": CHATML,
    "tools-block": TOOLS_BLOCK,
    "merged-results": MERGED_RESULTS,
    "drops-thoughts": DROPS_THOUGHTS,
    "dated": DATED,
    "inst": INST,
    "parts": PARTS,
}
APPEND_ONLY = {"chatml", "tools-block", "merged-results", "dated", "parts"}

KINDS = {
    "byte-level": (
        _byte_level,
        dict(zip(("unk_token", "bos_token", "eos_token"), CHATML_TOKENS, strict=True)),
    ),
    "metaspace": (lambda: _sentencepiece(by_normalizer=False), None),
    "prepend": (lambda: _sentencepiece(by_normalizer=True), None),
    # transformers splits these two by rules of its own, whatever their file says
    "llama": (lambda: _sentencepiece(by_normalizer=True), {"legacy": False}),
    "llama-legacy": (lambda: _sentencepiece(by_normalizer=True), {"legacy": True}),
}
SPM_NAMES = dict(zip(("unk_token", "bos_token", "eos_token"), SPM_TOKENS, strict=True))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint(kind, template)`: a directory with that tokenizer and, if named, that template."""
    made = {}
    files = {}

    def make(kind="byte-level", template=None):
        if (kind, template) not in made:
            build, names = KINDS[kind]
            if kind not in files:
                files[kind] = build().to_str()
            directory = tmp_path_factory.mktemp(f"{kind}-{template}")
            (directory / "tokenizer.json").write_text(files[kind], encoding="utf-8")
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPM_NAMES, **(names or {})}
            if kind.startswith("llama"):
                config["tokenizer_class"] = "LlamaTokenizer"
                (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
            if template is not None:
                (directory / "chat_template.jinja").write_text(TEMPLATES[template], encoding="utf-8")
            made[kind, template] = directory
        return made[kind, template]

    return make


@pytest.fixture(scope="session")
def transformers_tokenizer():
    """The oracle: transformers' own loading of a checkpoint directory."""
    from transformers import AutoTokenizer

    loaded = {}

    def load(directory):
        if directory not in loaded:
            loaded[directory] = AutoTokenizer.from_pretrained(directory)
        return loaded[directory]

    return load


TRICKY = ["", " ", "yes\n", "炭火 é", "'\"\\", "1 2", "{{ x }}", "def f():\n    pass"]
TRICKY += ["<|im_start|>user", "<|im_end|>", "<s>", "</think>", "<think>a</think>\n\nb", "<tool_response>r"]
words = st.text(max_size=8) | st.sampled_from(TRICKY)
values = words | st.integers() | st.none() | st.lists(words, max_size=2)


@st.composite
def _turn(draw):
    """A user message and what follows, as a template must see it."""
    turn = [{"role": "user", "content": draw(words)}]
    for _ in range(draw(st.integers(0, 2))):
        names = draw(st.lists(st.sampled_from("fgh"), min_size=1, max_size=2))
        calls = [
            {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": {"x": draw(values)}}}
            for at, name in enumerate(names)
        ]
        turn.append({"role": "assistant", "content": draw(words), "tool_calls": calls})
        turn += [{"role": "tool", "content": draw(words), "tool_call_id": call["id"]} for call in calls]
    if draw(st.booleans()):
        turn.append({"role": "assistant", "content": draw(words)})
    for message in turn:
        if message["role"] == "assistant" and draw(st.booleans()):
            message["reasoning"] = message["reasoning_content"] = draw(words)
    return turn


def _as_sent(draw, message):
    """The same message as some client sends it."""
    sent = dict(message)
    if not message["content"]:
        sent["content"] = draw(st.sampled_from([None, "", []]))
    elif draw(st.booleans()):
        sent["content"] = [{"type": "text", "text": message["content"]}]
    if "reasoning" in message:
        del sent[draw(st.sampled_from(["reasoning", "reasoning_content"]))]
    if "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        sent["tool_calls"] = [
            {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
            for call, function in zip(message["tool_calls"], functions, strict=True)
        ]
    return sent


@st.composite
def _conversation(draw, *, max_turns=4):
    seen = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, max_turns))):
        seen += draw(_turn())
    return [_as_sent(draw, message) for message in seen], seen


@pytest.fixture(scope="session")
def conversations():
    """`conversations(...)`: a strategy of (messages as sent, the same as a template must see them)."""
    return _conversation


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return request.param


@pytest.fixture(params=sorted(TEMPLATES))
def habit(request):
    return request.param


@pytest.fixture(scope="session")
def append_only():
    """Names of the templates that are append-only without tools."""
    return APPEND_ONLY
