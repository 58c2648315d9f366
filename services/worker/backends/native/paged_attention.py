"""Paged attention in C++: see cpp/attention.h.

For each layer of a KV-cache group there are pages of keys and of values, each with block_size *
num_kv_heads heads. See cpp/key_block.h for the order of elements, and cpp/codes.h for keys and
values in 8 bits. A step's layouts are passed unchanged, and every layer is one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.backends.arrays import Int32Array
from services.worker.backends.attention import AttentionLayer, AttentionShape, Rotation, StepLayout
from services.worker.backends.native import library
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.library import address

_BYTES_PER_THREAD = 2**22
"""Upper bound of a thread's scratch memory, in bytes."""

_PART_KEYS = 512
_MOST_ROWS = 128
"""Upper bound of TASK_ROWS in cpp/attention_plan.h. _PART_KEYS is PART_KEYS in that file."""


def has_whole_cells(shape: AttentionShape) -> bool:
    """Whether heads divide into the elements that panels of keys store side by side. In bfloat16,
    keys of odd size do not.
    """
    size = library.PAIRS[shape.dtype]
    return shape.has_codes or not any(layer.head_dim % size for layer in shape.layers)


def workspace_bytes(shape: AttentionShape, max_model_len: int) -> int:
    """Upper estimate of the bytes that attention needs in addition to the KV cache: the threads'
    scratch memory, and partial sums of sequences that are divided among threads. There are fewer
    than two such sequences for each thread.
    """
    threads = torch.get_num_threads()
    widest = max(layer.head_dim for layer in shape.layers)
    parts = 1 + max_model_len // _PART_KEYS
    row_bytes = 4 * (widest + 64)
    return threads * (_BYTES_PER_THREAD + 2 * parts * _MOST_ROWS * row_bytes)


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """A layer's attention parameters and pages, and the index of its KV-cache group."""

    layer: library.AttentionLayer
    pages: library.Pages
    group: int


class NativePagedAttention:
    def __init__(
        self, functions: library.Functions, memory: LargePages, shape: AttentionShape
    ) -> None:
        self._functions = functions
        self.pages = [
            memory.take(shape.page_shape(layer), shape.page_dtype) for layer in shape.page_layers
        ]
        """Keys and values, see PagesOfKeys."""
        cache_format = library.CACHE_FORMATS[shape.kv_cache_dtype]
        self._layers = []
        layers = zip(shape.layers, shape.layer_pages(self.pages), shape.group_of, strict=True)
        for layer, (keys, values), group in layers:
            where = keys.data_ptr(), values.data_ptr()
            pages = library.Pages(*where, shape.block_sizes[group], cache_format)
            self._layers.append(NativeLayer(_native(layer), pages, group))

    def begin_step(self, layouts: Sequence[StepLayout]) -> "NativePagedStep":
        return NativePagedStep(self._functions.attend, self._layers, layouts)

    def zero_blocks(self, block_ids: Int32Array) -> None:
        cleared = torch.from_numpy(block_ids.astype(np.int64))
        for pages in self.pages:
            pages.index_fill_(1, cleared, 0)


class NativePagedStep:
    def __init__(
        self, attend: Any, layers: Sequence[NativeLayer], layouts: Sequence[StepLayout]
    ) -> None:
        self._attend = attend
        self.layers = layers
        self._num_tokens = layouts[0].num_tokens
        self._arrays = layouts
        self.layouts = (library.Layout * len(layouts))(
            *(
                library.Layout(
                    *(len(layout.seq_lens), address(layout.query_starts)),
                    *(address(layout.seq_lens), address(layout.rows), address(layout.tables)),
                    layout.tables.strides[0] // layout.tables.itemsize,
                )
                for layout in layouts
            )
        )

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype)
        output[self._num_tokens :].zero_()
        heads = library.Heads(
            *(query.data_ptr(), key.data_ptr(), value.data_ptr()),
            *(query.stride(0), key.stride(0), value.stride(0)),
        )
        if rotation is not None:
            heads.cos, heads.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
            heads.half = rotation.cos.shape[-1]
        own = self.layers[layer]
        self._attend(own.layer, self.layouts[own.group], heads, own.pages, output.data_ptr())
        return output.flatten(1)


def _native(layer: AttentionLayer) -> library.AttentionLayer:
    heads = layer.num_heads, layer.num_kv_heads, layer.head_dim
    return library.AttentionLayer(*heads, layer.scale, layer.window or 0, layer.softcap or 0)
