"""Prompts under way, by what they begin with: a trie whose nodes are stretches of keys.

To say which prompts share a beginning with a new one is a walk along the new one's keys, whatever the number
of prompts. A node is a stretch of some prompt's keys (no copy of them) that all prompts below it share.

Knows nothing of time, prefills or the index.
"""

from collections.abc import Callable, Iterator, Sequence

from sumibi.core.keys import common
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.requests import Attempt, Request


class _Node:
    """`keys[start:end]`, and who passes all of it: by endpoint, in the order in which they came."""

    __slots__ = ("children", "end", "here", "keys", "start")

    def __init__(self, keys: Sequence[int], start: int, end: int) -> None:
        self.keys = keys
        self.start = start
        self.end = end
        self.children: dict[int, _Node] = {}
        """By their first key."""
        self.here: dict[Endpoint, dict[Attempt, Request]] = {}


class Underway:
    """The prompts of attempts that are not over."""

    def __init__(self) -> None:
        self._roots: dict[int, _Node] = {}

    def add(self, request: Request, attempt: Attempt) -> None:
        """It was placed."""
        keys = request.event.keys
        at, children = 0, self._roots
        while at < len(keys):
            node = children.get(keys[at])
            if node is None:
                node = children[keys[at]] = _Node(keys, at, len(keys))
            else:
                end = common(keys, node.keys, at + 1, min(len(keys), node.end))
                if end < node.end:
                    node = children[keys[at]] = _cut(node, end)
            node.here.setdefault(attempt.endpoint, {})[attempt] = request
            at, children = node.end, node.children

    def remove(self, request: Request, attempt: Attempt) -> None:
        """It is over. It was added before, once."""
        keys = request.event.keys
        at, children = 0, self._roots
        while at < len(keys):
            node = children[keys[at]]
            attempts = node.here[attempt.endpoint]
            del attempts[attempt]
            if not attempts:
                del node.here[attempt.endpoint]
                if not node.here:
                    # Nobody passes what is below, then.
                    del children[keys[at]]
            at, children = node.end, node.children

    def reach(
        self, keys: Sequence[int], length: int, have: Callable[[Endpoint], int]
    ) -> Iterator[tuple[Endpoint, int, Attempt, Request]]:
        """For endpoints where prompts share more of the first `length` of `keys` than `have` says of them:
        how many blocks the one that shares most of them does; of several the first. Only attempts in the
        process that serves there now.
        """
        path: list[tuple[int, _Node]] = []
        at, children = 0, self._roots
        while at < length:
            node = children.get(keys[at])
            if node is None:
                break
            at = common(keys, node.keys, at + 1, min(length, node.end))
            path.append((at, node))
            if at < node.end:
                break
            children = node.children
        seen: set[Endpoint] = set()
        for shared, node in reversed(path):
            for endpoint, attempts in node.here.items():
                if endpoint in seen or have(endpoint) >= shared:
                    continue
                for attempt, request in attempts.items():
                    if attempt.current:
                        seen.add(endpoint)
                        yield endpoint, shared, attempt, request
                        break


def _cut(node: _Node, end: int) -> _Node:
    """The part of it before `end`; it keeps what is behind."""
    head = _Node(node.keys, node.start, end)
    head.here = {endpoint: dict(attempts) for endpoint, attempts in node.here.items()}
    head.children[node.keys[end]] = node
    node.start = end
    return head
