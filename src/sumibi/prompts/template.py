"""Chat templates: from messages to the text a model sees, exactly as transformers and vLLM render it.

A template is a jinja program in the checkpoint directory. It runs in the same sandbox with the same
filters and globals as `transformers.apply_chat_template`, which is the oracle in the tests. Messages are
first brought into the form that vLLM hands to templates (`normalise`): many templates break on
`content: null`, on content parts, or on tool arguments that are still a JSON string.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from sumibi.core.errors import BadRequest, ModelError
from sumibi.prompts.tokenizer import Tokenizer, read_tokenizer_config

Message = dict[str, Any]
"""One chat message as decoded from JSON; a template may read any field of it."""

ContentFormat = Literal["string", "parts"]
"""Whether a template wants `content` as one string or as a list of `{"type": "text", "text": ...}`."""

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content parts that are text, and the field that holds it."""

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""Those that Anthropic's dialect knows."""


class SharedObject(dict[str, Any]):
    """A JSON object that many prompts show unchanged (a tool): `tojson` writes its text once."""

    __slots__ = ("_texts",)  # private: a template must not see more than a dict

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._texts: dict[str, str] = {}


class UnsupportedContent(BadRequest):
    """A content part that is no text (image, audio, ...): only an engine with that model knows its tokens."""


class ChatTemplate:
    """One checkpoint's chat template, or its named set (`default`, `tool_use`). Immutable."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile `templates`, which must hold `default`. Raises ModelError naming the one that is broken."""
        if "default" not in templates:
            raise ModelError(f"chat template: no default among {sorted(templates)}")
        self._special_tokens = dict(special_tokens or {})
        self._compiled = {name: _compile(name, source) for name, source in templates.items()}

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer | None = None) -> "ChatTemplate | None":
        """The template of a checkpoint directory, None if it has none (a base model).

        `chat_template.jinja` and `chat_templates/*.jinja` win over `tokenizer_config.json`, as in
        transformers. `tokenizer` supplies the special tokens, read from the directory otherwise.
        """
        tokenizer = tokenizer or Tokenizer.load(directory)
        templates = _read_templates(directory)
        return cls(templates, tokenizer.special_tokens) if templates else None

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text. Raises BadRequest when the template refuses the messages.

        `messages` may be straight from a request: they are normalised first. `template_kwargs` are
        visible to the template as variables (`enable_thinking=False`).
        """
        if not messages:
            raise BadRequest("messages: at least one message is needed", param="messages")
        compiled = self._select(tools)
        seen = normalise(messages, compiled.content_format)
        if not compiled.knows_developers:
            seen = _developers_as_system(seen)
        return compiled.render(
            seen,
            tools,
            add_generation_prompt,
            continue_final_message,
            {**self._special_tokens, **template_kwargs},
        )

    @cached_property
    def refuses_late_systems(self) -> bool:
        """Whether engines move system texts that come later to the front, of dialects where they may.

        vLLM's test: the bare template, on a conversation with a system message in the middle.
        """
        return any(compiled.refuses_late_systems for compiled in self._compiled.values())

    @cached_property
    def effort_without_thinking(self) -> str:
        """The `reasoning_effort` by which engines switch thinking off, of dialects that just say so.

        vLLM's rule: `none`, or `low` if the template refuses `none` or renders it like another effort.
        """
        silent = self._with_effort("none")
        if silent is None or any(self._with_effort(effort) == silent for effort in _EFFORTS):
            return "low"
        return "none"

    def _with_effort(self, effort: str) -> str | None:
        arguments: dict[str, Any] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        try:
            return self.render([{"role": "user", "content": "Hi"}], **arguments)
        except BadRequest:
            return None

    def now(self, *, with_tools: bool) -> str | None:
        """What else than messages and arguments a rendering depends on: the dates it writes, as of now.

        Equal messages render equally as long as this is equal. None: never count on it (the template
        makes random choices, or formats the time in a way its source does not tell).
        """
        formats = self._select([{}] if with_tools else None).date_formats
        return None if formats is None else "\n".join(map(_strftime_now, formats))

    def knows_developers(self, *, with_tools: bool) -> bool:
        """Whether the template names the role `developer`; if not, such messages become system messages,
        and all of those one at the beginning.
        """
        return self._select([{}] if with_tools else None).knows_developers

    def with_content_format(self, content_format: ContentFormat) -> "ChatTemplate":
        """The same template, given content in this form whatever its source tells; engines have a flag."""
        other = copy(self)
        other._compiled = {name: copy(compiled) for name, compiled in self._compiled.items()}
        for compiled in other._compiled.values():
            compiled.content_format = content_format
        return other

    def _select(self, tools: Sequence[dict[str, Any]] | None) -> "_Compiled":
        if tools is not None and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        return self._compiled["default"]


class _Compiled:
    """One compiled template with what its source tells about it."""

    def __init__(self, source: str) -> None:
        self._source = source
        tree = _environment.parse(source)
        self._template = _environment.from_string(source)
        self.content_format: ContentFormat = "parts" if _iterates_content(tree) else "string"
        self.date_formats = _date_formats(tree)
        self.knows_developers = "'developer'" in source or '"developer"' in source

    @cached_property
    def refuses_late_systems(self) -> bool:
        messages = [{"role": role, "content": "t"} for role in 2 * ("system", "user")]
        try:
            _bare_environment.from_string(self._source).render(messages=messages, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        except Exception:  # what else a template may do wrong: the engine's own test does not expect it
            return False
        return False

    def render(
        self,
        messages: list[Message],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
    ) -> str:
        if continue_final_message:
            messages = [*messages[:-1], _mark_end(messages[-1])]
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=variables.pop("documents", None),
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as cause:  # a template is a program: anything may come out of it
            raise BadRequest(
                f"messages: the model's chat template refuses them: {cause}", param="messages"
            ) from cause
        return _cut_at_mark(text) if continue_final_message else text


def normalise(messages: Sequence[Message], content_format: ContentFormat) -> list[Message]:
    """Messages as vLLM hands them to a template; the input is not changed.

    Kept are the fields that vLLM keeps: role, content, name, and by role tool_calls, reasoning,
    tool_call_id, tools. `content` becomes a string (parts that are not empty joined by newlines), or a list
    of text parts for templates that iterate over it; null becomes empty. Raises BadRequest with the field's
    path.
    """
    return [_normalise_one(message, index, content_format) for index, message in enumerate(messages)]


def _normalise_one(message: Message, index: int, content_format: ContentFormat) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequest(f"messages[{index}].role: a string is needed", param=f"messages[{index}].role")
    texts = _content_texts(message.get("content"), f"messages[{index}].content")
    if role == "system":
        texts = _without_billing(texts)
    content: object
    if content_format == "string":
        content = "\n".join(filter(None, texts))
    elif role == "tool":
        content = "\n".join(texts)
    else:
        content = [{"type": "text", "text": text} for text in texts]
    out: Message = {"role": role, "content": content}
    if role == "assistant":
        if message.get("tool_calls"):
            out["tool_calls"] = _tool_calls(message["tool_calls"], f"messages[{index}].tool_calls")
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            out["reasoning"] = out["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        out["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


_BILLING: Final = "x-anthropic-billing-header"


def _without_billing(texts: list[str]) -> list[str]:
    """System texts without the line that some coding agents put in front and change with every request."""
    if not any(text.startswith(_BILLING) for text in texts):
        return texts
    kept = [text.partition("\n")[2] if text.startswith(_BILLING) else text for text in texts]
    return [text for text, was in zip(kept, texts, strict=True) if text or not was]


def _developers_as_system(messages: list[Message]) -> list[Message]:
    """For a template without developers, what vLLM does: they speak as the system does, and if the system
    then speaks elsewhere than once at the beginning, all it says is put there.
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    renamed = [
        {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in renamed if message["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    said = "\n\n".join(text for message in system if (text := _as_string(message["content"])))
    return [{"role": "system", "content": said}, *(one for one in renamed if one["role"] != "system")]


def _as_string(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    assert isinstance(content, str)
    return content


def _content_texts(content: object, path: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise BadRequest(f"{path}: a string, a list of parts or null is allowed", param=path)
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise UnsupportedContent(
                f"{path}[{index}].type: {kind!r} is not text; allowed are {', '.join(_TEXT_PARTS)}",
                param=f"{path}[{index}].type",
            )
        text = part.get(_TEXT_PARTS[kind])
        if isinstance(text, str):
            texts.append(text)
        elif text is not None:
            path = f"{path}[{index}].{_TEXT_PARTS[kind]}"
            raise BadRequest(f"{path}: a string is needed", param=path)
    return texts


def _tool_calls(calls: object, path: str) -> list[Message]:
    """Tool calls with `arguments` as an object: templates expect that, requests carry a JSON string.

    In the order in which vLLM declares their fields, for templates that show a call as JSON; fields that it
    does not declare follow.
    """
    if not isinstance(calls, list):
        raise BadRequest(f"{path}: a list is needed", param=path)
    out = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            path = f"{path}[{index}].function"
            raise BadRequest(f"{path}: an object is needed", param=path)
        function = {**function, "arguments": _arguments(function.get("arguments"))}
        call = {**call, "function": _in_order(function, "arguments", "name")}
        out.append(_in_order(call, "id", "function", "type"))
    return out


def _in_order(fields: Message, *first: str) -> Message:
    return {**{name: fields[name] for name in first if name in fields}, **fields}


def _arguments(arguments: object) -> dict[str, Any]:
    """What engines do with arguments that are no JSON object: an empty one, not an error."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


_MARK: Final = "<sumibi:end-of-final-message> "
"""Ends in a space so that a template which trims content can be told from one that does not."""


def _mark_end(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    if not content:
        raise BadRequest("messages: the final message has no text to continue", param="messages")
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]}


def _cut_at_mark(text: str) -> str:
    """`text` up to the end of the final message; spaces at its end stay if the template kept them."""
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise BadRequest("messages: the chat template does not show the final message", param="messages")
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def _read_templates(directory: Path) -> dict[str, str]:
    templates = {}
    try:
        default = directory / "chat_template.jinja"
        if default.is_file():
            templates["default"] = default.read_text(encoding="utf-8")
        for path in sorted((directory / "chat_templates").glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ModelError(f"{directory}: cannot read the chat template: {cause}") from cause
    if templates:
        return templates
    configured = read_tokenizer_config(directory).get("chat_template")
    if isinstance(configured, str):
        return {"default": configured}
    if configured is None:
        return {}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in configured}
    except (TypeError, KeyError) as cause:
        raise ModelError(
            f"{directory}/tokenizer_config.json: chat_template is neither a text nor a list of named ones"
        ) from cause


def _compile(name: str, source: str) -> _Compiled:
    try:
        return _Compiled(source)
    except jinja2.TemplateError as cause:
        raise ModelError(f"chat template {name}: {cause}") from cause


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; rendered, it is its body."""

    tags = {"generation"}  # noqa: RUF012  jinja reads it as a class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; a model must see plain JSON."""
    options: dict[str, Any] = {
        "ensure_ascii": ensure_ascii,
        "indent": indent,
        "separators": separators,
        "sort_keys": sort_keys,
    }
    if not isinstance(value, SharedObject):
        return json.dumps(value, **options)
    spelling = repr(options)
    if spelling not in value._texts:
        value._texts[spelling] = json.dumps(value, **options)
    return value._texts[spelling]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as transformers has it


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    return environment


_environment = _make_environment()
_bare_environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
)


def _date_formats(tree: jinja2.nodes.Template) -> list[str] | None:
    """Formats of all dates that a template may write; None if its output depends on more than those."""
    names = [node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "load"]
    filters = [node.name for node in tree.find_all(jinja2.nodes.Filter)]
    if "random" in filters or "lipsum" in names:
        return None
    formats = []
    calls = [
        node for node in tree.find_all(jinja2.nodes.Call) if _names_of(node.node, None) == {"strftime_now"}
    ]
    for call in calls:
        match call.args:
            case [jinja2.nodes.Const(value=str(value))]:
                formats.append(value)
            case _:
                return None
    # `strftime_now is defined` is harmless; any other mention could be a call in disguise.
    tests = [test for test in tree.find_all(jinja2.nodes.Test) if _names_of(test, None) == {"strftime_now"}]
    return formats if len(calls) + len(tests) == names.count("strftime_now") else None


def _iterates_content(tree: jinja2.nodes.Template) -> bool:
    """True if the template loops over a message's content, so it expects a list of parts.

    The rule by which vLLM chooses the form: a `for` over `x['content']`, where x is the target of a `for`
    over `messages` or over a variable made from it; in a macro, a `for` over a parameter that is given
    such a content somewhere; outside of macros, a `for` over a variable named `content`.
    """
    lists = _aliases(tree, {"messages"})
    items = {
        loop.target.name
        for loop in tree.find_all(jinja2.nodes.For)
        if isinstance(loop.target, jinja2.nodes.Name) and _names_of(loop.iter, None) & lists
    }
    in_macros: set[int] = set()
    for macro in tree.find_all(jinja2.nodes.Macro):
        loops = list(macro.find_all(jinja2.nodes.For))
        in_macros.update(map(id, loops))
        given = _parameters_given_content(tree, macro, items)
        if any(isinstance(loop.iter, jinja2.nodes.Name) and loop.iter.name in given for loop in loops):
            return True
    return any(
        _names_of(loop.iter, "content") & items
        or (
            isinstance(loop.iter, jinja2.nodes.Name)
            and loop.iter.name == "content"
            and id(loop) not in in_macros
        )
        for loop in tree.find_all(jinja2.nodes.For)
    )


def _parameters_given_content(
    tree: jinja2.nodes.Template, macro: jinja2.nodes.Macro, items: set[str]
) -> set[str]:
    """Parameters of `macro` that are given the content of one of `items` in any of its calls."""
    names = [parameter.name for parameter in macro.args]
    calls = [call for call in tree.find_all(jinja2.nodes.Call) if _names_of(call.node, None) == {macro.name}]
    by_position = {
        name
        for call in calls
        for name, value in zip(names, call.args, strict=False)
        if _names_of(value, "content") & items
    }
    by_name = {
        given.key
        for call in calls
        for given in call.kwargs
        if given.key in names and _names_of(given.value, "content") & items
    }
    return by_position | by_name


def _aliases(tree: jinja2.nodes.Template, names: set[str]) -> set[str]:
    """`names` and every variable assigned from one of them (`{% set loop_messages = messages[1:] %}`)."""
    while True:
        more = {
            assign.target.name
            for assign in tree.find_all(jinja2.nodes.Assign)
            if isinstance(assign.target, jinja2.nodes.Name) and _names_of(assign.node, None) & names
        }
        if more <= names:
            return names
        names = names | more


def _names_of(node: jinja2.nodes.Node | None, key: str | None) -> set[str]:
    """The variable that `node` is (key None), or whose item `key` it is; filters, tests and slices are
    looked through.
    """
    match node:
        case jinja2.nodes.Filter() | jinja2.nodes.Test():
            return _names_of(node.node, key)
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Slice()):
            return _names_of(node.node, key)
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value=value)) if value == key:
            return _names_of(node.node, None)
        case jinja2.nodes.Getattr(attr=attr) if attr == key:
            return _names_of(node.node, None)
        case jinja2.nodes.Name(name=name) if key is None:
            return {name}
    return set()
