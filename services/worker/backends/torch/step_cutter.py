"""Cuts a step into the calls of torch's paged attention. Computes only indexes and masks."""

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.backends.arrays import Int32Array, Int64Array
from services.worker.backends.attention import AttentionShape, StepLayout
from services.worker.backends.device import Device
from services.worker.backends.torch.attend import MOST_ROWS
from services.worker.backends.torch.key_ranges import KeyRanges, Run


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes that are computed in one call: rows [begin, end) of the step, with `length` keys
    each.

    `block_ids`: the blocks of all keys, sequence by sequence. The first block of a sequence begins
    `offset` tokens before its keys. `masks` maps windows of layers to masks.
    """

    begin: int
    end: int
    length: int
    offset: int
    block_ids: torch.Tensor
    masks: dict[int | None, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's tokens in the step, from the step's token `begin` on, divided into `runs`. They
    follow `context` earlier tokens of the request.

    `block_ids`: the blocks of all keys of the tokens. The first block begins at token `start` of
    the request.
    """

    begin: int
    context: int
    runs: list[Run]
    start: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepCutter:
    """Cuts steps over one KV cache. `max_group_tokens` limits the keys in a group of decodes."""

    shape: AttentionShape
    device: Device
    ranges: KeyRanges
    max_group_tokens: int

    def decodes(self, layout: StepLayout, windows: set[int | None]) -> list[DecodeGroup]:
        """Cuts the decodes into groups that may share a call, of up to `max_group_tokens` keys."""
        num_decodes = layout.num_decodes
        widest = _widest(windows)
        starts, lengths = self.ranges.of_decodes(layout.seq_lens[:num_decodes] - 1, widest)
        offsets = starts % layout.block_size
        groups, begin = [], 0
        for end in range(1, num_decodes + 1):
            if end < num_decodes and (
                offsets[end] == offsets[begin]
                and self.ranges.may_share(int(lengths[begin]), int(lengths[end]))
                and lengths[begin : end + 1].max() * (end + 1 - begin) <= self.max_group_tokens
            ):
                continue
            groups.append(self._decode_group(layout, begin, end, windows))
            begin = end
        return groups

    def _decode_group(
        self, layout: StepLayout, begin: int, end: int, windows: set[int | None]
    ) -> DecodeGroup:
        size, seq_lens = layout.block_size, layout.seq_lens[begin:end, None]
        starts, lengths = self.ranges.of_decodes(seq_lens - 1, _widest(windows))
        length, offset = int(lengths.max()), int(starts[0, 0]) % size
        columns = starts // size + np.arange(-(-(offset + length) // size))
        ids = self._block_ids(
            layout, slice(begin, end), columns, first_lens=seq_lens, widest=_widest(windows)
        )
        positions = starts + np.arange(length)
        masks = {window: self._decode_mask(positions, seq_lens, window) for window in windows}
        return DecodeGroup(begin, end, length, offset, ids, masks)

    def _block_ids(
        self,
        layout: StepLayout,
        sequences: slice,
        columns: Int64Array,
        first_lens: Int32Array,
        widest: int | None,
    ) -> torch.Tensor:
        """Returns the blocks at these columns [n, any] of the block tables of n sequences. The null
        block replaces blocks beyond the end of a sequence, and blocks before the widest window of
        all queries. `first_lens` [n, 1]: tokens of each sequence up to and including its first
        query.
        """
        size, tables = layout.block_size, layout.block_tables[sequences]
        hidden = columns * size >= layout.seq_lens[sequences, None]
        if widest is not None:
            hidden |= (columns + 1) * size <= first_lens - widest
        ids = np.take_along_axis(tables, np.where(hidden, 0, columns), axis=1)
        return self.device.upload(np.where(hidden, 0, ids).reshape(-1))

    def _decode_mask(
        self, positions: Int64Array, lengths: Int32Array, window: int | None
    ) -> torch.Tensor:
        """A mask that hides positions [n, keys] beyond lengths [n, 1] or before the window."""
        hidden = positions >= lengths
        if window is not None:
            hidden |= positions < lengths - window
        return score_mask(self.device.upload(hidden), self.shape.dtype)[:, None, None, :]

    def chunks(self, layout: StepLayout, windows: set[int | None]) -> list[Chunk]:
        """Returns one chunk for each request after the decodes. `ranges.of_chunk` divides the
        chunk's queries into runs with one range of keys each.
        """
        size, widest = layout.block_size, _widest(windows)
        chunks = []
        for row in range(layout.num_decodes, len(layout.seq_lens)):
            begin, end = (int(start) for start in layout.query_starts[row : row + 2])
            seq_lens = layout.seq_lens[row : row + 1, None]
            context = int(seq_lens[0, 0]) - (end - begin)
            parts = self.ranges.of_chunk(context, end - begin, widest, MOST_ROWS)
            last = max(run.keys.end for run in parts)
            columns = np.arange(parts[0].keys.start // size, -(-last // size))[None]
            first_lens = seq_lens - (end - begin) + 1
            ids = self._block_ids(layout, slice(row, row + 1), columns, first_lens, widest)
            chunks.append(Chunk(begin, context, parts, int(columns[0, 0]) * size, ids))
        return chunks


def score_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a mask to add to scores: -inf for hidden keys, 0 for others."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)


def _widest(windows: set[int | None]) -> int | None:
    return None if None in windows else max(window for window in windows if window is not None)
