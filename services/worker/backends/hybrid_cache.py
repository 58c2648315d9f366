"""The cache of a model that has both attention layers and recurrent layers.

All KV-cache groups get their blocks from one pool. Therefore the same memory of a block stores
either keys and values, or the states of a group's recurrent layers. A state fills the page of keys,
then the page of values, then extra memory that only states use. vLLM's hybrid models have the same
layout, in pages of the larger of the two sizes.

A step reads a request's state from the block that the block table lists for the last token before
the step. It writes the new state to the block that the table lists for the step's last token. The
two may be the same block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol, cast

import numpy as np
import torch

from services.worker.backends.arrays import Int32Array
from services.worker.backends.attention import (
    AttentionShape,
    LayerAttention,
    PagedAttention,
    StateLayer,
    StepLayout,
)
from services.worker.backends.kernels import Kernels


class PagesOfKeys(PagedAttention, Protocol):
    """Attention on the CPU whose memory can also store states of recurrent layers.

    `pages`: the memory of all blocks. Each page is a contiguous tensor [2, num_blocks, ...] of keys
    and values. Tensors [1, num_blocks, ...] follow if states need more memory.
    """

    pages: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateRun:
    """Sequences of a step that a recurrent layer computes in one call.

    `tokens`: the indexes of the sequences' tokens, sequence by sequence. All sequences have the
    same number of tokens. `sources` and `targets` have an int64 array [num_sequences] for each
    group of recurrent layers: the blocks with the initial states, and the blocks for the final
    states. `sources` is None if the sequences have no computed tokens.
    """

    tokens: slice
    num_sequences: int
    sources: tuple[torch.Tensor, ...] | None
    targets: tuple[torch.Tensor, ...]


class HybridCache:
    """A PagedAttention for keys, values and states, on the CPU. The layouts of recurrent groups
    follow the layouts of attention groups.
    """

    def __init__(self, attention: PagesOfKeys, shape: AttentionShape) -> None:
        self._attention = attention
        self._shape = shape
        self._num_attending = len(shape.layer_groups)
        self.pages = list(attention.pages)
        self._planes: list[list[torch.Tensor]] = []
        """The memory of each page, in the order in which a state fills it: keys, values, extra
        memory. Each tensor is uint8 [num_blocks, any].
        """
        for page, size in zip_longest(attention.pages, shape.state_bytes):
            halves = () if page is None else page
            planes = [half.view(shape.num_blocks, -1).view(torch.uint8) for half in halves]
            more = (size or 0) - sum(plane.shape[1] for plane in planes)
            if more > 0:
                planes.append(torch.empty((shape.num_blocks, more), dtype=torch.uint8))
                self.pages.append(planes[-1][None])
            self._planes.append(planes)
        self._places = {
            layer: (group, page)
            for group, layers in enumerate(shape.state_groups)
            for page, layer in enumerate(layers)
        }

    def begin_step(self, layouts: Sequence[StepLayout]) -> "HybridStep":
        attending, states = layouts[: self._num_attending], layouts[self._num_attending :]
        return HybridStep(self._attention.begin_step(attending), self, state_runs(states))

    def zero_blocks(self, block_ids: Int32Array) -> None:
        self._attention.zero_blocks(block_ids)

    def copy_blocks(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copies whole blocks in order, `sources[i]` to `targets[i]`. Must be called before the
        step that uses the targets begins.
        """
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for plane in (plane for planes in self._planes for plane in planes):
                plane[target] = plane[source]

    def read(self, layer: int, run: StateRun) -> tuple[torch.Tensor, ...] | None:
        """Returns the initial states of a recurrent layer for the sequences of a run, as new
        tensors [num_sequences, ...], or None if the sequences have no computed tokens.
        """
        if run.sources is None:
            return None
        group, page = self._places[layer]
        blocks, state = run.sources[group], self._shape.states[layer]
        left, parts = state.num_bytes, []
        for plane in self._planes[page]:
            parts.append(plane[:, : min(left, plane.shape[1])].index_select(0, blocks))
            left -= parts[-1].shape[1]
        sizes = [StateLayer((tensor,)).num_bytes for tensor in state.tensors]
        packed = torch.split(torch.cat(parts, 1), sizes, 1)
        return tuple(
            part.contiguous().view(dtype).view(len(blocks), *shape)
            for part, (shape, dtype) in zip(packed, state.tensors, strict=True)
        )

    def write(self, layer: int, run: StateRun, tensors: Sequence[torch.Tensor]) -> None:
        """Stores a recurrent layer's states after the last tokens of a run's sequences."""
        group, page = self._places[layer]
        flat = (tensor.contiguous().view(run.num_sequences, -1) for tensor in tensors)
        packed = torch.cat([tensor.view(torch.uint8) for tensor in flat], 1)
        for plane in self._planes[page]:
            part, packed = packed[:, : plane.shape[1]], packed[:, plane.shape[1] :]
            plane[:, : part.shape[1]].index_copy_(0, run.targets[group], part)


@dataclass(frozen=True, slots=True)
class HybridStep:
    """A LayerAttention for attention layers. Recurrent layers use its `states` and `runs`."""

    attention: LayerAttention
    states: HybridCache
    runs: Sequence[StateRun]

    def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self.attention(*arguments, **options)


def cache_of(kernels: Kernels, shape: AttentionShape) -> tuple[PagedAttention, HybridCache | None]:
    """Allocates a cache on the CPU. Returns its attention, and its HybridCache if it has states."""
    attention = kernels.paged_attention(shape)
    if not shape.states:
        return attention, None
    hybrid = HybridCache(cast(PagesOfKeys, attention), shape)
    return hybrid, hybrid


def state_runs(layouts: Sequence[StepLayout]) -> list[StateRun]:
    """Returns the calls of a recurrent layer in a step: one for all sequences with a single token
    and a state, and one for each other sequence. `layouts` has one for each group of recurrent
    layers.
    """
    first = layouts[0]
    counts = np.diff(first.query_starts)
    computed = first.seq_lens - counts
    # Sequences with a single token come first, in ascending order of length, so those without
    # computed tokens are at the beginning.
    decodes = range(int(np.count_nonzero(computed[: first.num_decodes] == 0)), first.num_decodes)
    runs = [_run(layouts, computed, decodes)] if decodes else []
    alone = (*range(decodes.start), *range(decodes.stop, len(counts)))
    return runs + [_run(layouts, computed, range(index, index + 1)) for index in alone]


def _run(layouts: Sequence[StepLayout], computed: Int32Array, sequences: range) -> StateRun:
    own = slice(sequences.start, sequences.stop)
    starts = layouts[0].query_starts

    def blocks(num_tokens: Int32Array) -> tuple[torch.Tensor, ...]:
        """Returns, for each group, the blocks with the states after `num_tokens` tokens."""
        last = num_tokens[own] - 1
        found = (each.tables[each.rows[own], last // each.block_size] for each in layouts)
        return tuple(torch.from_numpy(block_ids.astype(np.int64)) for block_ids in found)

    return StateRun(
        slice(int(starts[sequences.start]), int(starts[sequences.stop])),
        len(sequences),
        blocks(computed) if computed[sequences.start] else None,
        blocks(layouts[0].seq_lens),
    )
