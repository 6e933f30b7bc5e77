"""Attention of one step over the paged KV cache: which rows look at which blocks, computed layer by layer.

A layer's cache is [2 * kv_heads, blocks, block_tokens * head_dim]: all key heads, then all value heads.
With the heads outermost, picking a sequence's blocks is one `index_select`, and the result is a batch of
[tokens, head_dim] matrices as products want them: no transposing, no gather kernel of our own.

The query heads that share a key head are stacked as rows of one product (grouped-query attention), which
makes a decode of one token a product of a few rows instead of several of one row.

Scores are in bits: queries come scaled by log2(e) / sqrt(head_dim) (folded into the weights), so that the
weight of a key is 2^score. Long products of a prefill then need no maximum to be subtracted, see `_Chunk`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NATS = math.log(2.0)
"""A bit in nats: what torch's own softmax wants scores multiplied by."""

TILE_ROWS = 128
"""Query tokens of a chunk whose scores are in memory at once; larger tiles compute more masked scores."""

_SDPA_MAX_TOKENS = 512
"""Up to here one fused call beats two products with their fixed cost (measured on one CPU core)."""

_SAFE_SUMS = (2.0**-100, 2.0**100)
"""Sums of 2^score in this range are as exact as with the maximum subtracted: nothing that counts was
rounded to zero, and the products with values have room below the largest bfloat16 and float32, 2^128."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """`group` query heads share each of `kv_heads` key heads."""

    kv_heads: int
    group: int
    head_dim: int

    @property
    def query_heads(self) -> int:
        """Query heads in all."""
        return self.kv_heads * self.group


@dataclass(frozen=True, slots=True)
class Query:
    """Consecutive rows of one sequence: row `row + i` is its token at position `start + i`."""

    row: int
    rows: int
    start: int
    block_table: list[int]


class AttentionPlan:
    """Everything about a step's attention that is the same in every layer."""

    def __init__(
        self,
        queries: list[Query],
        *,
        rows: int,
        shape: HeadShape,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Plan `queries`, whose rows do not overlap, for an output of `rows` rows (zero where unused)."""
        self._out = torch.zeros(rows, shape.query_heads * shape.head_dim, dtype=dtype, device=device)
        out = self._out.view(rows, shape.kv_heads, shape.group, shape.head_dim)
        parts: list[_Decode | _Decodes | _Chunk] = []
        for group in _alike([q for q in queries if q.rows == 1], block_tokens):
            if len(group) == 1 and group[0].start < _SDPA_MAX_TOKENS:
                parts.append(_Decode(group[0], shape, block_tokens, out))
            else:
                parts.append(_Decodes(group, shape, block_tokens, out))
        parts += [_Chunk(q, shape, block_tokens, out) for q in queries if q.rows > 1]
        self._parts = parts

    def run(self, heads: Tensor, cache: Tensor) -> Tensor:
        """Attend in one layer: [rows, query_heads * head_dim], overwritten by the next call.

        `heads` is [rows, query heads first, head_dim], `cache` the layer's, with these rows' KV in it.
        """
        for part in self._parts:
            part.run(heads, cache)
        return self._out


def _alike(queries: list[Query], block_tokens: int) -> list[list[Query]]:
    """Group single-row queries in adjacent rows whose contexts differ at most twofold (padding is waste)."""
    groups: list[list[Query]] = []
    least = most = 0
    for query in queries:
        blocks = query.start // block_tokens + 1
        least, most = min(least, blocks), max(most, blocks)
        last = groups[-1][-1] if groups else None
        if last is not None and query.row == last.row + 1 and most <= 2 * least:
            groups[-1].append(query)
        else:
            groups.append([query])
            least = most = blocks
    return groups


class _Decode:
    """One new token of one sequence with a short context: one fused call, query heads as its rows."""

    def __init__(self, query: Query, shape: HeadShape, block_tokens: int, out: Tensor) -> None:
        """`out` is the plan's, [rows, kv_heads, group, head_dim]."""
        blocks = query.start // block_tokens + 1
        self._blocks = torch.tensor(query.block_table[:blocks], device=out.device)
        self._context = query.start + 1
        self._kv_shape = (2, 1, shape.kv_heads, blocks * block_tokens, shape.head_dim)
        self._query_heads = shape.query_heads
        self._row = query.row
        self._out = out[query.row : query.row + 1]

    def run(self, heads: Tensor, cache: Tensor) -> None:
        kv = cache.index_select(1, self._blocks).view(self._kv_shape).narrow(3, 0, self._context)
        keys, values = kv.unbind(0)
        query = heads[self._row, : self._query_heads].view(self._out.shape)
        self._out.copy_(F.scaled_dot_product_attention(query, keys, values, scale=NATS))


class _Decodes:
    """One new token each of several sequences, or of one with a long context: padded to the longest."""

    def __init__(self, queries: list[Query], shape: HeadShape, block_tokens: int, out: Tensor) -> None:
        """`queries` are in adjacent rows; `out` is the plan's, [rows, kv_heads, group, head_dim]."""
        count, device = len(queries), out.device
        contexts = [q.start + 1 for q in queries]
        # Whole blocks even if there is one sequence: a product of a new shape costs 0.3 ms once.
        blocks = -(-max(contexts) // block_tokens)
        tokens = blocks * block_tokens
        tables = [(q.block_table[:blocks] + [0] * blocks)[:blocks] for q in queries]
        self._blocks = torch.tensor(tables, device=device).view(-1)
        self._kv_shape = (2, shape.kv_heads * count, tokens, shape.head_dim)
        seen = torch.tensor(contexts, device=device)[:, None]
        beyond = torch.arange(tokens, device=device)[None, :] >= seen
        mask = out.new_zeros(beyond.shape).masked_fill_(beyond, -torch.inf)
        self._mask = mask.repeat(shape.kv_heads, 1)[:, None, :]
        self._query_heads = shape.query_heads
        self._rows = slice(queries[0].row, queries[0].row + count)
        self._out = out[self._rows]

    def run(self, heads: Tensor, cache: Tensor) -> None:
        keys, values = cache.index_select(1, self._blocks).view(self._kv_shape).unbind(0)
        query = heads[self._rows, : self._query_heads].view(self._out.shape).transpose(0, 1)
        scores = torch.baddbmm(self._mask, query.flatten(0, 1), keys.transpose(1, 2), alpha=NATS)
        attended = torch.bmm(torch.softmax(scores, -1), values)
        self._out.copy_(attended.view(query.shape).transpose(0, 1))


class _Chunk:
    """Several new tokens of one sequence (prefill), in tiles of query rows against all earlier keys.

    A softmax is 2^score / sum of 2^score; the customary subtraction of the largest score only keeps the
    powers in range. They are here without it for any usual score: one pass less over the largest matrices.
    `_SAFE_SUMS` is checked afterwards, and outside it the layer is computed again in the customary way.
    """

    def __init__(self, query: Query, shape: HeadShape, block_tokens: int, out: Tensor) -> None:
        """`out` is the plan's, [rows, kv_heads, group, head_dim]."""
        self._shape, self._block_tokens = shape, block_tokens
        self._count, self._start = query.rows, query.start
        blocks = -(-(query.start + query.rows) // block_tokens)
        self._tokens = blocks * block_tokens
        self._blocks = torch.tensor(query.block_table[:blocks], device=out.device)
        self._rows = slice(query.row, query.row + query.rows)
        self._out = out[self._rows]
        self._scores = out.new_empty(min(TILE_ROWS, query.rows) * shape.group * self._tokens)

    def run(self, heads: Tensor, cache: Tensor) -> None:
        kv_heads, group, head_dim = self._shape.kv_heads, self._shape.group, self._shape.head_dim
        keys, values = cache.index_select(1, self._blocks).view(2, kv_heads, self._tokens, head_dim)
        query = heads[self._rows, : kv_heads * group].view(self._out.shape)
        # Rows of a key head's product: token by token, and within a token its query heads.
        stacked = query.transpose(0, 1).reshape(kv_heads, self._count * group, head_dim)
        attended = torch.empty_like(stacked)
        sums = attended.new_empty(kv_heads, self._count * group, 1)
        for head in range(kv_heads):
            self._attend(stacked[head], keys[head].t(), values[head], attended[head], sums[head])
        least, most = (bound.item() for bound in sums.aminmax())
        if _SAFE_SUMS[0] < least and most < _SAFE_SUMS[1]:
            attended.div_(sums)
        else:
            for head in range(kv_heads):
                self._attend_to_far_scores(stacked[head], keys[head].t(), values[head], attended[head])
        self._out.copy_(attended.view(kv_heads, self._count, group, head_dim).transpose(0, 1))

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, attended: Tensor, sums: Tensor) -> None:
        """One key head: sums of values weighted by 2^score into `attended`, of the weights into `sums`."""
        group = self._shape.group
        for first in range(0, self._count, TILE_ROWS):
            last = min(first + TILE_ROWS, self._count)
            here, count = slice(first * group, last * group), last - first
            # Whole blocks: every shape of a product is set up once and then kept, at 0.5 MB (see `linear`).
            seen = -(-(self._start + last) // self._block_tokens) * self._block_tokens
            scores = self._scores[: count * group * seen].view(count * group, seen)
            torch.mm(query[here], keys[:, :seen], out=scores).exp2_()
            # Token i of the tile sees as far as itself; what comes later gets no weight.
            scores.view(count, group, seen).transpose(0, 1).tril_(self._start + first)
            torch.sum(scores, -1, True, out=sums[here])
            torch.mm(scores, values[:seen], out=attended[here])

    def _attend_to_far_scores(self, query: Tensor, keys: Tensor, values: Tensor, attended: Tensor) -> None:
        """The same with softmax, for scores so large or so small that their powers leave the number range."""
        group = self._shape.group
        token = torch.arange(self._count, device=query.device).repeat_interleave(group)[:, None]
        later = torch.arange(self._tokens, device=query.device)[None, :] > self._start + token
        for first in range(0, self._count, TILE_ROWS):
            here = slice(first * group, min(first + TILE_ROWS, self._count) * group)
            scores = torch.mm(query[here], keys).mul_(NATS).masked_fill_(later[here], -torch.inf)
            torch.mm(torch.softmax(scores, -1), values, out=attended[here])
