"""What a sequence carries if its KV is to go to a peer, or to come from one. No sockets, no threads."""

from collections.abc import Sequence
from dataclasses import dataclass

from sumibi.core.content import content_id
from sumibi.engine.transfer.params import PullRequest, TransferAnswer


def block_names(
    root: bytes, full_ids: Sequence[bytes], prompt: Sequence[int], block_tokens: int
) -> list[bytes]:
    """Content ids of all blocks of a prompt, a partial last one included.

    `root` is the id of the empty prefix, `full_ids` those of its full blocks (or of more). A partial block is
    named as a full one would be: by what comes before it and its own tokens.
    """
    names = list(full_ids[: len(prompt) // block_tokens])
    rest = prompt[len(names) * block_tokens :]
    if rest:
        names.append(content_id(names[-1] if names else root, rest))
    return names


@dataclass(eq=False, slots=True)
class Keep:
    """The sequence's prompt is computed for a peer."""

    key: str
    transfer_id: str | None
    published: int = 0
    """Leading blocks that peers may have. The step thread's."""
    answer: TransferAnswer | None = None
    """For the request's answer; None until the prompt is whole, and for good if it was aborted."""


@dataclass(eq=False, slots=True)
class Fetch:
    """The sequence's prompt is at a peer."""

    request: PullRequest
    begun: bool = False
    """Whether a pull was begun, or found to be unnecessary: there is one a request."""
    cached_tokens: int | None = None
    """Prompt tokens that the peer did not compute anew; None if it has not told."""

    def __post_init__(self) -> None:
        self.cached_tokens = self.request.cached_tokens

    def system_cached_tokens(self, cached: int, own: int) -> int:
        """What neither side computed anew, if this engine did not compute `cached` tokens, `own` of them
        because it had them.

        What came from the peer was computed there, unless the peer says that it had it in its cache.
        """
        return own if self.cached_tokens is None else min(cached, self.cached_tokens)


Ticket = Keep | Fetch
