"""From a request to its prompt's keys, for every model served: which tokenizer, found where.

In this order: the directory given by `--tokenizer`; the directory an engine names as its model's root, if
it is on this machine; one engine's /tokenize, asked once per prompt that is not remembered; else keys over
chunks of bytes, which are comparable among themselves and to nothing an engine says. Which one it is, is
logged when the model is first seen and exported as a metric; chunks of bytes are given up as soon as an
engine comes up that knows better.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from sumibi.core.errors import EngineUnavailable, ModelError
from sumibi.engines.discovery import EngineInfo, address_of
from sumibi.engines.http import ask
from sumibi.prompts.dialects import PromptKind, PromptRequest, settled
from sumibi.prompts.keys import Prompt, PromptReader
from sumibi.prompts.template import ChatTemplate, UnsupportedContent
from sumibi.prompts.tokenizer import Tokenizer

_TOKENIZE_TIMEOUT_S: Final = 2.0
_LONG_BYTES: Final = 256 * 1024
"""Requests longer than this are read in a thread: never-seen text takes about 0.2 ms a KB to tokenise, and
meanwhile no stream would flow. Shorter ones are not worth the hand-over."""

log = logging.getLogger(__name__)


class Source(StrEnum):
    """Where a model's tokens come from."""

    LOCAL = "local"
    """A tokenizer in this process."""
    ENGINE = "engine"
    """One engine's /tokenize."""
    BYTES = "bytes"
    """No tokenizer: chunks of bytes stand for tokens."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Shared(NamedTuple):
    """What models with the same tokenizer (a model and its adapters) have in common."""

    reader: PromptReader
    turn: asyncio.Lock
    """A reader is for one at a time."""


class ModelReader:
    """Reads the prompts of one model, whichever of its names they ask for."""

    def __init__(self, name: str, source: Source, shared: Shared) -> None:
        self.name = name
        """What its prompts are hashed under, and its name at `engines`; empty: whatever they ask for."""
        self.source = source
        self.reader = shared.reader
        self.asked = 0
        """Questions to the engine's /tokenize."""
        self.failed = 0
        """Of these, the ones without an answer: their prompts got byte keys."""
        self.engines: deque[str] = deque()
        """URLs of those that tokenise; the first one is asked, and goes last when it does not answer."""
        self._turn = shared.turn

    def read(self, asked: PromptRequest, body_bytes: int) -> Prompt | None:
        """The prompt's keys, None if they take longer: then `read_later` has them. Raises BadRequest."""
        asked = self._by_name(asked)
        if self.source is Source.ENGINE and asked.kind is not PromptKind.TOKENS and not asked.opaque:
            return self.reader.recall(settled(asked, None))
        if body_bytes > _LONG_BYTES or self._turn.locked():
            return None
        return self.reader.read(asked)

    async def read_later(self, asked: PromptRequest, body_bytes: int) -> Prompt:
        """The prompt's keys, by asking an engine or in a thread beside the loop. Raises BadRequest."""
        asked = self._by_name(asked)
        if self.source is Source.ENGINE and not asked.opaque:
            return await self._read_remotely(settled(asked, None))
        async with self._turn:
            if body_bytes > _LONG_BYTES:
                return await asyncio.to_thread(self.reader.read, asked)
            return self.reader.read(asked)

    def _by_name(self, asked: PromptRequest) -> PromptRequest:
        if self.name in ("", asked.model):
            return asked
        return msgspec.structs.replace(asked, model=self.name)

    async def _read_remotely(self, asked: PromptRequest) -> Prompt:
        """Ask the engine for the prompt's tokens; byte keys if it does not answer."""
        try:
            question = _tokenize_body(asked)
        except UnsupportedContent:
            return self.reader.read(asked)
        url = self.engines[0]
        host, port = address_of(url)
        self.asked += 1
        try:
            reply = await ask(host, port, "/tokenize", body=question, timeout_s=_TOKENIZE_TIMEOUT_S)
            if reply.status != 200:
                raise EngineUnavailable(f"/tokenize answered {reply.status}")
            tokens = msgspec.json.decode(reply.body, type=_Tokens).tokens
        except (EngineUnavailable, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
            self.failed += 1
            if self.failed == 1:
                log.warning("%s: cannot tokenize there (%s); using byte keys", url, cause)
            if self.engines[0] == url:
                self.engines.rotate(-1)
            return self.reader.read(asked)
        return self.reader.read_tokens(asked, tokens)


class _Found(NamedTuple):
    """Where the tokens of a model will come from."""

    source: Source
    directory: Path | None = None


class ModelReaders:
    """The readers of all models served, made when an engine that serves a new one comes up.

    In two steps: `find` may take its time (load a tokenizer, ask the engine); `bind` is called once the
    router knows the engine, because only then is the model's block size fixed.
    """

    def __init__(
        self, tokenizer: Path | None, block_tokens: Callable[[str], int], key_name: Callable[[str], str]
    ) -> None:
        """`block_tokens` and `key_name` are the router's: it says how prompts for a model are hashed."""
        self.readers: dict[str, ModelReader] = {}
        """By name; the names of one model share a reader."""
        self.unknown = ModelReader("", Source.BYTES, Shared(PromptReader(), asyncio.Lock()))
        """For requests that come before any engine was seen: whether their model exists is not known yet."""
        self._directory = tokenizer
        self._block_tokens = block_tokens
        self._key_name = key_name
        self._loaded: dict[Path, tuple[Tokenizer, ChatTemplate | None]] = {}
        self._shared: dict[tuple[Path | None, int], Shared] = {}
        """By tokenizer directory and block size: with adapters that come and go, memory stays bounded."""
        self._found: dict[str, _Found] = {}

    def load_given(self) -> None:
        """Load `--tokenizer` now, so that a wrong directory is an error at start. Raises ModelError."""
        if self._directory is not None:
            self._load(self._directory)

    async def find(self, info: EngineInfo) -> None:
        """Find out where the tokens of an engine's models will come from."""
        for model, root, parent in zip(info.models, info.roots, info.parents, strict=True):
            if model not in self._found or self._found[model].source is Source.BYTES:
                known = self._found.get(parent or "")
                if known is None or known.source is not Source.LOCAL:
                    known = await self._source(model, root, info.url)
                self._found[model] = known  # an adapter's prompts are read as its model's

    def bind(self, info: EngineInfo) -> None:
        """Make the readers of an engine's models that have none yet."""
        for model in info.models:
            if model not in self._found:
                continue
            name = self._key_name(model)
            reader = self.readers.get(name)
            if reader is None or reader.source is not self._found[name].source:
                reader = self.readers[name] = self._reader(name)
            self.readers[model] = reader
            if info.max_model_tokens is not None:
                reader.reader.allow(info.max_model_tokens)
            if reader.source is Source.ENGINE and name in info.models and info.url not in reader.engines:
                reader.engines.append(info.url)

    def _reader(self, model: str) -> ModelReader:
        source, directory = self._found[model]
        like = directory, self._block_tokens(model)
        if like not in self._shared:
            tokenizer, template = self._loaded[directory] if directory is not None else (None, None)
            reader = PromptReader(tokenizer, template, block_tokens=like[1])
            self._shared[like] = Shared(reader, asyncio.Lock())
        log.info("%s: prompts are read with %s", model, _EXPLAINED[source])
        return ModelReader(model, source, self._shared[like])

    async def _source(self, model: str, root: str, engine_url: str) -> _Found:
        directory = self._directory or _local_directory(root)
        if directory is not None:
            try:
                await asyncio.to_thread(self._load, directory)
                return _Found(Source.LOCAL, directory)
            except ModelError as cause:
                log.warning("%s: no tokenizer from %s: %s", model, directory, cause)
        if await _tokenizes(engine_url, model):
            return _Found(Source.ENGINE)
        return _Found(Source.BYTES)

    def _load(self, directory: Path) -> None:
        if directory not in self._loaded:
            tokenizer = Tokenizer.load(directory)
            self._loaded[directory] = tokenizer, ChatTemplate.load(directory, tokenizer)


_EXPLAINED = {
    Source.LOCAL: "a tokenizer in this process: exact",
    Source.ENGINE: "an engine's /tokenize, one question per new prompt: exact (--tokenizer DIR is faster)",
    Source.BYTES: "chunks of bytes, as no tokenizer was found: approximate (give --tokenizer DIR)",
}


def _local_directory(root: str) -> Path | None:
    """`root` as a directory of this machine with a tokenizer in it."""
    path = Path(root)
    return path if path.is_absolute() and (path / "tokenizer.json").is_file() else None


async def _tokenizes(url: str, model: str) -> bool:
    host, port = address_of(url)
    body = msgspec.json.encode({"model": model, "prompt": "a"})
    try:
        return (await ask(host, port, "/tokenize", body=body, timeout_s=_TOKENIZE_TIMEOUT_S)).status == 200
    except EngineUnavailable:
        return False


def _tokenize_body(asked: PromptRequest) -> bytes:
    """The question to vLLM's /tokenize for the tokens of the (first) prompt. Raises UnsupportedContent."""
    if asked.kind is PromptKind.TEXT:
        text = asked.texts[0] if asked.texts else ""
        return msgspec.json.encode(
            {"model": asked.model, "prompt": text, "add_special_tokens": asked.add_special_tokens}
        )
    question: dict[str, Any] = {
        "model": asked.model,
        "messages": _messages_to_tokenize(asked),
        "add_generation_prompt": asked.add_generation_prompt,
        "continue_final_message": asked.continue_final_message,
        "add_special_tokens": asked.add_special_tokens,
    }
    if asked.template_arguments:
        question["chat_template_kwargs"] = asked.template_arguments
    if asked.raw_tools is not None:
        question["tools"] = asked.raw_tools if asked.conversion.one_to_one else asked.tools
    return msgspec.json.encode(question)


def _messages_to_tokenize(asked: PromptRequest) -> list[Any]:
    """The messages as /tokenize reads them: unlike the other routes it overlooks `reasoning_content`."""
    if asked.conversion.one_to_one and not any(_OLD_NAME in bytes(raw) for raw in asked.raw_messages):
        return list(asked.raw_messages)
    return [_with_new_name(message) for message in asked.messages]


_OLD_NAME = b'"reasoning_content"'


def _with_new_name(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("reasoning_content") is None or message.get("reasoning") is not None:
        return message
    return {**message, "reasoning": message["reasoning_content"]}
