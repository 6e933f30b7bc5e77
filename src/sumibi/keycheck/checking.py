"""Runs the conversations, counts by habit, and keeps the first difference of each."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from sumibi.core.errors import BadRequest, ConfigError, ModelError
from sumibi.keycheck.asking import EngineDoor, Refused, Route, Served
from sumibi.keycheck.causes import Request, likely_cause
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptReader
from sumibi.prompts.samples import HABITS, Conversation, conversations
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

Report = Callable[[str, str, float | None], None]
_AROUND_TOKENS = 24
"""Shown on each side of a difference."""


class Habit(msgspec.Struct):
    """Counts of one habit's requests."""

    habit: str
    requests: int = 0
    same: int = 0
    refused: int = 0
    """By both: the template does not take such messages."""
    too_long: int = 0
    """Longer than the engine's context: not asked."""
    different: int = 0


class Difference(msgspec.Struct):
    """The first request of a habit that was read differently."""

    habit: str
    messages: int
    """How many messages it has."""
    token: int | None
    """Index of the first token that differs, None if only one side refuses."""
    here: str
    """Text around it as the gateway reads it, or why it refuses."""
    engine: str
    cause: str
    body: msgspec.Raw
    """The request, to send it again."""


class KeyCheck(msgspec.Struct):
    """What came out."""

    url: str
    model: str
    route: str
    tokenizer: str
    template: str
    seed: int
    conversations: int
    habits: list[Habit]
    differences: list[Difference]

    @property
    def requests(self) -> int:
        """All of them."""
        return sum(habit.requests for habit in self.habits)

    @property
    def compared(self) -> int:
        """Those of which both sides had tokens or only one did."""
        return sum(habit.same + habit.different for habit in self.habits)

    @property
    def not_tried(self) -> list[str]:
        """Habits for which there were too few conversations."""
        tried = {habit.habit for habit in self.habits}
        return [habit for habit in HABITS if habit not in tried]

    @property
    def ok(self) -> bool:
        """No difference, and something to compare."""
        return not self.differences and self.compared > 0


def check_keys(
    url: str,
    *,
    model: str | None,
    tokenizer: Path | None,
    template: Path | None,
    count: int,
    seed: int,
    report: Report,
) -> KeyCheck:
    """Compare `count` conversations. Raises ConfigError, ModelError, EngineUnavailable, WireError."""
    door = EngineDoor(url)
    try:
        served = _served(door, model)
        directory = tokenizer or _local(served, door.url)
        reads = Tokenizer.load(directory)
        shows = _template(template, directory, reads)
        route = door.route(served.id)
        comparison = _Comparison(door, route, served, reads, shows)
        for done, conversation in enumerate(conversations(count, seed)):
            report("keys", f"asking {door.url}", done / count)
            comparison.add(conversation)
        report("keys", f"asked {door.url}", 1.0)
    finally:
        door.close()
    return KeyCheck(
        url=door.url,
        model=served.id,
        route=str(route),
        tokenizer=str(directory),
        template=str(template or directory),
        seed=seed,
        conversations=count,
        habits=list(comparison.habits.values()),
        differences=comparison.differences,
    )


def _served(door: EngineDoor, model: str | None) -> Served:
    found = door.models()
    for one in found:
        if model in (None, one.id):
            return one
    names = ", ".join(one.id for one in found) or "nothing"
    raise ConfigError(f"--model {model}: {door.url} serves {names}")


def _local(served: Served, url: str) -> Path:
    directory = Path(served.root or "")
    if directory.is_absolute() and (directory / "tokenizer.json").is_file():
        return directory
    place = served.root or "a place it does not name"
    raise ConfigError(
        f"--tokenizer DIR is needed: {url} serves {served.id} from {place}, no directory of this machine"
    )


def _template(file: Path | None, directory: Path, tokenizer: Tokenizer) -> ChatTemplate:
    if file is None or file.is_dir():
        found = ChatTemplate.load(file or directory, tokenizer)
        if found is None:
            raise ModelError(f"{file or directory}: no chat template there; name one with --template FILE")
        return found
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"--template {file}: cannot read it: {cause}") from cause
    return ChatTemplate({"default": source}, tokenizer.special_tokens)


class _Comparison:
    """Counts and differences so far."""

    def __init__(
        self, door: EngineDoor, route: Route, served: Served, tokenizer: Tokenizer, template: ChatTemplate
    ) -> None:
        self.habits: dict[str, Habit] = {}
        self.differences: list[Difference] = []
        self._door = door
        self._route = route
        self._served = served
        self._tokenizer = tokenizer
        self._template = template
        self._reader = PromptReader(tokenizer, template, keep_token_ids=True)

    def add(self, conversation: Conversation) -> None:
        """Every request of a conversation, in turn, as an agent would send them."""
        habit = self.habits.setdefault(conversation.habit, Habit(conversation.habit))
        for length in conversation.lengths():
            habit.requests += 1
            body = conversation.body(length, self._served.id)
            if self._route is Route.TOKENIZE:
                body["messages"] = [_reasoning_renamed(message) for message in body["messages"]]
            here, why_here = self._read_here(msgspec.json.encode(body))
            limit = self._served.max_model_len
            if here is not None and limit is not None and len(here) >= limit:
                habit.too_long += 1
                continue
            try:
                there, why_there = self._door.tokens(self._route, body), ""
            except Refused as refusal:
                there, why_there = None, str(refusal)
            if here == there:
                if here is None:
                    habit.refused += 1
                else:
                    habit.same += 1
                continue
            habit.different += 1
            if habit.different == 1:
                self.differences.append(
                    self._difference(habit.habit, msgspec.json.encode(body), here, why_here, there, why_there)
                )

    def _read_here(self, body: bytes) -> tuple[list[int] | None, str]:
        try:
            return self._reader.read(parse_request("/v1/chat/completions", body)).token_ids, ""
        except BadRequest as refusal:
            return None, str(refusal)

    def _difference(
        self,
        habit: str,
        body: bytes,
        here: list[int] | None,
        why_here: str,
        there: list[int] | None,
        why_there: str,
    ) -> Difference:
        asked = parse_request("/v1/chat/completions", body)
        request = Request(asked.messages, asked.tools, asked.template_arguments)
        if here is None or there is None:
            who = "the gateway" if here is None else "the engine"
            token = None
            texts = [why or self._around(ids or [], 0) for why, ids in ((why_here, here), (why_there, there))]
            cause = f"only {who} refuses the request: the engine has another template, or rules of its own"
        else:
            token = next((at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            token = min(len(here), len(there)) if token is None else token
            texts = [self._around(ids, token) for ids in (here, there)]
            cause = likely_cause(self._tokenizer, self._template, request, here, there)
        shown_here, shown_there = texts
        return Difference(
            habit, len(asked.messages), token, shown_here, shown_there, cause, msgspec.Raw(body)
        )

    def _around(self, ids: list[int], token: int) -> str:
        near = ids[max(0, token - _AROUND_TOKENS // 2) : token + _AROUND_TOKENS]
        return self._tokenizer.decode(near, skip_special_tokens=False)


def _reasoning_renamed(message: dict[str, object]) -> dict[str, object]:
    """/tokenize, unlike the chat API, reads reasoning under its newer name only."""
    return {("reasoning" if name == "reasoning_content" else name): value for name, value in message.items()}
