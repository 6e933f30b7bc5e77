"""The scheduler's side: what of a prompt is loaded, which blocks are stored, what is told of them."""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sumibi.tiers.connector.asker import StoreAsker
from sumibi.tiers.connector.book import Book, Told
from sumibi.tiers.connector.messages import Hello, Load, Orders, Report, Save
from sumibi.tiers.connector.names import content_id
from sumibi.tiers.words import Tier

_log = logging.getLogger(__name__)
_HELLO_S = 10.0
_WRITING_S = 30.0
_SETTLED_S = 5.0


class Prompt(Protocol):
    """What the planner must know of an engine's request."""

    request_id: str
    block_hashes: Sequence[bytes]
    """Of its full blocks, growing as it goes on."""
    num_tokens: int


Describe = Callable[[Prompt, int], Told]
"""What an event says of the request's block of that index."""
Ask = Callable[[Hello], StoreAsker]


@dataclass(slots=True)
class _Request:
    """A request that is under way."""

    prompt: Prompt
    version: bytes
    ids: list[bytes] = field(default_factory=list)
    looked: int = 0
    """Blocks before this one were looked at for storing."""
    asked: list[bytes] | None = None
    """What the store was asked about."""
    offered: list[Tier] = field(default_factory=list)
    offered_from: int = 0
    loading: list[Tier] = field(default_factory=list)
    void: bool = False
    """Its KV is of a version that is no more: nothing of it is stored."""


class Planner:
    """One thread's: that of the engine's scheduler."""

    def __init__(self, block_tokens: int, describe: Describe, asker: Ask | None) -> None:
        """`asker` makes who asks the store, if there is a store, once the worker has said its name."""
        self.book = Book()
        self._block_tokens = block_tokens
        self._describe = describe
        self._make_asker = asker
        self._asker: StoreAsker | None = None
        self._requests: dict[str, _Request] = {}
        self._generation = b""
        self._confirmed = b""
        self._orders = Orders()
        self._greeted = False
        self._waits_since_s: float | None = None
        self._writing = 0
        self._written_s = 0.0

    # Requests

    def arrived(self, prompt: Prompt, version: bytes) -> None:
        """A new request. `version` stands for what makes its KV unlike that of others with the same hashes
        (its adapter's bytes).
        """
        request = self._requests[prompt.request_id] = _Request(prompt, version)
        if self._greeted:
            self._ask_store(request)

    def ended(self, request_id: str) -> None:
        """It is over, however it ended."""
        self._requests.pop(request_id, None)
        if self._asker:
            self._asker.forget(request_id)

    def offer(self, prompt: Prompt, computed_tokens: int) -> int | None:
        """How many tokens beyond `computed_tokens` can be loaded, a multiple of the block's; None: not known
        yet. At least one token is left to compute.
        """
        request = self._requests.get(prompt.request_id)
        if request is None or self._waits_for_hello():
            return 0 if request is None else None
        most = (prompt.num_tokens - 1) // self._block_tokens
        first = computed_tokens // self._block_tokens
        ids = self._ids(request)[:most]
        request.offered_from = first
        request.offered = self.book.run(ids[first:])
        if self._asker and first + len(request.offered) < len(ids):
            if request.asked is None:
                self._ask_store(request)
            found = self._asker.answer(prompt.request_id)
            if found is None:
                return None
            if found and request.asked:
                self.book.found_in_store(request.asked[:found])
                self._asker.forget(prompt.request_id)
                request.offered = self.book.run(ids[first:])
        for index in range(first + len(request.offered)):
            self._tell(request, index)
        return len(request.offered) * self._block_tokens

    def allocated(self, prompt: Prompt, table: Sequence[int], external_tokens: int) -> None:
        """The request has device blocks; `external_tokens` of those that were offered are to be loaded."""
        request = self._requests.get(prompt.request_id)
        if request is None:
            return
        request.looked = 0
        request.void = False
        first, count = request.offered_from, external_tokens // self._block_tokens
        request.loading = request.offered[:count]
        if count:
            blocks = list(table[first : first + count])
            self._orders.loads.append(Load(prompt.request_id, request.ids[first : first + count], blocks))

    def loading(self, request_id: str) -> list[Tier]:
        """Where the blocks that a request loads were believed to lie."""
        request = self._requests.get(request_id)
        return request.loading if request else []

    # Steps

    def orders(self, computed: Iterable[tuple[str, int]], table: Callable[[str], Sequence[int]]) -> Orders:
        """For the step in which each of these requests will have that many tokens computed at its end."""
        orders, self._orders = self._orders, Orders()
        orders.generation = self._generation
        orders.idle = True
        for request_id, tokens in computed:
            orders.idle = False
            request = self._requests.get(request_id)
            if request and not request.void:
                self._store_new(request, tokens, table, orders)
        return orders

    def _store_new(
        self,
        request: _Request,
        tokens: int,
        table: Callable[[str], Sequence[int]],
        orders: Orders,
    ) -> None:
        ids = self._ids(request)
        # The hash of a block is known once all its tokens are; a step may compute tokens that are drafts.
        full = min(tokens // self._block_tokens, len(ids))
        if full <= request.looked:
            return
        blocks = table(request.prompt.request_id)
        for index in range(request.looked, min(full, len(blocks))):
            if self.book.where(ids[index]) is None:
                self._tell(request, index)
                orders.saves.append(Save(ids[index], ids[index - 1] if index else None, blocks[index]))
        request.looked = full

    def reported(self, report: Report) -> None:
        """What the worker said after a step."""
        if report.hello:
            self._greeted = True
            if self._make_asker and self._asker is None:
                self._asker = self._make_asker(report.hello)
        if report.generation != self._generation:
            return
        self._confirmed = report.generation
        self.book.learn(report.changes)
        self.book.missing(report.missing)
        if report.writing != self._writing:
            self._written_s = time.monotonic()
        self._writing = report.writing

    def clear(self) -> None:
        """All that lies below is void from the next step on, and the KV of what runs now."""
        self.book.forget_all()
        self._generation = secrets.token_bytes(16)
        self._orders = Orders()
        for request in self._requests.values():
            request.ids.clear()
            request.asked = None
            request.void = True
        self._written_s = time.monotonic()

    @property
    def unsettled(self) -> bool:
        """Should the engine go on stepping though it has nothing to compute, to hear of writes and of a
        `clear`? Not for ever: a tier that hangs must not keep it awake.
        """
        age_s = time.monotonic() - self._written_s
        if self._confirmed != self._generation:
            return self._greeted and age_s < _SETTLED_S
        return self._writing > 0 and age_s < _WRITING_S

    def close(self) -> None:
        """Ask no more."""
        if self._asker:
            self._asker.close()

    # Small things

    def _ids(self, request: _Request) -> list[bytes]:
        hashes = request.prompt.block_hashes
        for index in range(len(request.ids), len(hashes)):
            request.ids.append(content_id(bytes(hashes[index]), self._generation + request.version))
        return request.ids

    def _tell(self, request: _Request, index: int) -> None:
        if not self.book.is_described(request.ids[index]):
            self.book.describe(request.ids[index], self._describe(request.prompt, index))

    def _ask_store(self, request: _Request) -> None:
        if self._asker is None:
            return
        ids = self._ids(request)[: (request.prompt.num_tokens - 1) // self._block_tokens]
        # What this engine has itself needs no question; what the store is believed to have may be gone.
        near = 0
        while near < len(ids) and self.book.where(ids[near]) not in (None, Tier.STORE):
            near += 1
        request.asked = ids[near:]
        self._asker.ask(request.prompt.request_id, request.asked, ids[near - 1] if near else None)

    def _waits_for_hello(self) -> bool:
        """The worker's first report is awaited: it says what lies on disk, and names the store."""
        if self._greeted:
            return False
        if self._waits_since_s is None:
            self._waits_since_s = time.monotonic()
        if time.monotonic() - self._waits_since_s < _HELLO_S:
            return True
        self._greeted = True
        _log.error("the worker has not said what lies in the KV tiers: going on without")
        return False
