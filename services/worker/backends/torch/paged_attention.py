"""Paged attention in plain torch operations. It is used on the CPU, and on CUDA for scores with a
softcap.

Pages are token-major, [num_blocks, block_size, num_kv_heads, head_dim] for each layer of a KV-cache
group. Therefore the gathered pages of a sequence contain its keys in order, and the attention
kernel reads them through one strided view. A step's keys are written to the pages first, and are
then read from the pages like all other keys.

Keys and values in 8 bits (kv_codes.py) are stored and gathered as codes. They are multiplied by
their scales, in the model's data type, before attention.

With `batch_invariant` on the CPU, three things do not affect the bits of a query's result: the
other queries in the step, how the prompt is divided into chunks, and where its pages are. The keys
of a query, and the blocks in which they are summed, are a function of the query's position
(key_ranges.py). The number of rows of a call is a multiple with which torch's libraries return the
same bits for a row (attend.py).

* Decodes of similar length form a group, with one gather into a persistent workspace, and one
  attention call. The query heads that share a key head are treated as queries of one head.
* Chunks are computed one by one, in runs of queries with the same keys. Key heads are repeated by a
  stride of zero, not by copies.

If all layers of a KV-cache group have a window, only the pages within the window are gathered,
because earlier blocks may have been reallocated to other requests.

Paging: Kwon et al., PagedAttention.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends import attention
from services.worker.backends.arrays import Int32Array
from services.worker.backends.device import CpuDevice, Device
from services.worker.backends.kv_codes import coded, decoded
from services.worker.backends.torch.attend import MOST_ROWS, attend, rotate, row_multiple
from services.worker.backends.torch.key_ranges import BLOCK, FixedRanges, KeyRanges, TightRanges
from services.worker.backends.torch.step_cutter import Chunk, DecodeGroup, StepCutter, score_mask

MAX_GROUP_TOKENS = 16384
"""Maximum number of keys in a group of several decodes, including padding."""


def workspace_bytes(shape: attention.AttentionShape, max_model_len: int) -> int:
    """Upper estimate of the memory of gathered pages and masks, in bytes."""
    widest = max(layer.num_kv_heads * layer.head_dim for layer in shape.layers)
    per_token = 2 * widest + MOST_ROWS * len({layer.window for layer in shape.layers})
    num_tokens = 2 * max(MAX_GROUP_TOKENS, max_model_len + BLOCK)
    of_decoded = num_tokens * 2 * widest * torch.float32.itemsize if shape.has_codes else 0
    return num_tokens * per_token * shape.dtype.itemsize + of_decoded


class TorchPagedAttention:
    """A PagedAttention in torch. The host never waits for the device."""

    def __init__(
        self,
        shape: attention.AttentionShape,
        device: Device | None = None,
        max_group_tokens: int = MAX_GROUP_TOKENS,
        *,
        batch_invariant: bool = True,
    ) -> None:
        self._shape = shape
        self._device = device or CpuDevice()
        has_softcap = any(layer.softcap is not None for layer in shape.layers)
        ranges: KeyRanges = TightRanges(shape.block_size)
        if batch_invariant:
            ranges = FixedRanges(has_softcap=has_softcap)
        self._attend = partial(attend, alike=batch_invariant)
        self._cutter = StepCutter(shape, self._device, ranges, max_group_tokens)
        self._windows = [
            {shape.layers[layer].window for layer in group} for group in shape.layer_groups
        ]
        self._row_multiples = [
            row_multiple(layer, shape.dtype) if batch_invariant else 1 for layer in shape.layers
        ]
        kind: Any = {"dtype": shape.page_dtype, "device": shape.device}
        self.pages = [torch.empty(shape.page_shape(layer), **kind) for layer in shape.page_layers]
        """Keys and values (see PagesOfKeys). Their memory is allocated at the first write. Only the
        null block, which is read as padding, is cleared here.
        """
        for pages in self.pages:
            pages[:, 0].zero_()
        self._layer_pages = shape.layer_pages(self.pages)
        self._page_elements = max(math.prod(pages.shape[2:]) for pages in self._layer_pages)
        self._workspace = torch.empty(2, 0, **kind)
        self._run_masks: dict[int | None, torch.Tensor] = {}
        self._mask_width = 0

    def begin_step(self, layouts: Sequence[attention.StepLayout]) -> "TorchPagedStep":
        steps = [
            self._begin_group(layout, windows)
            for layout, windows in zip(layouts, self._windows, strict=True)
        ]
        return TorchPagedStep(self, [steps[group] for group in self._shape.group_of])

    def _begin_group(self, layout: attention.StepLayout, windows: set[int | None]) -> "_GroupStep":
        groups = self._cutter.decodes(layout, windows)
        chunks = self._cutter.chunks(layout, windows)
        blocks = [len(group.block_ids) for group in groups]
        blocks += [len(chunk.block_ids) for chunk in chunks]
        self._reserve_workspace(max(blocks, default=0))
        self._reserve_masks(max((run.keys.length for c in chunks for run in c.runs), default=0))
        slots = self._device.upload(layout.slot_mapping)
        return _GroupStep(slots, self._opened_blocks(layout), groups, chunks)

    def zero_blocks(self, block_ids: Int32Array) -> None:
        cleared = self._device.upload(block_ids.astype(np.int64))
        for pages in self.pages:
            pages.index_fill_(1, cleared, 0)

    def store(
        self,
        layer: int,
        slots: torch.Tensor,
        opened_blocks: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Writes keys and values [n, num_kv_heads, head_dim] to cache slots [n]."""
        own = self._layer_pages[layer]
        if len(opened_blocks):
            own.index_fill_(1, opened_blocks, 0)
        for pages, heads in zip(own.flatten(1, 2), (key, value), strict=True):
            pages.index_copy_(0, slots, coded(heads) if self._shape.has_codes else heads)

    def attend_group(self, layer: int, query: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        """Maps queries [n, num_heads, head_dim], one per sequence, to [n, num_heads * head_dim]."""
        spec, rows = self._shape.layers[layer], group.end - group.begin
        keys, values = (
            pages.view(rows, -1, spec.num_kv_heads, spec.head_dim)
            .narrow(1, group.offset, group.length)
            .transpose(1, 2)
            for pages in self._gather(layer, group.block_ids)
        )
        query = query.reshape(rows, spec.num_kv_heads, -1, spec.head_dim)
        mask = group.masks[spec.window]
        output = self._attend(self._filled_up(layer, query), keys, values, mask, spec)
        return output[:, :, : query.shape[2]].reshape(rows, -1)

    def attend_chunk(
        self, layer: int, query: torch.Tensor, chunk: Chunk, output: torch.Tensor
    ) -> None:
        """Computes attention of a request's queries [n, num_heads, head_dim], into `output`."""
        spec = self._shape.layers[layer]
        keys, values = (
            _repeated(pages.flatten(0, 1), spec) for pages in self._gather(layer, chunk.block_ids)
        )
        for run in chunk.runs:
            seen = slice(run.keys.start - chunk.start, run.keys.end - chunk.start)
            own = _grouped(query[run.begin : run.end], spec)
            rows = self._filled_up(layer, own)
            ahead = chunk.context + run.begin - run.keys.start
            mask = self._run_mask(spec.window, rows.shape[2], ahead, run.keys.length)
            attended = self._attend(rows, keys[:, :, seen], values[:, :, seen], mask, spec)
            _grouped(output[run.begin : run.end], spec).copy_(attended[:, :, : own.shape[2]])

    def _filled_up(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Pads queries [.., n, head_dim] to a multiple of `row_multiple`."""
        missing = -query.shape[-2] % self._row_multiples[layer]
        return F.pad(query, (0, 0, 0, missing)) if missing else query

    def _gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gathers pages of keys and values, [len(block_ids), block_size, num_kv_heads, head_dim]
        each, into the workspace, and decodes them if they are codes.
        """
        own = self._layer_pages[layer]
        shape = (2, len(block_ids), *own.shape[2:])
        gathered = self._workspace[:, : math.prod(shape[1:])].view(shape)
        for pages, target in zip(own, gathered, strict=True):
            torch.index_select(pages, 0, block_ids, out=target)
        if not self._shape.has_codes:
            return gathered.unbind()
        head_dim = self._shape.layers[layer].head_dim
        return tuple(decoded(pages, head_dim, self._shape.dtype) for pages in gathered)

    def _run_mask(
        self, window: int | None, num_queries: int, ahead: int, num_keys: int
    ) -> torch.Tensor:
        """A mask with 0 where a query attends to a key, and -inf elsewhere. `ahead` is the number
        of keys before the first query's own key. The result is a view of one mask that all runs
        share.
        """
        first = self._mask_width - ahead
        return self._run_masks[window][:num_queries, first : first + num_keys]

    def _reserve_masks(self, length: int) -> None:
        """Builds masks for runs over up to `length` keys. Each query's key is near the middle."""
        if self._mask_width >= length:
            return
        middle = self._mask_width = max(length, 2 * self._mask_width)
        for window in set().union(*self._windows):
            size, there = (MOST_ROWS, 2 * middle), self._shape.device
            seen = torch.ones(size, dtype=torch.bool, device=there).tril_(middle)
            if window is not None:
                seen.triu_(middle - window + 1)
            self._run_masks[window] = score_mask(~seen, self._shape.dtype)

    def _reserve_workspace(self, num_blocks: int) -> None:
        held, needed = self._workspace.shape[1], num_blocks * self._page_elements
        if held < needed:
            self._workspace = self._workspace.new_empty(2, max(needed, 2 * held))

    def _opened_blocks(self, layout: attention.StepLayout) -> torch.Tensor:
        """Returns the blocks that the step begins and does not fill. The caller clears them,
        because they may contain values of an earlier request. A mask hides such values, except NaN.
        """
        size = layout.block_size
        last = (layout.seq_lens - 1) // size
        computed = layout.seq_lens - np.diff(layout.query_starts)
        opened = np.flatnonzero((last * size >= computed) & (layout.seq_lens % size != 0))
        return self._device.upload(layout.block_tables[opened, last[opened]].astype(np.int64))


def _grouped(heads: torch.Tensor, layer: attention.AttentionLayer) -> torch.Tensor:
    grouped = heads.view(len(heads), layer.num_kv_heads, -1, layer.head_dim)
    return grouped.permute(1, 2, 0, 3)


def _repeated(heads: torch.Tensor, layer: attention.AttentionLayer) -> torch.Tensor:
    repeats = layer.num_heads // layer.num_kv_heads
    return heads.permute(1, 0, 2).unsqueeze(1).expand(-1, repeats, -1, -1)


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """A step in one KV-cache group: the slots to write, and the step's decodes and chunks."""

    slots: torch.Tensor
    opened_blocks: torch.Tensor
    decodes: list[DecodeGroup]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class TorchPagedStep:
    """The attention of one step over a KV cache. `steps` has one entry for each layer."""

    cache: TorchPagedAttention
    steps: list[_GroupStep]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: attention.Rotation | None,
    ) -> torch.Tensor:
        step = self.steps[layer]
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        padded, count = len(query), len(step.slots)
        query, key, value = query[:count], key[:count], value[:count]
        self.cache.store(layer, step.slots, step.opened_blocks, key, value)
        if len(step.decodes) == 1 and not step.chunks and padded == count:
            return self.cache.attend_group(layer, query, step.decodes[0])
        output = query.new_empty(padded, *query.shape[1:])
        output[count:].zero_()
        for group in step.decodes:
            rows = slice(group.begin, group.end)
            attended = self.cache.attend_group(layer, query[rows], group)
            output[rows].view(attended.shape).copy_(attended)
        for chunk in step.chunks:
            rows = slice(chunk.begin, chunk.begin + chunk.runs[-1].end)
            self.cache.attend_chunk(layer, query[rows], chunk, output[rows])
        return output.flatten(1)
