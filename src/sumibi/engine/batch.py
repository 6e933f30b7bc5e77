"""What the scheduler hands to the model for one step: plain data, no torch."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceStep:
    """One sequence's part of a step.

    The model computes `token_ids` at positions `start .. start+len(token_ids)-1`, writes their KV into the
    blocks named by `block_table` (physical block ids, position p lives in block_table[p // block_tokens]
    at offset p % block_tokens) and attends to everything at positions <= their own.
    """

    token_ids: list[int]
    start: int
    """Tokens already computed and present in the cache."""
    block_table: list[int]
    logits_at: list[int] = field(default_factory=list)
    """Indexes into `token_ids` whose next-token logits are wanted (usually [-1 + len] or none)."""


@dataclass(slots=True)
class StepBatch:
    """All sequences of one step: prefill chunks (many tokens) and decodes (one token), in any mix."""

    sequences: list[SequenceStep]

    @property
    def tokens(self) -> int:
        """New tokens in this step."""
        return sum(len(s.token_ids) for s in self.sequences)
