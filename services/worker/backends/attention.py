"""The interface between a model's layers and the paged KV cache.

The layout of a step is computed once, before the first layer. Each layer then calls the step's
attention with its queries, keys and values. The attention implementation determines how the cache
is shaped, written and read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Protocol

import numpy as np
import torch

from services.worker.backends.arrays import Int32Array, Int64Array
from services.worker.backends.choices import KVCacheDtype
from services.worker.backends.kv_codes import bytes_of_head

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepLayout:
    """The tokens that a step computes, and the slots of their keys and values in one KV-cache
    group.

    Tokens of a request are consecutive. Requests with one token (decodes) come first, in ascending
    order of `seq_lens`. `num_decodes` is the number of decodes. Requests with several tokens
    (chunks) follow.

    * `query_starts` int32 [num_reqs + 1]: index of each request's first token, then the total
      number of tokens.
    * `seq_lens` int32 [num_reqs]: the number of tokens of each request after the step.
    * `tables` int32 [any, any], each row contiguous: block tables, of which row `rows[i]` is for
      request i. Entries after the request's last block, and before the first block in the group's
      attention window, are undefined. The array belongs to the batch, and later steps change it.
    * `rows` int32 [num_reqs].

    The properties are computed at their first use.
    """

    num_decodes: int
    query_starts: Int32Array
    seq_lens: Int32Array
    rows: Int32Array
    tables: Int32Array
    block_size: int

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def only_decodes(self) -> bool:
        """Whether every request has one token."""
        return self.num_decodes == len(self.seq_lens)

    @cached_property
    def positions(self) -> Int64Array:
        """The position of each token in its request, [num_tokens]."""
        if self.only_decodes:
            return self.seq_lens.astype(np.int64) - 1
        counts = np.diff(self.query_starts)
        offsets = np.repeat(self.seq_lens - self.query_starts[1:], counts)
        return offsets + np.arange(len(offsets))

    @cached_property
    def token_rows(self) -> Int32Array:
        """The row of each token's request in `tables`, [num_tokens]."""
        if self.only_decodes:
            return self.rows
        return np.repeat(self.rows, np.diff(self.query_starts))

    @cached_property
    def block_tables(self) -> Int32Array:
        """The block tables of the step's requests, [num_reqs, blocks of the longest request]."""
        width = -(-int(self.seq_lens.max()) // self.block_size)
        return self.tables[self.rows, :width]

    @cached_property
    def slot_mapping(self) -> Int64Array:
        """The slot of each token's key and value: block id * block_size + index in the block."""
        blocks = self.tables[self.token_rows, self.positions // self.block_size]
        return blocks.astype(np.int64) * self.block_size + self.positions % self.block_size


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of a step's tokens: `cos` and `sin` [n, rotated / 2].

    Element i of a head is rotated with element i + rotated / 2. Elements with indexes from
    `rotated` on are unchanged. Source: Su et al., RoFormer. The halves are ordered as in Hugging
    Face checkpoints.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class LayerAttention(Protocol):
    """Attention of one step, called once for each layer."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """Rotates queries and keys, stores the step's keys and values of `layer`, and computes the
        attention of each token to itself and to earlier tokens of its request. Returns [n,
        num_heads * head_dim].

        `query` is [n, num_heads, head_dim], `key` and `value` are [n, num_kv_heads, head_dim], in
        the layout's order. Each head is contiguous. Queries and keys may be overwritten. n is at
        least the layout's number of tokens. Further rows are padding, and their outputs are finite.
        """


class PagedAttention(Protocol):
    """An attention implementation that owns the KV cache of all layers."""

    def begin_step(self, layouts: Sequence[StepLayout]) -> LayerAttention:
        """Prepares a step. The result is for all layers, and is valid until the next step begins.

        There is one layout for each KV-cache group. The layouts differ only in `tables` and
        `block_size`.
        """

    def zero_blocks(self, block_ids: Int32Array) -> None:
        """Clears blocks in all layers. Must be called before the step that uses them begins."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention parameters of one layer.

    Scores are multiplied by `scale`. With a `softcap` c, each score s is then replaced by c *
    tanh(s / c). A token attends to itself and to all earlier tokens. With a `window` w, it attends
    to itself and to the w - 1 tokens before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


def head_elements(layer: AttentionLayer, kv_cache_dtype: KVCacheDtype) -> int:
    """The number of page elements that a head's key occupies. A value occupies the same number."""
    has_codes = kv_cache_dtype is KVCacheDtype.INT8_PER_TOKEN_HEAD
    return bytes_of_head(layer.head_dim) if has_codes else layer.head_dim


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The state that one recurrent layer stores for a sequence in place of keys and values.
    `tensors` has the shape and data type of each tensor of the state.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of the model's attention and of its KV cache.

    A block belongs to the KV-cache group whose block table lists it. The i-th layers of all groups
    share their pages. All groups have pages of the same size, so pages of layers with fewer or
    smaller heads have more tokens. If there is only one group, its layers may differ in `window`,
    `num_kv_heads` or `head_dim`. If there are several groups, the layers of a group must be equal
    in these properties.
    """

    layers: tuple[AttentionLayer, ...]
    block_size: int
    num_blocks: int
    dtype: torch.dtype
    """Data type of queries, keys, values and outputs."""
    device: torch.device = CPU
    groups: tuple[tuple[int, ...], ...] = ()
    """The KV-cache groups, each with the indexes of its layers. Every layer is in one group. An
    empty tuple stands for one group of all layers.
    """
    states: tuple[StateLayer, ...] = ()
    """States of the recurrent layers, which are numbered separately from attention layers."""
    state_groups: tuple[tuple[int, ...], ...] = ()
    """KV-cache groups of recurrent layers, numbered after `groups`. A block of such a group stores
    one state of each of the group's layers.
    """
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    block_scales: tuple[int, ...] = ()
    """For each group, tokens in a block, divided by `block_size`. Empty if all are 1."""

    @property
    def has_codes(self) -> bool:
        """Whether keys and values are cached in 8 bits."""
        return self.kv_cache_dtype is KVCacheDtype.INT8_PER_TOKEN_HEAD

    @property
    def page_dtype(self) -> torch.dtype:
        return torch.int8 if self.has_codes else self.dtype

    def page_shape(self, layer: int) -> tuple[int, ...]:
        """Axes of a layer's pages: keys and values (2), blocks, tokens, heads, head elements."""
        own = self.layers[layer]
        head = head_elements(own, self.kv_cache_dtype)
        return 2, self.num_blocks, self.block_sizes[self.group_of[layer]], own.num_kv_heads, head

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """For each group of attention layers, the number of tokens in a block."""
        scales = self.block_scales or (1,) * len(self.layer_groups)
        return tuple(scale * self.block_size for scale in scales)

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """`groups`, or one group of all layers if `groups` is empty."""
        return self.groups or (tuple(range(len(self.layers))),)

    @property
    def group_of(self) -> tuple[int, ...]:
        groups = {layer: i for i, group in enumerate(self.layer_groups) for layer in group}
        return tuple(groups[layer] for layer in range(len(self.layers)))

    @property
    def pages_of(self) -> tuple[int, ...]:
        """For each layer, the index of its page in a block: the layer's index in its group."""
        pages = {layer: i for group in self.layer_groups for i, layer in enumerate(group)}
        return tuple(pages[layer] for layer in range(len(self.layers)))

    @property
    def page_layers(self) -> tuple[int, ...]:
        """For each page of a block, the layer of the largest group that uses the page."""
        return max(self.layer_groups, key=len)

    def layer_pages(self, pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each layer, a view of its pages with the shape `page_shape(layer)`. `pages` are the
        allocated pages, in the shapes of `page_layers`.
        """
        return [
            pages[page].view(self.page_shape(layer)) for layer, page in enumerate(self.pages_of)
        ]

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """For each page of a block, the bytes of its keys and values."""
        shape = replace(self, num_blocks=1)
        size = self.page_dtype.itemsize
        return tuple(size * math.prod(shape.page_shape(layer)) for layer in self.page_layers)

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """For each page of a block, the bytes of its largest state. Empty without states."""
        return tuple(
            max(self.states[layer].num_bytes for layer in layers if layer is not None)
            for layers in zip_longest(*self.state_groups)
        )

    @property
    def block_size_for_states(self) -> int:
        """The smallest multiple of `block_size` with which a block's keys and values need at least
        as many bytes as its states. Blocks of attention layers then have no unused bytes (as in
        vLLM).
        """
        per_size = sum(self.page_bytes)
        return self.block_size * max(1, -(-sum(self.state_bytes) // per_size))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of all pages of a block. A page stores keys and values or a state."""
        return sum(map(max, zip_longest(self.page_bytes, self.state_bytes, fillvalue=0)))
