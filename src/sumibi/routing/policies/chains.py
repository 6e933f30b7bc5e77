"""Chains of routing keys, compared. Keys are chained: two that are equal at one place are equal before it."""

from collections.abc import Sequence

from sumibi.core.keys import common


def common_blocks(ours: Sequence[int], theirs: Sequence[int], at_least: int = 0) -> int:
    """How many leading keys are equal, if more than `at_least`; else `at_least`."""
    high = min(len(ours), len(theirs))
    if at_least >= high or ours[at_least] != theirs[at_least]:
        return at_least
    return common(ours, theirs, at_least + 1, high)


class Running:
    """The prompts that run at one endpoint, as a set of blocks: shared ones count once."""

    def __init__(self) -> None:
        self._prompts: dict[str, Sequence[int]] = {}
        self._starts: dict[int, dict[str, Sequence[int]]] = {}
        """By first key: only prompts with the same one share anything."""
        self.blocks = 0
        """Distinct full blocks of all prompts."""

    def shared(self, keys: Sequence[int]) -> int:
        """Leading blocks of `keys` that some running prompt has."""
        most = 0
        if keys:
            for theirs in self._starts.get(keys[0], {}).values():
                most = common_blocks(keys, theirs, most)
        return most

    def add(self, request: str, keys: Sequence[int]) -> None:
        """A request with these blocks begins. It may not be running already."""
        self.blocks += len(keys) - self.shared(keys)
        self._prompts[request] = keys
        if keys:
            self._starts.setdefault(keys[0], {})[request] = keys

    def remove(self, request: str) -> None:
        """It ended; nothing happens if it is not known."""
        keys = self._prompts.pop(request, None)
        if not keys:
            return
        alike = self._starts[keys[0]]
        del alike[request]
        if not alike:
            del self._starts[keys[0]]
        self.blocks -= len(keys) - self.shared(keys)
