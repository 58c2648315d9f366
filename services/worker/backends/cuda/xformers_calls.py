"""The attention calls of a step, for layers that attend alike.

The parts of a call that do not depend on the layer are built once a step: its lanes, and what
xFormers calls its bias. See paged_attention.py for how a step is cut into calls.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.attention import AttentionLayer, Int32Array, StepLayout
from services.worker.backends.cuda.split_k import num_splits
from services.worker.backends.cuda.sub_chunks import (
    KeyRanges,
    SubChunks,
    cut,
    largest_lane,
    seen_by_all,
    seen_by_some,
)
from services.worker.backends.cuda.xformers_ops import Operator, PagedOps
from services.worker.backends.device import Device


class Call(Protocol):
    """Attention of some queries of a step, for one layer after the other."""

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Queries [n, num_heads, head_dim] over a layer's pools -> [n, num_heads, head_dim]."""
        ...


class LayerKind:
    """Makes the calls for layers that attend alike.

    `width`: blocks of the longest sequence, and so of every table. `batch_invariant`: a query's
    output is the same whatever is in the step with it. Then keys are not split, because the number
    of parts would depend on the number of lanes; and every lane has the same number of queries,
    because the kernel's tiles depend on it. Lanes of decodes are padded, and with a window, where a
    lane's first key decides at which keys tiles begin, each query is a lane.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        block_size: int,
        width: int,
        device: Device,
        split_k: Operator | None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.layer = layer
        self._batch_invariant = batch_invariant
        self._block_size = block_size
        self._width = width
        self._device = device
        self._ops = (
            PagedOps(layer, block_size) if split_k is None else PagedOps(layer, block_size, split_k)
        )

    def decodes(self, num_lanes: int) -> "DecodeCall":
        """A call of one query a lane, whose lengths and tables are set at every step."""
        return DecodeCall(
            self._ops,
            self._device,
            num_lanes,
            self._width,
            self.layer.window,
            self._splits(num_lanes),
            self._lane() if self._batch_invariant else 1,
        )

    def chunks(self, layout: StepLayout) -> Call:
        """A call for the layout's chunks. Its queries are those after the decodes."""
        first, window = layout.num_decodes, self.layer.window
        counts = np.diff(layout.query_starts[first:])
        chunks = cut(counts, layout.seq_lens[first:], self._lane())
        tables = self._device.upload(self._padded(layout.block_tables[first:]))
        tables = tables.index_select(0, self._device.upload(chunks.parents))
        splits = self._splits(len(chunks.ends))
        if window is None:
            return _ChunkCall(self._device, chunks, self._whole(chunks, tables, splits))
        shared = seen_by_all(chunks.ends, window)
        if self._batch_invariant:
            return _ChunkCall(self._device, chunks, self._through_window(shared, tables))
        partial = self._partial(chunks.size, shared, tables, splits)
        beyond = seen_by_some(chunks.ends, window, chunks.size)
        if not beyond.ends.any():
            return _ChunkCall(self._device, chunks, lambda *of_layer: partial(*of_layer)[0])
        further = self._partial(1, beyond, tables.repeat_interleave(chunks.size, dim=0), 1)
        return _ChunkCall(self._device, chunks, _Joined(partial, further))

    def flash(self, layout: StepLayout) -> Call:
        """As `chunks`, without cutting them, by FlashAttention 3."""
        first = layout.num_decodes
        bias = self._ops.padded_bias(
            np.diff(layout.query_starts[first:]).tolist(),
            layout.seq_lens[first:].tolist(),
            self._device.upload(self._padded(layout.block_tables[first:])),
        )
        return lambda query, keys, values: self._ops.flash(query, keys, values, bias)

    def _whole(self, chunks: SubChunks, tables: torch.Tensor, splits: int) -> Call:
        """Each lane sees the keys up to its end."""
        num_queries = [chunks.size] * len(chunks.ends)
        bias = self._ops.padded_bias(num_queries, chunks.ends.tolist(), tables)
        return lambda query, keys, values: self._ops.attend(query, keys, values, bias, splits)

    def _through_window(self, ranges: KeyRanges, tables: torch.Tensor) -> Call:
        """Each lane has one query and sees its range."""
        bias = self._ops.gappy_bias(
            [1] * len(ranges.ends), ranges.starts.tolist(), ranges.lengths.tolist(), tables
        )
        return lambda query, keys, values: self._ops.attend(query, keys, values, bias, 1)

    def _partial(
        self, size: int, ranges: KeyRanges, tables: torch.Tensor, splits: int
    ) -> "Partial":
        """Each lane sees its range."""
        bias = self._ops.gappy_bias(
            [size] * len(ranges.ends), ranges.starts.tolist(), ranges.lengths.tolist(), tables
        )
        return lambda query, keys, values: self._ops.attend_partly(
            query, keys, values, bias, splits
        )

    def _padded(self, block_tables: Int32Array) -> Int32Array:
        """Tables padded to `width`; entries beyond a sequence are never read."""
        return np.pad(block_tables, ((0, 0), (0, self._width - block_tables.shape[1])))

    def _lane(self) -> int:
        """Queries of a lane of chunks."""
        window = self.layer.window
        return 1 if self._batch_invariant and window is not None else largest_lane(window)

    def _splits(self, num_lanes: int) -> int:
        if self._batch_invariant:
            return 1
        num_keys = self._width * self._block_size
        processors = self._device.num_processors
        return num_splits(num_lanes, self.layer.num_kv_heads, num_keys, processors)


class DecodeCall:
    """One query in each of `num_lanes` lanes; lengths and tables are replaced in place.

    In the kernel a lane has `size` queries, of which the last is the real one.
    """

    def __init__(
        self,
        ops: PagedOps,
        device: Device,
        num_lanes: int,
        width: int,
        window: int | None,
        splits: int,
        size: int,
    ) -> None:
        self.num_lanes = num_lanes
        self._size = size
        self._ops = ops
        self._device = device
        self._window = window
        self._splits = splits
        self._tables = torch.zeros(num_lanes, width, dtype=torch.int32, device=device.torch_device)
        num_queries, ends = [size] * num_lanes, [1] * num_lanes
        if window is None:
            self._bias = ops.padded_bias(num_queries, ends, self._tables)
        else:
            self._bias = ops.gappy_bias(num_queries, [0] * num_lanes, ends, self._tables)

    def set(self, seq_lens: Int32Array, block_tables: Int32Array) -> None:
        """Sets the lengths and tables of the first lanes; the other lanes get no keys."""
        others = (0, self.num_lanes - len(seq_lens))
        ends = np.pad(seq_lens, others)
        self._bias.k_seqinfo.seqlen.copy_(self._device.upload(ends), non_blocking=True)
        if self._window is not None:
            starts = seen_by_all(ends, self._window).starts
            begin = self._bias.k_seqinfo.seqstart[: self.num_lanes]
            begin.copy_(self._device.upload(starts), non_blocking=True)
        tables = self._device.upload(np.ascontiguousarray(block_tables))
        self._tables[: len(seq_lens), : tables.shape[1]].copy_(tables, non_blocking=True)

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """See Call; for at most `num_lanes` queries."""
        num_queries = len(query)
        if num_queries < self.num_lanes:
            query = F.pad(query, (0, 0, 0, 0, 0, self.num_lanes - num_queries))
        if self._size == 1:
            return self._ops.attend(query, keys, values, self._bias, self._splits)[:num_queries]
        filled = F.pad(query.unsqueeze(1), (0, 0, 0, 0, self._size - 1, 0)).flatten(0, 1)
        attended = self._ops.attend(filled, keys, values, self._bias, self._splits)
        return attended.view(-1, self._size, *query.shape[1:])[:num_queries, -1]


Partial = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Queries over a layer's pools -> attention in float32 and normalizers [n, num_heads]."""


class _Joined:
    """Attention over two disjoint sets of keys as one."""

    def __init__(self, first: Partial, second: Partial) -> None:
        self._parts = (first, second)

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """See Call. A query without any key gives NaN."""
        parts = [part(query, keys, values) for part in self._parts]
        weights = torch.softmax(torch.stack([normalizers for _, normalizers in parts]), dim=0)
        (first, _), (second, _) = parts
        return first * weights[0].unsqueeze(-1) + second * weights[1].unsqueeze(-1)


class _ChunkCall:
    """Gathers the queries of chunks into lanes, and the outputs of lanes into tokens."""

    def __init__(self, device: Device, chunks: SubChunks, call: Call) -> None:
        self._queries = device.upload(chunks.queries)
        self._rows = device.upload(chunks.rows)
        self._call = call

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """See Call."""
        attended = self._call(query.index_select(0, self._queries), keys, values)
        return attended.index_select(0, self._rows).to(query.dtype)
