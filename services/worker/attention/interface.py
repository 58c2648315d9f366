"""The interface between a model's layers and the paged KV cache.

A step is laid out once, before its first layer; each layer then hands in its queries, keys and
values and gets the attention's output. The shape of the cache, how it is written and how it is
read belong to the implementation.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which tokens a step computes, and where their keys and values lie.

    Tokens of a request are consecutive. Requests with one token come first, in rising order of
    `seq_lens`; `num_decodes` counts them. Chunks of more tokens follow.

    * `query_starts` int32 [num_reqs + 1]: first token of each request, then the number of tokens.
    * `seq_lens` int32 [num_reqs]: tokens each request has once the step is done.
    * `block_tables` int32 [num_reqs, width]: block ids; beyond a request's last block, anything.
    * `slot_mapping` int64 [num_tokens]: where each token's key and value go,
      block id * block_size + offset in the block.
    """

    num_decodes: int
    query_starts: Int32Array
    seq_lens: Int32Array
    block_tables: Int32Array
    slot_mapping: Int64Array


class LayerAttention(Protocol):
    """Attention of one step, for every layer in turn."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Stores the step's keys and values of `layer`, then attends, each token to itself and
        everything before it.

        `query` [num_tokens, num_heads, head_dim], `key` and `value` [num_tokens, num_kv_heads,
        head_dim], in the layout's order; returns [num_tokens, num_heads * head_dim].
        """
        ...


class PagedAttention(Protocol):
    """An attention implementation that owns the KV cache of all layers."""

    def begin_step(self, layout: StepLayout) -> LayerAttention:
        """Prepares a step; what is built here is shared by its layers and valid until the next."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an implementation needs to know of the model and the cache."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: torch.dtype
