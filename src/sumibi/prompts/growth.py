"""Rendering only what is new of a conversation, for templates that were proved to allow it.

Rendering 100 KB of messages takes about a millisecond, and agents send all of them again each turn. For
an append-only template the text of `known + new` messages begins with the text of `known`, and what comes
after depends only on the messages around the seam. Then a *stand-in* renders it: the head of the
conversation (system prompt, first user message), the last known message, and the new ones; what the
stand-in without the new ones renders is cut off the front.

Whether a template is like that cannot be read off its source, so it is tried (`Growth.proof`): scripts
with everything that makes templates look back or ahead (thinking, tool calls and their results,
consecutive messages of one role, with and without a system prompt), cut at every place at which an agent
would ask, each rendered whole and grown. Proofs are per use: with or without tools, and for each set of
template arguments. Templates that drop old thoughts when a user speaks get a proof for what comes between
users, which is most of what an agent adds. Message content could still matter in a way that no script
shows, which is why `sumibi.prompts.chats` checks a share of what it recognised.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.prompts.template import ChatTemplate, Message

_MAX_PROOFS: Final = 32
"""Sets of template arguments that get a proof; requests with other ones are rendered whole."""

_MOST_ARGUMENT_BYTES: Final = 4096
"""Requests with more of them are rendered whole, too: a proof renders with them dozens of times."""

HEAD_MESSAGES: Final = 3
"""The first user message is looked for this far; it belongs to the head."""

_LONGEST_STEP: Final = 5
"""Messages by which scripts are grown at once, at most."""


class Rendering(NamedTuple):
    """How to render a request apart from its messages."""

    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any]
    add_generation_prompt: bool


class Proof(NamedTuple):
    """An append-only use of a template."""

    generation_prompt: str
    """What `add_generation_prompt` appends, whatever the messages."""
    roles: Sequence[str]
    """New messages may have these."""


class Growth:
    """Proves uses of one template append-only, and renders new messages for those."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._proofs: dict[tuple[bool | None, bytes], Proof | None] = {}

    def proof(self, rendering: Rendering) -> Proof | None:
        """The proof for this use, None if the template is not append-only in it.

        The first call for a use tries the template (some ten milliseconds), later ones look it up.
        """
        tools = rendering.tools
        arguments = msgspec.json.encode(rendering.arguments, order="deterministic")
        use = (None if tools is None else bool(tools), arguments)
        if use not in self._proofs:
            if len(self._proofs) >= _MAX_PROOFS or len(arguments) > _MOST_ARGUMENT_BYTES:
                return None
            some = None if tools is None else tools[:2]
            self._proofs[use] = self._prove(Rendering(some, rendering.arguments, False))
        return self._proofs[use]

    def grown(self, seam: Sequence[Message], new: Sequence[Message], rendering: Rendering) -> str | None:
        """The text that messages `new` add to a conversation, generation prompt included if asked for.

        `seam` are the messages named by `seam_of`. Only for renderings with a proof. None when the
        messages are beyond what the proof covers.
        """
        proof = self.proof(rendering)
        if proof is None or not self._covers(seam, new, rendering, proof.roles):
            return None
        return self._grown(seam, new, rendering)

    def _covers(
        self, seam: Sequence[Message], new: Sequence[Message], rendering: Rendering, roles: Sequence[str]
    ) -> bool:
        """Whether a proof for new messages of these roles says anything about these messages.

        It says nothing of a place between two results of tools: nobody asks there, and templates that put
        results in a row into one turn close that turn where the last one ends.
        """
        around = [message.get("role") for message in (*seam[-1:], *new[:1])]  # new ones may say nothing
        if around == ["tool", "tool"]:
            return False
        if any(message.get("role") not in roles for message in new):
            return False
        if any(message.get("role") not in _PROVED_ROLES for message in seam):
            return False
        return not self._moves_to_the_front(seam, new, rendering)

    def _grown(self, seam: Sequence[Message], new: Sequence[Message], rendering: Rendering) -> str | None:
        try:
            before = self._render(seam, rendering._replace(add_generation_prompt=False))
            after = self._render([*seam, *new], rendering)
        except BadRequest:
            return None  # rendered whole it may be fine, or be refused with the right words
        return after[len(before) :] if after.startswith(before) else None

    def _moves_to_the_front(
        self, seam: Sequence[Message], new: Sequence[Message], rendering: Rendering
    ) -> bool:
        """Whether system messages may be put together at the front, because of a developer's that the
        template does not know; one may be among those messages that are not in the seam.
        """
        late = [message.get("role") for message in (*seam[1:], *new)]
        if "developer" not in late and "system" not in late:
            return False
        return not self._template.knows_developers(with_tools=rendering.tools is not None)

    def _render(self, messages: Sequence[Message], rendering: Rendering) -> str:
        return self._template.render(
            messages,
            tools=rendering.tools,
            add_generation_prompt=rendering.add_generation_prompt,
            **rendering.arguments,
        )

    def _prove(self, rendering: Rendering) -> Proof | None:
        for roles in (_PROVED_ROLES, _BETWEEN_USERS):
            prompts: set[str] = set()
            if all(self._holds(script, rendering, roles, prompts) for script in _SCRIPTS):
                return Proof(prompts.pop(), roles) if len(prompts) == 1 else None
        return None

    def _holds(
        self, script: list[Message], rendering: Rendering, roles: Sequence[str], prompts: set[str]
    ) -> bool:
        """Try one script, grown by messages of these roles; collects the generation prompts seen.

        Beginnings of the script that the template refuses are passed over: a conversation that contains
        one will never be known.
        """
        closed: dict[int, str] = {}
        for length in range(1, len(script) + 1):
            try:
                whole = self._render(script[:length], rendering)
                opened = self._render(script[:length], rendering._replace(add_generation_prompt=True))
            except BadRequest:
                continue
            for known in range(max(1, length - _LONGEST_STEP), length):
                if known not in closed:
                    continue
                seam = [script[index] for index in seam_of(script[:HEAD_MESSAGES], known)]
                if not self._covers(seam, script[known:length], rendering, roles):
                    continue
                grown = self._grown(seam, script[known:length], rendering)
                if grown is None or closed[known] + grown != whole:
                    return False
            if not opened.startswith(whole):
                return False
            closed[length] = whole
            prompts.add(opened[len(whole) :])
        return len(closed) != 1  # one alone shows nothing


def seam_of(first: Sequence[Message], known: int) -> list[int]:
    """Indexes of the known messages that stand in for all `known` ones.

    `first` are the conversation's first `HEAD_MESSAGES`, or all if it has fewer: up to the first user
    message they are the head, where templates put tools, defaults and dates. The last known message
    decides how the next one begins.
    """
    roles = [message.get("role") for message in first]
    head = min(roles.index("user") + 1 if "user" in roles else 1, known)
    return [*range(head), *range(max(head, known - 1), known)]


def _says(role: str, content: str | None, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def _calls(*names: str, content: str | None = None, **fields: Any) -> Message:
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": '{"of": "x"}'}}
        for name in names
    ]
    return _says("assistant", content, tool_calls=calls, **fields)


def _result(name: str) -> Message:
    return _says("tool", f"result of {name}", tool_call_id=f"call_{name}", name=name)


_SYSTEM = _says("system", "be brief")
_USER = _says("user", "first question")
_THOUGHT: Final = "<think>\nlet me see\n</think>\n\n"

_SCRIPTS: list[list[Message]] = [
    # plain, long enough to notice who counts
    [_SYSTEM, _USER, *[_says(role, f"{role} {i}") for i in range(5) for role in ("assistant", "user")]],
    [_USER, *[_says(role, f"{role} {i}") for i in range(3) for role in ("assistant", "user")]],
    # thinking, in the text and beside it
    [_SYSTEM, _USER, *[_says(*turn) for turn in 3 * [("assistant", _THOUGHT + "yes"), ("user", "and?")]]],
    [
        _USER,
        _says("assistant", "a", reasoning_content="hm"),
        _USER,
        _says("assistant", "b", reasoning="so"),
        _USER,
    ],
    # tools: alone and several at once, with and without words, with thoughts, a loop of them
    [_SYSTEM, _USER, _calls("f"), _result("f"), _says("assistant", "done"), _USER, _says("assistant", "bye")],
    [_USER, _calls("f", "g", content="look"), _result("f"), _result("g"), _calls("h"), _result("h"), _USER],
    [
        _USER,
        _calls("f", reasoning="first f"),
        _result("f"),
        _calls("g", content=_THOUGHT),
        _result("g"),
        _says("assistant", "both done", reasoning="enough"),
        _USER,
        _says("assistant", "bye"),
        _USER,
    ],
    # one role several times, a system prompt in the middle, a tool result in a user's words
    [_USER, _USER, _says("assistant", "a"), _says("assistant", "b"), _USER, _SYSTEM, _USER],
    [
        _SYSTEM,
        _SYSTEM,
        _USER,
        _says("assistant", "a"),
        _says("user", "<tool_response>\nr\n</tool_response>"),
        _USER,
    ],
    [_says("developer", "be brief"), _USER, _says("assistant", "a"), _USER, _says("assistant", "b")],
    # nothing, or only space, in and around the words
    [
        _says("user", " hi \n"),
        _says("assistant", "\n yes "),
        _says("user", ""),
        _says("assistant", None),
        _USER,
    ],
]
_PROVED_ROLES = sorted({str(message["role"]) for script in _SCRIPTS for message in script})
"""A list: a client's role may be anything JSON has, also what cannot be looked up in a set."""
_BETWEEN_USERS = ["assistant", "tool"]
"""What an agent adds until a user speaks again."""
