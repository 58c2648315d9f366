"""Paged attention in plain torch operations, made for the CPU; on CUDA for what xFormers lacks.

Pages are token-major, [num_blocks, block_size, num_kv_heads, head_dim] per layer of a group, so
that gathering a sequence's pages gives its keys in order, and one strided view of them feeds the
attention kernel. Where all layers of a group have a window, only the pages that it shows are
gathered: what lies before may be anybody's by now.

* Decodes of similar length form a group: one gather into a workspace kept between calls, one
  attention call, the query heads that share a key head folded into the query's length.
* A chunk is attended to sequence by sequence, in tiles of queries, so that no tile sees keys after
  its own last token or before its first one's window; the key heads are repeated by a stride of
  zero, not by copies. A chunk without a past reads its keys where the projection left them.

Paging: Kwon et al., PagedAttention.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.attention.interface import (
    AttentionLayer,
    AttentionShape,
    Int32Array,
    Rotation,
    StepLayout,
)
from services.worker.attention.rotary import rotate
from services.worker.device import CpuDevice, Device

TILE_QUERIES = 128
"""Queries of a chunk that are attended to at once."""

MAX_GROUP_TOKENS = 16384
"""Keys of one group of decodes, padding included, unless a single sequence is longer."""


def workspace_bytes(shape: AttentionShape, max_model_len: int) -> int:
    """Upper estimate of what attention holds besides the cache: gathered pages and masks."""
    widest = max(layer.num_kv_heads * layer.head_dim for layer in shape.layers)
    per_token = 2 * widest + TILE_QUERIES * len({layer.window for layer in shape.layers})
    return 2 * max(MAX_GROUP_TOKENS, max_model_len) * per_token * shape.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decodes attended to together: rows [begin, end), `length` keys each, padding included.

    Of each sequence the keys from its first seen block on. `masks` by a layer's window.
    """

    begin: int
    end: int
    length: int
    block_ids: torch.Tensor
    masks: dict[int | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens [begin, end) of the step, one request's, after `context` earlier ones.

    `block_ids`: its blocks from the first seen one on, which begins at token `offset`.
    """

    begin: int
    end: int
    context: int
    offset: int
    block_ids: torch.Tensor


class TorchPagedAttention:
    """The KV cache of all layers, and attention over it. Nothing waits for the device."""

    def __init__(
        self,
        shape: AttentionShape,
        device: Device | None = None,
        max_group_tokens: int = MAX_GROUP_TOKENS,
    ) -> None:
        self._shape = shape
        self._device = device or CpuDevice()
        self._max_group_blocks = max_group_tokens // shape.block_size
        self._pages_of = shape.pages_of
        self._windows = [_windows(shape, group) for group in shape.layer_groups]
        self._page_elements = max(
            shape.block_size * layer.num_kv_heads * layer.head_dim for layer in shape.layers
        )
        largest = max(shape.layer_groups, key=len)
        self._keys = [_allocate(shape, shape.layers[layer]) for layer in largest]
        self._values = [_allocate(shape, shape.layers[layer]) for layer in largest]
        self._workspace = torch.empty(2, 0, dtype=shape.dtype, device=shape.device)
        self._tile_masks: dict[int | None, torch.Tensor] = {}
        self._mask_width = 0

    def begin_step(self, layouts: Sequence[StepLayout]) -> "TorchPagedStep":
        """See PagedAttention."""
        steps = [
            self._begin_group(layout, windows)
            for layout, windows in zip(layouts, self._windows, strict=True)
        ]
        return TorchPagedStep(self, [steps[group] for group in self._shape.group_of])

    def _begin_group(self, layout: StepLayout, windows: set[int | None]) -> "_GroupStep":
        groups = self._group_decodes(layout, windows)
        chunks = self._chunks(layout, windows)
        blocks = [len(group.block_ids) for group in groups]
        blocks += [len(chunk.block_ids) for chunk in chunks if chunk.context]
        self._reserve_workspace(max(blocks, default=0))
        self._reserve_masks(max((c.context + c.end - c.begin for c in chunks), default=0))
        slots = self._device.upload(layout.slot_mapping)
        return _GroupStep(slots, self._opened_blocks(layout), groups, chunks)

    def zero_blocks(self, block_ids: Int32Array) -> None:
        """See PagedAttention."""
        cleared = self._device.upload(block_ids.astype(np.int64))
        for pages in (*self._keys, *self._values):
            pages.index_fill_(0, cleared, 0)

    def store(
        self,
        layer: int,
        slots: torch.Tensor,
        opened_blocks: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Writes keys and values [n, num_kv_heads, head_dim] to cache slots [n]."""
        for pages, heads in ((self._keys, key), (self._values, value)):
            own = pages[self._pages_of[layer]]
            if len(opened_blocks):
                own.index_fill_(0, opened_blocks, 0)
            own.flatten(0, 1).index_copy_(0, slots, heads)

    def attend_group(self, layer: int, query: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
        """Queries [n, num_heads, head_dim], one per sequence -> [n, num_heads * head_dim]."""
        spec, rows = self._shape.layers[layer], group.end - group.begin
        keys, values = (
            pages.view(rows, -1, spec.num_kv_heads, spec.head_dim)[:, : group.length]
            for pages in self._gather(layer, group.block_ids)
        )
        output = _attend(
            query.reshape(rows, spec.num_kv_heads, -1, spec.head_dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            group.masks[spec.window],
            spec,
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
        spec, num_tokens = self._shape.layers[layer], chunk.end - chunk.begin
        context = chunk.context - chunk.offset
        if chunk.context:
            pages = self._gather(layer, chunk.block_ids)
            key, value = (gathered.flatten(0, 1)[: context + num_tokens] for gathered in pages)
        keys, values = _repeated(key, spec), _repeated(value, spec)
        for begin in range(0, num_tokens, TILE_QUERIES):
            end = min(begin + TILE_QUERIES, num_tokens)
            last, first = context + end, 0
            if spec.window is not None:
                first = max(context + begin - spec.window + 1, 0)
            tile = _attend(
                _grouped(query[begin:end], spec),
                keys[:, :, first:last],
                values[:, :, first:last],
                self._tile_mask(spec.window, end - begin, last - first),
                spec,
            )
            _grouped(output[begin:end], spec).copy_(tile)

    def _gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of keys and values in the workspace, [len(block_ids), block_size, ...] each."""
        all_keys, all_values = (x[self._pages_of[layer]] for x in (self._keys, self._values))
        shape = (len(block_ids), *all_keys.shape[1:])
        keys, values = (room[: math.prod(shape)].view(shape) for room in self._workspace)
        torch.index_select(all_keys, 0, block_ids, out=keys)
        torch.index_select(all_values, 0, block_ids, out=values)
        return keys, values

    def _tile_mask(self, window: int | None, num_queries: int, visible: int) -> torch.Tensor:
        """0 where a query sees a key, else -inf; query i of a tile sees all but the last
        num_queries - 1 - i of its `visible` keys. A part of one mask made for all tiles.
        """
        mask = self._tile_masks[window]
        end = mask.shape[1] - (TILE_QUERIES - num_queries)
        return mask[:num_queries, end - visible : end]

    def _reserve_masks(self, length: int) -> None:
        if self._mask_width >= length + TILE_QUERIES:
            return
        width = self._mask_width = max(length + TILE_QUERIES, 2 * self._mask_width)
        diagonal = width - TILE_QUERIES
        for window in set().union(*self._windows):
            size, there = (TILE_QUERIES, width), self._shape.device
            seen = torch.ones(size, dtype=torch.bool, device=there).tril_(diagonal)
            if window is not None:
                seen.triu_(diagonal - window + 1)
            self._tile_masks[window] = self._mask(~seen)

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._shape.dtype, device=self._shape.device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _reserve_workspace(self, num_blocks: int) -> None:
        held, needed = self._workspace.shape[1], num_blocks * self._page_elements
        if held < needed:
            self._workspace = self._workspace.new_empty(2, max(needed, 2 * held))

    def _opened_blocks(self, layout: StepLayout) -> torch.Tensor:
        """Blocks that the step begins and does not fill.

        They are cleared: a mask hides what an earlier owner left in them, but not if that is NaN,
        and one request's NaN must not reach another.
        """
        size = self._shape.block_size
        last = (layout.seq_lens - 1) // size
        computed = layout.seq_lens - np.diff(layout.query_starts)
        opened = np.flatnonzero((last * size >= computed) & (layout.seq_lens % size != 0))
        return self._device.upload(layout.block_tables[opened, last[opened]].astype(np.int64))

    def _first_seen_blocks(self, context: Int32Array, windows: set[int | None]) -> Int32Array:
        """The first blocks that a query after so many tokens sees, in the widest of the windows."""
        if None in windows:
            return np.zeros_like(context)
        widest = max(window for window in windows if window is not None)
        first: Int32Array = np.maximum(context - widest + 1, 0) // self._shape.block_size
        return first

    def _group_decodes(self, layout: StepLayout, windows: set[int | None]) -> list[_DecodeGroup]:
        """Cuts the decodes where one is over twice as long as the group's shortest."""
        blocks = -(-layout.seq_lens // self._shape.block_size)
        blocks -= self._first_seen_blocks(layout.seq_lens - 1, windows)
        groups, begin = [], 0
        for end in range(1, layout.num_decodes + 1):
            if end < layout.num_decodes and (
                blocks[end] <= 2 * blocks[begin]
                and blocks[end] * (end + 1 - begin) <= self._max_group_blocks
            ):
                continue
            groups.append(self._decode_group(layout, begin, end, windows))
            begin = end
        return groups

    def _decode_group(
        self, layout: StepLayout, begin: int, end: int, windows: set[int | None]
    ) -> _DecodeGroup:
        size, lengths = self._shape.block_size, layout.seq_lens[begin:end, None]
        first = self._first_seen_blocks(lengths - 1, windows)
        seen = lengths - first * size
        columns = first + np.arange(-(-int(seen.max()) // size))
        padding = columns * size >= lengths
        tables = layout.block_tables[begin:end]
        block_ids = np.take_along_axis(tables, np.where(padding, 0, columns), axis=1)
        ids = self._device.upload(np.where(padding, 0, block_ids).reshape(-1))
        length = int(seen.max())
        positions = first * size + np.arange(length)
        masks = {window: self._decode_mask(positions, lengths, window) for window in windows}
        return _DecodeGroup(begin, end, length, ids, masks)

    def _decode_mask(
        self, positions: Int32Array, lengths: Int32Array, window: int | None
    ) -> torch.Tensor | None:
        """What sequences of these lengths [n, 1] do not see of these positions [n, keys]."""
        hidden = positions >= lengths
        if window is not None:
            hidden |= positions < lengths - window
        if not hidden.any():
            return None
        return self._mask(self._device.upload(hidden))[:, None, None, :]

    def _chunks(self, layout: StepLayout, windows: set[int | None]) -> list[_Chunk]:
        size, context = self._shape.block_size, layout.seq_lens - np.diff(layout.query_starts)
        first_seen = self._first_seen_blocks(context, windows)
        chunks = []
        for row in range(layout.num_decodes, len(layout.seq_lens)):
            begin, end = (int(start) for start in layout.query_starts[row : row + 2])
            first, last = int(first_seen[row]), -(-int(layout.seq_lens[row]) // size)
            block_ids = self._device.upload(layout.block_tables[row, first:last])
            chunks.append(_Chunk(begin, end, int(context[row]), first * size, block_ids))
        return chunks


def _windows(shape: AttentionShape, group: Sequence[int]) -> set[int | None]:
    return {shape.layers[layer].window for layer in group}


def _allocate(shape: AttentionShape, layer: AttentionLayer) -> torch.Tensor:
    """Pages that take memory once they are written. Only the null block, which stands for padding,
    must hold numbers from the start.
    """
    pages = (shape.num_blocks, shape.block_size, layer.num_kv_heads, layer.head_dim)
    allocated = torch.empty(pages, dtype=shape.dtype, device=shape.device)
    allocated[0].zero_()
    return allocated


def _grouped(heads: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """[n, num_heads, head_dim] as [num_kv_heads, heads per kv head, n, head_dim], a view."""
    grouped = heads.view(len(heads), layer.num_kv_heads, -1, layer.head_dim)
    return grouped.permute(1, 2, 0, 3)


def _repeated(heads: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """[n, num_kv_heads, head_dim] as [num_kv_heads, heads per kv head, n, head_dim], a view."""
    repeats = layer.num_heads // layer.num_kv_heads
    return heads.permute(1, 0, 2).unsqueeze(1).expand(-1, repeats, -1, -1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    layer: AttentionLayer,
) -> torch.Tensor:
    """Attention of [.., heads, n, head_dim]; written out where scores are capped."""
    if layer.softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=layer.scale)
    scores = (query @ keys.transpose(-1, -2)).float() * (layer.scale / layer.softcap)
    scores.tanh_().mul_(layer.softcap)
    if mask is not None:
        scores += mask
    return torch.softmax(scores, dim=-1).to(values.dtype) @ values


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """One step in one KV-cache group: where it writes, and what it attends to."""

    slots: torch.Tensor
    opened_blocks: torch.Tensor
    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]


class TorchPagedStep:
    """One step over a TorchPagedAttention; `steps` by layer."""

    def __init__(self, cache: TorchPagedAttention, steps: list[_GroupStep]) -> None:
        self._cache = cache
        self._steps = steps

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """See LayerAttention."""
        step = self._steps[layer]
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        padded, count = len(query), len(step.slots)
        query, key, value = query[:count], key[:count], value[:count]
        self._cache.store(layer, step.slots, step.opened_blocks, key, value)
        if len(step.decodes) == 1 and not step.chunks and padded == count:
            return self._cache.attend_group(layer, query, step.decodes[0])
        output = query.new_empty(padded, *query.shape[1:])
        output[count:].zero_()
        for group in step.decodes:
            rows = slice(group.begin, group.end)
            attended = self._cache.attend_group(layer, query[rows], group)
            output[rows].view(attended.shape).copy_(attended)
        for chunk in step.chunks:
            rows = slice(chunk.begin, chunk.end)
            self._cache.attend_chunk(
                layer, query[rows], key[rows], value[rows], chunk, output[rows]
            )
        return output.flatten(1)
