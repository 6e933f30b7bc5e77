"""What a difference in tokens likely comes from: causes that explain it exactly are tried one by one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sumibi.core.errors import BadRequest
from sumibi.prompts.template import ChatTemplate, ContentFormat, Message
from sumibi.prompts.tokenizer import Tokenizer

_DEFAULT_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": True},
    {"thinking": False},
)


class Request:
    """One chat request as the gateway reads it."""

    def __init__(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
    ) -> None:
        self.messages = messages
        self.tools = tools
        self.arguments = arguments


def likely_cause(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    request: Request,
    here: Sequence[int],
    there: Sequence[int],
) -> str:
    """One sentence on why `here` differs from the engine's tokens `there`."""
    here, there = list(here), list(there)
    for token_id, name in ((tokenizer.bos_id, "BOS"), (tokenizer.eos_id, "EOS")):
        if token_id is not None and there == [token_id, *here]:
            return (
                f"the engine puts {name} in front once more: its tokenizer adds it, and so does the template"
            )
        if token_id is not None and here == [token_id, *there]:
            return f"the engine leaves out {name} in front: it has another template or tokenizer"
    if there and max(there) >= tokenizer.vocab_size:
        return "the engine has another vocabulary: it has token ids that are not in this tokenizer's"
    for cause, text in _other_renderings(template, request):
        if tokenizer.encode(text, add_special_tokens=False) == there:
            return cause
    shown_here, shown_there = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (here, there))
    if shown_here == shown_there:
        return (
            "the text is the same, cut otherwise: the engine's tokenizer files are of another revision,"
            " or it loads them by other rules"
        )
    if _strange(shown_there):
        return "the engine has another vocabulary: in this one its tokens make no text"
    if template.now(with_tools=request.tools is not None) != "":
        return "another template, or another date: this one writes the date, so clock and time zone count"
    return "the engine has another template: see its --chat-template, and the file beside its weights"


def _other_renderings(template: ChatTemplate, request: Request) -> Iterator[tuple[str, str]]:
    """Texts that the engine would make of the request if it were set up in some other way."""
    formats: tuple[tuple[ContentFormat, str], ...] = (("string", "string"), ("parts", "openai"))
    for content_format, name in formats:
        other = template.with_content_format(content_format)
        yield from _rendered(
            f"the engine gives content to templates as `{name}`: it was started with"
            f" --chat-template-content-format {name}, which the gateway does not follow",
            lambda other=other: _render(other, request),  # type: ignore[misc]
        )
    if request.tools is not None:
        yield from _rendered(
            "the engine's template does not show tools",
            lambda: _render(template, Request(request.messages, None, request.arguments)),
        )
    plain = [
        {name: value for name, value in message.items() if name not in ("reasoning", "reasoning_content")}
        for message in request.messages
    ]
    yield from _rendered(
        "the engine overlooks the reasoning of earlier messages",
        lambda: _render(template, Request(plain, request.tools, request.arguments)),
    )
    if request.arguments:
        yield from _rendered(
            "the engine overlooks chat_template_kwargs",
            lambda: _render(template, Request(request.messages, request.tools, {})),
        )
    for arguments in _DEFAULT_ARGUMENTS:
        ((name, value),) = arguments.items()
        yield from _rendered(
            f"the engine has template arguments of its own (--default-chat-template-kwargs): {name}"
            f" {str(value).lower()}",
            lambda arguments=arguments: _render(  # type: ignore[misc]
                template, Request(request.messages, request.tools, {**arguments, **request.arguments})
            ),
        )


def _rendered(cause: str, render: Callable[[], str]) -> Iterator[tuple[str, str]]:
    try:
        yield cause, render()
    except BadRequest:
        return


def _render(template: ChatTemplate, request: Request) -> str:
    return template.render(request.messages, tools=request.tools, **request.arguments)


def _strange(text: str) -> bool:
    """Bytes that are no text, as ids of one vocabulary look in another one."""
    return text.count("\ufffd") > max(2, len(text) // 50)
