"""Conversations that are recognised, so that only what is new of them is rendered and tokenised.

Three ways to where a chat's prompt ends in the trie, each checked against the slower one behind it:

1. *Seen before*: the same messages, byte for byte, with the same tools and arguments. Nothing is decoded.
2. *Grown*: the messages begin with those of a conversation seen before, or with all but the last of one that
   was rendered whole, and the template was proved append-only (`sumibi.prompts.growth`). Only the new
   messages are decoded and rendered.
3. *Whole*: every message is decoded and rendered.

Of the first two, one in a hundred is done the third way too. A difference is counted, logged, and
switches both off for good.
"""

import logging
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.core.keys import root_key
from sumibi.prompts.dialects import PromptRequest, settled
from sumibi.prompts.growth import HEAD_MESSAGES, Growth, Rendering, seam_of
from sumibi.prompts.segments import Place, Segment, SegmentStore
from sumibi.prompts.template import ChatTemplate, Message
from sumibi.prompts.texts import Put, Texts, last_cut

_log = logging.getLogger(__name__)

CHECK_EVERY: Final = 100
"""One in this many prompts recognised without rendering is rendered nevertheless, to compare."""

_NEWEST: Final = 32
"""Messages from the end at which a known conversation is looked for: more than a turn ever adds."""

_STEM: Final = b"<"
"""Behind a name: the place where a conversation goes on after these messages; no prompt ended there."""


class ChatStats(msgspec.Struct):
    """How chats were read, since start."""

    seen: int = 0
    """Recognised byte for byte."""
    grown: int = 0
    """Only new messages were rendered."""
    whole: int = 0
    """Rendered whole, checks included."""
    checks: int = 0
    mismatches: int = 0
    """Checks that found a difference. Anything but 0 is a bug, and the fast paths are off."""
    fast_paths_off: str = ""
    """Why prompts are no longer recognised without rendering; empty while they are."""


class Found(NamedTuple):
    """Where a prompt ends in the trie."""

    end: Segment
    reused_tokens: int
    """Tokens that were there before."""


class Chats:
    """Reads the chats of one template."""

    def __init__(self, template: ChatTemplate, texts: Texts, store: SegmentStore) -> None:
        self.stats = ChatStats()
        self._template = template
        self._growth = Growth(template)
        self._texts = texts
        self._store = store

    def read(self, request: PromptRequest) -> Found:
        """Put a chat's prompt into the trie. Raises BadRequest when the template refuses its messages."""
        request = settled(request, self._template)
        now = self._template.now(with_tools=request.raw_tools is not None)
        if now is None or request.continue_final_message or self.stats.fast_paths_off:
            return self._whole(request, None)
        digests = request_digests(request, now)
        found = self._recognise(request, digests)
        if found is None:
            return self._whole(request, digests)
        if (self.stats.seen + self.stats.grown) % CHECK_EVERY == 0:
            return self._checked(request, found)
        return found

    def _whole(self, request: PromptRequest, digests: list[bytes] | None) -> Found:
        text = self._template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.template_arguments,
        )
        self.stats.whole += 1
        start = self._texts.start(request_root(request), add_special_tokens=request.add_special_tokens)
        put = self._texts.put(start, text)
        if digests is not None and len(digests) > 1:
            self._name_stem(request, digests[-2], start, put, text)
        return self._named(request, digests, start, put, text)

    def _recognise(self, request: PromptRequest, digests: list[bytes]) -> Found | None:
        """As `_whole`, for a conversation that was seen before, or was seen before it grew."""
        for new, digest in enumerate(reversed(digests)):
            place = self._store.find(digest)
            if place is None and new == 1:
                place = self._store.find(digest + _STEM)
            if place is None:
                continue
            if new > 0:
                return self._grow(request, digests, place, len(request.raw_messages) - new)
            self.stats.seen += 1
            return Found(place.end, place.end.tokens)
        return None

    def _grow(self, request: PromptRequest, digests: list[bytes], place: Place, known: int) -> Found | None:
        rendering = _rendering(request)
        if place.base is None or self._growth.proof(rendering) is None:
            return None
        grown = self._added(request, known, rendering)
        if grown is None:
            return None
        self.stats.grown += 1
        text = place.tail + grown
        return self._named(request, digests, place.base, self._texts.put(place.base, text), text)

    def _added(self, request: PromptRequest, known: int, rendering: Rendering) -> str | None:
        """The text that all messages but the first `known` add, None if that cannot be told."""
        joint = _one_to_one(request, known) if request.conversion.one_to_one else _converted(request, known)
        return None if joint is None else self._growth.grown(joint.seam, joint.new, rendering)

    def _name_stem(self, request: PromptRequest, digest: bytes, start: Segment, put: Put, text: str) -> None:
        """Name the place before the last message, for the same conversation with other last words.

        Only of what was rendered whole: what grew has the place from which it grew. `digest` is that of all
        messages but the last.
        """
        rendering = _rendering(request)
        if self._growth.proof(rendering) is None:
            return
        added = self._added(request, len(request.raw_messages) - 1, rendering)
        if not added or not text.endswith(added):
            return
        length = len(text) - len(added)
        base, at = last_cut(start, put, length)
        if at > 0:  # its name goes with it, and nothing goes before what follows it
            self._store.name(digest + _STEM, Place(base, base, text[at:length]))

    def _named(
        self, request: PromptRequest, digests: list[bytes] | None, start: Segment, put: Put, text: str
    ) -> Found:
        """Where the prompt ends whose `text` was put after `start`; named for the next turn."""
        end = self._texts.close(put.end, add_special_tokens=request.add_special_tokens)
        if digests is not None:
            length = self._length_that_stays(request, text)
            if length is None:
                place = Place(end)
            else:
                base, at = last_cut(start, put, length)
                place = Place(end, base, text[at:length])
            self._store.name(digests[-1], place)
        return Found(end, put.reused_tokens)

    def _length_that_stays(self, request: PromptRequest, text: str) -> int | None:
        """Characters of `text` that stay when messages are added; None if that is not known."""
        proof = self._growth.proof(_rendering(request))
        if proof is None:
            return None
        if not request.add_generation_prompt:
            return len(text)
        prompt = proof.generation_prompt
        return len(text) - len(prompt) if text.endswith(prompt) else None

    def _checked(self, request: PromptRequest, found: Found) -> Found:
        """`found`, if rendering the whole request comes to the same; else nothing is recognised any more."""
        self.stats.checks += 1
        try:
            whole = self._whole(request, None)
        except BadRequest as refusal:
            self._distrust(f"the template refuses what was recognised: {refusal}")
            raise
        if whole.end is not found.end:
            self._distrust("a recognised prompt reads differently when rendered whole")
        return whole

    def _distrust(self, cause: str) -> None:
        self.stats.mismatches += 1
        self.stats.fast_paths_off = cause
        _log.error("prompt keys: %s; from now on every prompt is rendered", cause)


class _Joint(NamedTuple):
    """Where new messages follow known ones."""

    seam: list[Message]
    """See `growth.seam_of`."""
    new: list[Message]


def _one_to_one(request: PromptRequest, known: int) -> _Joint:
    """Of a dialect in which raw messages are chat messages: those in the middle are not decoded."""
    raws, convert = request.raw_messages, request.conversion.messages
    first = convert(None, raws[:HEAD_MESSAGES], 0)
    late = convert(None, raws[known - 1 :], known - 1)
    return _Joint(
        [first[index] if index < len(first) else late[0] for index in seam_of(first, known)], late[1:]
    )


def _converted(request: PromptRequest, known: int) -> _Joint | None:
    """Of any other dialect; None if what is known and what is new cannot be told apart."""
    raws, convert = request.raw_messages, request.conversion.messages
    first = convert(request.raw_head, raws[: min(known, HEAD_MESSAGES)], 0)
    last = convert(None, raws[known - 1 : known], known - 1)
    late = convert(None, raws[known - 1 :], known - 1)
    new = late[len(last) :]
    if not last or last[-1]["role"] == "assistant" or (known > HEAD_MESSAGES > len(first)):
        return None  # a new part may belong to an assistant's last message
    count = len(first) if known <= HEAD_MESSAGES else max(len(first), HEAD_MESSAGES) + 1
    head = first[:HEAD_MESSAGES]
    seam = [head[index] if index < len(head) else last[-1] for index in seam_of(head, count)]
    if request.joins_systems and any(message["role"] == "system" for message in (*seam[1:], *new)):
        return None
    return _Joint(seam, new)


def request_root(request: PromptRequest) -> int:
    """The root key of the request's prompts."""
    return root_key(request.model, salt=request.cache_salt)


def request_digests(request: PromptRequest, now: str) -> list[bytes]:
    """Names of the request up to each of its last messages; the last one names the whole request.

    SHA-256, because an engine computes with what it finds under a name: nobody must be able to make a
    conversation that has the name of another one. Everything that the prompt depends on goes in, `now`
    being what the template takes from the clock. JSON objects delimit themselves, so the same bytes are
    never two different lists of messages.
    """
    context = (
        request.kind,
        request.model,
        request.cache_salt,
        now,
        request.add_generation_prompt,
        request.continue_final_message,
        request.add_special_tokens,
        request.template_arguments,
        request.raw_tools,
        request.conversion.name,
        request.raw_head,
        request.joins_systems,
        request.texts,
        request.opaque,
    )
    digest = sha256(msgspec.json.encode(context))
    older = max(0, len(request.raw_messages) - _NEWEST)
    digest.update(b"".join(request.raw_messages[:older]))
    digests = [] if request.raw_messages else [digest.digest()]
    for raw in request.raw_messages[older:]:
        digest.update(raw)
        digests.append(digest.digest())
    return digests


def _rendering(request: PromptRequest) -> Rendering:
    return Rendering(request.tools, request.template_arguments, request.add_generation_prompt)
