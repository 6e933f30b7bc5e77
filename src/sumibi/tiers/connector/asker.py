"""Asks the shared store what it has of a prompt, on threads, so that no step waits for it."""

import threading
import time
from collections.abc import Sequence
from functools import partial

from sumibi.tiers.blockfile import namespace_digest
from sumibi.tiers.bucket import open_backend
from sumibi.tiers.config import StoreTier
from sumibi.tiers.connector.messages import Hello
from sumibi.tiers.store import SharedStore
from sumibi.tiers.workers import Workers

_THREADS = 2
_QUESTIONS = 256


class StoreAsker:
    """`ask` and `answer` are one thread's. An answer is how many of the ids the store has, from the first;
    one that does not come in time is 0.
    """

    def __init__(self, config: StoreTier, hello: Hello) -> None:
        """Raises ConfigError or EnvironmentProblem."""
        self._store = SharedStore(
            config,
            open_backend(config, namespace_digest(hello.namespace, hello.block_bytes)),
            hello.block_bytes,
            lock=threading.Lock(),
            announce=lambda *_: None,
            nudge=lambda: None,
        )
        self._timeout_s = config.timeout_s
        self._workers = Workers("kv-ask", _THREADS, _QUESTIONS)
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[float, int | None]] = {}  # (deadline, answer)

    def ask(self, request_id: str, ids: Sequence[bytes], parent: bytes | None) -> None:
        """`ids` is a chain that follows `parent`."""
        deadline_s = time.monotonic() + self._timeout_s
        resting = self._store.rest.resting
        with self._lock:
            self._asked[request_id] = (deadline_s, 0 if resting or not ids else None)
        if resting or not ids:
            return
        parents = [parent, *ids[:-1]]
        if not self._workers.submit(partial(self._find, request_id, list(ids), parents, deadline_s)):
            with self._lock:
                self._asked[request_id] = (deadline_s, 0)

    def answer(self, request_id: str) -> int | None:
        """None: not yet. 0 where nothing was asked."""
        with self._lock:
            deadline_s, found = self._asked.get(request_id, (0.0, 0))
        if found is None and time.monotonic() > deadline_s:
            return 0
        return found

    def forget(self, request_id: str) -> None:
        """Nobody wants the answer any more."""
        with self._lock:
            self._asked.pop(request_id, None)

    def close(self) -> None:
        """Ask no more."""
        self._workers.close(0.1)
        self._store.workers.close(0.1)

    def _find(
        self, request_id: str, ids: list[bytes], parents: list[bytes | None], deadline_s: float
    ) -> None:
        found = 0
        try:
            found = self._store.find(ids, parents, deadline_s)
        finally:
            with self._lock:
                if request_id in self._asked:
                    self._asked[request_id] = (deadline_s, found)
