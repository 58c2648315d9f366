"""Paged attention in plain torch operations, for the CPU.

Pages are token-major, [num_blocks, block_size, num_kv_heads, head_dim] per layer, so that gathering
a sequence's pages gives its keys in order, and one strided view of them feeds the attention kernel.

* Decodes of similar length form a group: one gather into a workspace kept between calls, one
  attention call, the query heads that share a key head folded into the query's length.
* A chunk is attended to sequence by sequence, in tiles of queries, so that no tile sees keys after
  its own last token; the key heads are repeated by a stride of zero, not by copies. A chunk
  without a past reads its keys where the projection left them.

Paging: Kwon et al., PagedAttention.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.attention.interface import AttentionShape, StepLayout

TILE_QUERIES = 128
"""Queries of a chunk that are attended to at once."""

MAX_GROUP_TOKENS = 16384
"""Keys of one group of decodes, padding included, unless a single sequence is longer."""


def workspace_bytes(
    num_kv_heads: int, head_dim: int, max_model_len: int, dtype: torch.dtype
) -> int:
    """Upper estimate of what attention holds besides the cache: gathered pages and the mask."""
    per_token = 2 * num_kv_heads * head_dim + TILE_QUERIES
    return 2 * max(MAX_GROUP_TOKENS, max_model_len) * per_token * dtype.itemsize


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decodes attended to together: rows [begin, end), `length` keys each, padding included."""

    begin: int
    end: int
    length: int
    block_ids: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens [begin, end) of the step, one request's, after `context` earlier ones."""

    begin: int
    end: int
    context: int
    block_ids: torch.Tensor


class TorchPagedAttention:
    """The KV cache of all layers, and attention over it."""

    def __init__(self, shape: AttentionShape, max_group_tokens: int = MAX_GROUP_TOKENS) -> None:
        self._shape = shape
        self._max_group_blocks = max_group_tokens // shape.block_size
        self._scale = shape.head_dim**-0.5
        pages = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._keys = [_allocate(pages, shape.dtype) for _ in range(shape.num_layers)]
        self._values = [_allocate(pages, shape.dtype) for _ in range(shape.num_layers)]
        self._workspace = torch.empty(2, 0, *pages[1:], dtype=shape.dtype)
        self._causal_mask = torch.empty(TILE_QUERIES, 0, dtype=shape.dtype)

    def begin_step(self, layout: StepLayout) -> "TorchPagedStep":
        """See PagedAttention."""
        groups = self._group_decodes(layout)
        chunks = self._chunks(layout)
        blocks = [len(group.block_ids) for group in groups]
        blocks += [len(chunk.block_ids) for chunk in chunks if chunk.context]
        self._reserve_workspace(max(blocks, default=0))
        self._reserve_mask(max((c.context + c.end - c.begin for c in chunks), default=0))
        slots = torch.from_numpy(layout.slot_mapping)
        return TorchPagedStep(self, slots, self._opened_blocks(layout), groups, chunks)

    def store(
        self,
        layer: int,
        slots: torch.Tensor,
        opened_blocks: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Writes keys and values [n, num_kv_heads, head_dim] to cache slots [n]."""
        if len(opened_blocks):
            self._keys[layer].index_fill_(0, opened_blocks, 0)
            self._values[layer].index_fill_(0, opened_blocks, 0)
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self._values[layer].flatten(0, 1).index_copy_(0, slots, value)

    def attend_group(self, layer: int, query: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
        """Queries [n, num_heads, head_dim], one per sequence -> [n, num_heads * head_dim]."""
        shape, rows = self._shape, group.end - group.begin
        keys, values = (
            pages.view(rows, -1, shape.num_kv_heads, shape.head_dim)[:, : group.length]
            for pages in self._gather(layer, group.block_ids)
        )
        output = F.scaled_dot_product_attention(
            query.view(rows, shape.num_kv_heads, -1, shape.head_dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=group.mask,
            scale=self._scale,
        )
        return output.reshape(rows, -1)

    def attend_chunk(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: _Chunk,
        output: torch.Tensor,
    ) -> None:
        """One request's queries [n, num_heads, head_dim]; its own keys and values beside them.

        Writes `output` [n, num_heads, head_dim].
        """
        num_tokens = chunk.end - chunk.begin
        if chunk.context:
            length = chunk.context + num_tokens
            pages = self._gather(layer, chunk.block_ids)
            key, value = (gathered.flatten(0, 1)[:length] for gathered in pages)
        keys, values = self._repeated(key), self._repeated(value)
        for begin in range(0, num_tokens, TILE_QUERIES):
            end = min(begin + TILE_QUERIES, num_tokens)
            visible = chunk.context + end
            tile = F.scaled_dot_product_attention(
                self._grouped(query[begin:end]),
                keys[:, :, :visible],
                values[:, :, :visible],
                attn_mask=self._tile_mask(end - begin, visible),
                scale=self._scale,
            )
            self._grouped(output[begin:end]).copy_(tile)

    def _grouped(self, heads: torch.Tensor) -> torch.Tensor:
        """[n, num_heads, head_dim] as [num_kv_heads, heads per kv head, n, head_dim], a view."""
        shape = self._shape
        return heads.view(len(heads), shape.num_kv_heads, -1, shape.head_dim).permute(1, 2, 0, 3)

    def _repeated(self, heads: torch.Tensor) -> torch.Tensor:
        """[n, num_kv_heads, head_dim] as [num_kv_heads, heads per kv head, n, head_dim], a view."""
        shape = self._shape
        repeats = shape.num_heads // shape.num_kv_heads
        return heads.permute(1, 0, 2).unsqueeze(1).expand(-1, repeats, -1, -1)

    def _gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of keys and values in the workspace, [len(block_ids), block_size, ...] each."""
        keys, values = self._workspace[:, : len(block_ids)].unbind(0)
        torch.index_select(self._keys[layer], 0, block_ids, out=keys)
        torch.index_select(self._values[layer], 0, block_ids, out=values)
        return keys, values

    def _tile_mask(self, num_queries: int, visible: int) -> torch.Tensor:
        """0 where a query sees a key, else -inf; query i of a tile sees all but the last
        num_queries - 1 - i of its `visible` keys. A window of one mask made for all tiles.
        """
        end = self._causal_mask.shape[1] - (TILE_QUERIES - num_queries)
        return self._causal_mask[:num_queries, end - visible : end]

    def _reserve_mask(self, length: int) -> None:
        width = self._causal_mask.shape[1]
        if width < length + TILE_QUERIES:
            width = max(length + TILE_QUERIES, 2 * width)
            mask = torch.full((TILE_QUERIES, width), -torch.inf, dtype=torch.float32)
            self._causal_mask = mask.triu_(width - TILE_QUERIES + 1).to(self._shape.dtype)

    def _reserve_workspace(self, num_blocks: int) -> None:
        held = self._workspace.shape[1]
        if held < num_blocks:
            size = max(num_blocks, 2 * held)
            self._workspace = torch.empty(
                2, size, *self._workspace.shape[2:], dtype=self._shape.dtype
            )

    def _opened_blocks(self, layout: StepLayout) -> torch.Tensor:
        """Blocks that the step begins and does not fill.

        They are cleared: a mask hides what an earlier owner left in them, but not if that is NaN,
        and one request's NaN must not reach another.
        """
        size = self._shape.block_size
        last = (layout.seq_lens - 1) // size
        computed = layout.seq_lens - np.diff(layout.query_starts)
        opened = np.flatnonzero((last * size >= computed) & (layout.seq_lens % size != 0))
        return torch.from_numpy(layout.block_tables[opened, last[opened]].astype(np.int64))

    def _group_decodes(self, layout: StepLayout) -> list[_DecodeGroup]:
        """Cuts the decodes where one is over twice as long as the group's shortest."""
        blocks = -(-layout.seq_lens // self._shape.block_size)
        groups, begin = [], 0
        for end in range(1, layout.num_decodes + 1):
            if end < layout.num_decodes and (
                blocks[end] <= 2 * blocks[begin]
                and blocks[end] * (end + 1 - begin) <= self._max_group_blocks
            ):
                continue
            groups.append(self._decode_group(layout, begin, end, int(blocks[end - 1])))
            begin = end
        return groups

    def _decode_group(self, layout: StepLayout, begin: int, end: int, width: int) -> _DecodeGroup:
        lengths = layout.seq_lens[begin:end]
        length = int(lengths[-1])
        columns = np.arange(width)
        padding = columns * self._shape.block_size >= lengths[:, None]
        block_ids = np.where(padding, 0, layout.block_tables[begin:end, :width])
        mask = None
        if lengths[0] < length:
            hidden = torch.from_numpy(np.arange(length) >= lengths[:, None])
            mask = torch.zeros(hidden.shape, dtype=self._shape.dtype)
            mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]
        return _DecodeGroup(begin, end, length, torch.from_numpy(block_ids.reshape(-1)), mask)

    def _chunks(self, layout: StepLayout) -> list[_Chunk]:
        chunks = []
        for row in range(layout.num_decodes, len(layout.seq_lens)):
            begin, end = (int(start) for start in layout.query_starts[row : row + 2])
            length = int(layout.seq_lens[row])
            blocks = -(-length // self._shape.block_size)
            block_ids = torch.from_numpy(layout.block_tables[row, :blocks])
            chunks.append(_Chunk(begin, end, length - (end - begin), block_ids))
        return chunks


def _allocate(pages: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pages that take memory once they are written. Only the null block, which stands for padding,
    must hold numbers from the start.
    """
    allocated = torch.empty(pages, dtype=dtype)
    allocated[0].zero_()
    return allocated


class TorchPagedStep:
    """One step over a TorchPagedAttention."""

    def __init__(
        self,
        cache: TorchPagedAttention,
        slots: torch.Tensor,
        opened_blocks: torch.Tensor,
        groups: list[_DecodeGroup],
        chunks: list[_Chunk],
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._opened_blocks = opened_blocks
        self._groups = groups
        self._chunks = chunks

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See LayerAttention."""
        self._cache.store(layer, self._slots, self._opened_blocks, key, value)
        if len(self._groups) == 1 and not self._chunks:
            return self._cache.attend_group(layer, query, self._groups[0])
        output = torch.empty(query.shape, dtype=query.dtype)
        for group in self._groups:
            rows = slice(group.begin, group.end)
            attended = self._cache.attend_group(layer, query[rows], group)
            output[rows].view(attended.shape).copy_(attended)
        for chunk in self._chunks:
            rows = slice(chunk.begin, chunk.end)
            self._cache.attend_chunk(
                layer, query[rows], key[rows], value[rows], chunk, output[rows]
            )
        return output.flatten(1)
