"""The attention calls of a step, for layers with equal attention parameters.

A call's lanes and xFormers' bias do not depend on the layer, so they are built once for a step.
paged_attention.py explains lanes, and how a step is cut into calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.arrays import Int32Array
from services.worker.backends.attention import StepLayout
from services.worker.backends.cuda import sub_chunks
from services.worker.backends.cuda.sub_chunks import KeyRanges, seen_by_all
from services.worker.backends.cuda.xformers_ops import FLASH, Bias, PagedOps
from services.worker.backends.device import Device, UnsuitableDevice

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of some queries of a step, called for one layer after the other. Maps queries [n,
num_heads, head_dim], with a layer's pools of keys and values, to [n, num_heads, head_dim].
"""

Partial = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A Call in float32 that also returns the logarithms of the normalizers [n, num_heads]."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Builds the calls for layers with equal attention parameters.

    `width`: the number of blocks of the longest sequence. Every block table has this many entries.
    `batch_invariant`: a query's output does not depend on other queries in the step. Then keys are
    not split, because the number of parts would depend on the number of lanes. All lanes have the
    same number of queries, because the kernel's tiles depend on this number, so lanes of decodes
    are padded. With a window, each query is a lane of its own, because a lane's first key
    determines where tiles of keys begin.
    """

    ops: PagedOps
    width: int
    device: Device
    batch_invariant: bool

    @property
    def _window(self) -> int | None:
        return self.ops.layer.window

    def decodes(self, num_lanes: int) -> "DecodeCall":
        """Returns a call with one query in each lane. Lengths and tables are set in each step.
        Raises UnsuitableDevice if a call cannot have as many lanes.
        """
        size, most = self._lane() if self.batch_invariant else 1, self._most_lanes(1)
        if num_lanes > most:
            raise UnsuitableDevice(
                f"max_num_seqs is above {most}, the most that attention on CUDA computes for "
                f"{self.ops.layer.num_kv_heads} key-value heads; lower --max-num-seqs"
            )
        there = self.device.torch_device
        tables = torch.zeros(num_lanes, self.width, dtype=torch.int32, device=there)
        ends = np.ones(num_lanes, np.int32)
        if self._window is None:
            bias = self.ops.padded_bias([size] * num_lanes, ends.tolist(), tables)
        else:
            bias = self._range_bias(size, KeyRanges(np.zeros_like(ends), ends), tables)
        operator = self.ops.split_k(self._splits(num_lanes))
        attend = partial(self.ops.attend, bias=bias, operator=operator)
        return DecodeCall(self.device, self._window, size, tables, bias, attend)

    def chunks(self, layout: StepLayout, *, flash: bool) -> Call:
        """Returns a call for the layout's chunks, whose queries follow the decodes. Queries are
        gathered into lanes, and the outputs of lanes are reordered by token. With `flash`,
        FlashAttention 3 computes each chunk as one lane.
        """
        first = layout.num_decodes
        counts, seq_lens = np.diff(layout.query_starts[first:]), layout.seq_lens[first:]
        block_tables = layout.block_tables[first:]
        missing = self.width - block_tables.shape[1]  # entries beyond a sequence are never read
        tables = self.device.upload(np.pad(block_tables, ((0, 0), (0, missing))))
        if flash:
            bias = self.ops.padded_bias(counts.tolist(), seq_lens.tolist(), tables)
            return partial(self.ops.attend, bias=bias, operator=FLASH)
        size = self._lane()
        chunks = sub_chunks.cut(counts, seq_lens, size)
        tables = tables.index_select(0, self.device.upload(chunks.parents))
        most = self._most_lanes(size)
        calls = [
            self._of_lanes(size, chunks.ends[first : first + most], tables[first : first + most])
            for first in range(0, len(chunks.ends), most)
        ]
        queries, rows = self.device.upload(chunks.queries), self.device.upload(chunks.rows)

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            parts = torch.split(query.index_select(0, queries), most * size)
            called = zip(calls, parts, strict=True)
            attended = [call(part, keys, values) for call, part in called]
            whole = attended[0] if len(attended) == 1 else torch.cat(attended)
            return whole.index_select(0, rows).to(query.dtype)

        return attend

    def _of_lanes(self, size: int, ends: Int32Array, tables: torch.Tensor) -> Call:
        """Returns a call for lanes of `size` queries. Without a window, a lane attends to all keys
        up to its end. With a window, it attends to the keys in its queries' windows.
        """
        ops, window = self.ops, self._window
        operator = ops.split_k(self._splits(len(ends)))
        if window is None:
            bias = ops.padded_bias([size] * len(ends), ends.tolist(), tables)
            return partial(ops.attend, bias=bias, operator=operator)
        bias = self._range_bias(size, seen_by_all(ends, window), tables)
        if self.batch_invariant:
            return partial(ops.attend, bias=bias, operator=operator)
        shared = partial(ops.attend_partly, bias=bias, operator=operator)
        beyond = sub_chunks.seen_by_some(ends, window, size)
        if not beyond.ends.any():
            return lambda *of_layer: shared(*of_layer)[0]
        bias = self._range_bias(1, beyond, tables.repeat_interleave(size, dim=0))
        return _joined(shared, partial(ops.attend_partly, bias=bias, operator=ops.split_k(1)))

    def _most_lanes(self, size: int) -> int:
        """The maximum number of lanes in a call. With a window, the second call for lanes of `size`
        queries has a lane for each query.
        """
        factor = 1 if self._window is None else size
        num_rows = factor * self.ops.layer.num_kv_heads
        return sub_chunks.most_lanes(num_rows, self.width * self.ops.block_size)

    def _range_bias(self, size: int, ranges: KeyRanges, tables: torch.Tensor) -> Bias:
        num_queries = [size] * len(ranges.ends)
        return self.ops.gappy_bias(
            num_queries, ranges.starts.tolist(), ranges.lengths.tolist(), tables
        )

    def _lane(self) -> int:
        window = self._window
        if self.batch_invariant and window is not None:
            return 1
        return sub_chunks.largest_lane(window)

    def _splits(self, num_lanes: int) -> int:
        if self.batch_invariant:
            return 1
        num_keys = self.width * self.ops.block_size
        num_heads, processors = self.ops.layer.num_kv_heads, self.device.num_processors
        return sub_chunks.num_splits(num_lanes, num_heads, num_keys, processors)


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """A Call with one query in each lane. Lengths and `tables` [num_lanes, width] are replaced in
    place.

    The kernel computes `size` queries in a lane. All queries of a lane except the last are padding.
    `attend` calls the kernel with `bias`, which refers to the lengths and tables.
    """

    device: Device
    window: int | None
    size: int
    tables: torch.Tensor
    bias: Bias
    attend: Call

    def set(self, seq_lens: Int32Array, block_tables: Int32Array) -> None:
        """Sets the lengths and block tables of the first lanes. The other lanes get no keys."""
        num_lanes = len(self.tables)
        ends = np.pad(seq_lens, (0, num_lanes - len(seq_lens)))
        self.bias.k_seqinfo.seqlen.copy_(self.device.upload(ends), non_blocking=True)
        if self.window is not None:
            starts = seen_by_all(ends, self.window).starts
            begin = self.bias.k_seqinfo.seqstart[:num_lanes]
            begin.copy_(self.device.upload(starts), non_blocking=True)
        tables = self.device.upload(np.ascontiguousarray(block_tables))
        self.tables[: len(seq_lens), : tables.shape[1]].copy_(tables, non_blocking=True)

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        num_queries, num_lanes = len(query), len(self.tables)
        if num_queries < num_lanes:
            query = F.pad(query, (0, 0, 0, 0, 0, num_lanes - num_queries))
        if self.size == 1:
            return self.attend(query, keys, values)[:num_queries]
        filled = F.pad(query.unsqueeze(1), (0, 0, 0, 0, self.size - 1, 0)).flatten(0, 1)
        attended = self.attend(filled, keys, values)
        return attended.view(-1, self.size, *query.shape[1:])[:num_queries, -1]


def _joined(first: Partial, second: Partial) -> Call:
    """Attention over two disjoint sets of keys. The output of a query without keys is NaN."""

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        output, sums = first(query, keys, values)
        further, further_sums = second(query, keys, values)
        weights = torch.softmax(torch.stack((sums, further_sums)), dim=0).unsqueeze(-1)
        return output * weights[0] + further * weights[1]

    return attend
