"""Paged attention through xFormers, for CUDA.

For each layer of a KV-cache group the cache has one pool of keys and one of values, [num_blocks *
block_size, num_kv_heads, head_dim], with a row for each slot. New keys and values are written
first, so that an attention call reads all keys through the block tables. A call computes lanes: one
or more queries of a request, over one range of the request's keys. The calls of a step are built
once for all layers of a group with equal attention parameters:

* Decodes are one call with one query in each lane. The kernel is compiled for the call's shape.
  Therefore lanes without keys are appended until the number of lanes is a power of two, and block
  tables are as wide as for the longest sequence. Calls of the same size have their inputs at the
  same addresses in every step, so that a recorded call can be replayed with other lengths and
  tables.
* Chunks are cut into lanes of 16 queries (`sub_chunks`), in one call. If FlashAttention 3 can be
  used, it computes them in one call without cutting.
* With a sliding window, the range of a lane is the window of the lane's last query. Earlier queries
  of the lane also attend to some keys before this range. A second call computes attention to these
  keys, with a lane for each query. The two results are combined by their normalizers.

Split-K: Dao et al., "Flash-Decoding for long-context inference".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.backends import attention
from services.worker.backends.arrays import Int32Array
from services.worker.backends.cuda.sub_chunks import bucket
from services.worker.backends.cuda.xformers_calls import Call, DecodeCall, LayerKind
from services.worker.backends.cuda.xformers_ops import (
    FLASH_HEAD_DIMS,
    Operator,
    PagedOps,
    has_flash,
)
from services.worker.backends.device import Device
from services.worker.backends.torch.attend import rotate


class XformersPagedAttention:
    """A PagedAttention whose KV cache is on a GPU. `split_k` is the attention operator, or None for
    xFormers' own (see PagedOps). For `batch_invariant` see LayerKind.
    """

    def __init__(
        self,
        shape: attention.AttentionShape,
        device: Device,
        max_blocks_per_seq: int,
        split_k: Operator | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._shape = shape
        self._device = device
        rows = shape.num_blocks * shape.block_size
        self._pools = [
            torch.zeros(
                (2, rows, layer.num_kv_heads, layer.head_dim),
                dtype=shape.dtype,
                device=device.torch_device,
            )
            for layer in (shape.layers[index] for index in shape.page_layers)
        ]
        self._pages_of = shape.pages_of
        self.call_keys = [
            CallKey(group, layer) for group, layer in zip(shape.group_of, shape.layers, strict=True)
        ]
        """For each layer, the key of its calls in XformersStep's `parts`."""
        self._kinds = {
            key: LayerKind(
                PagedOps(key.layer, shape.block_size, split_k),
                max_blocks_per_seq,
                device,
                batch_invariant,
            )
            for key in self.call_keys
        }
        self._has_flash = (
            not batch_invariant
            and has_flash()
            and all(
                layer.window is None and layer.head_dim in FLASH_HEAD_DIMS for layer in shape.layers
            )
        )
        self._decodes: dict[int, DecodeStep] = {}

    def begin_step(self, layouts: Sequence[attention.StepLayout]) -> "XformersStep":
        num_tokens, num_decodes = layouts[0].num_tokens, layouts[0].num_decodes
        parts: list[tuple[int, Mapping[CallKey, Call]]] = []
        if num_decodes:
            decodes = self.decode_step(num_decodes)
            decodes.set_lanes(layouts)
            parts.append((num_decodes, decodes.decodes))
        if num_decodes < len(layouts[0].seq_lens):
            calls = {
                at: kind.chunks(layouts[at.group], flash=self._has_flash)
                for at, kind in self._kinds.items()
            }
            parts.append((num_tokens - num_decodes, calls))
        slots = [self._device.upload(layout.slot_mapping) for layout in layouts]
        return XformersStep(self, slots, parts)

    def zero_blocks(self, block_ids: Int32Array) -> None:
        cleared = self._device.upload(block_ids.astype(np.int64))
        for pool in self._pools:
            blocks = pool.view(2, self._shape.num_blocks, self._shape.block_size, *pool.shape[2:])
            blocks.index_fill_(1, cleared, 0)

    def decode_step(self, num_decodes: int) -> "DecodeStep":
        """Returns a step for `num_decodes` or more. There is one object for each power of two."""
        num_lanes = bucket(num_decodes)
        if num_lanes not in self._decodes:
            calls = {at: kind.decodes(num_lanes) for at, kind in self._kinds.items()}
            num_groups = len(self._shape.layer_groups)
            self._decodes[num_lanes] = DecodeStep(self, self._device, num_lanes, num_groups, calls)
        return self._decodes[num_lanes]

    def store(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [n, num_kv_heads, head_dim] to slots [n]. Returns both pools."""
        keys, values = self.pools(layer)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._pools[self._pages_of[layer]].unbind(0)
        return keys, values


@dataclass(frozen=True, slots=True)
class CallKey:
    """Identifies layers of one group with equal attention parameters, which share their calls."""

    group: int
    layer: attention.AttentionLayer


@dataclass(slots=True)
class XformersStep:
    """The attention of a step. It has up to two `parts`: the decodes, then the chunks. A part is a
    number of tokens and the calls for them, by CallKey. `slots`: for each KV-cache group, the slots
    of the step's tokens.
    """

    cache: XformersPagedAttention
    slots: list[torch.Tensor]
    parts: Sequence[tuple[int, Mapping[CallKey, Call]]]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: attention.Rotation | None,
    ) -> torch.Tensor:
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        call_key = self.cache.call_keys[layer]
        slots = self.slots[call_key.group]
        num_tokens = len(slots)
        pools = self.cache.store(layer, slots, key[:num_tokens], value[:num_tokens])
        outputs, first = [], 0
        for count, calls in self.parts:
            outputs.append(calls[call_key](query[first : first + count], *pools))
            first += count
        if len(query) > num_tokens:
            outputs.append(torch.zeros_like(query[num_tokens:]))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)


class DecodeStep(XformersStep):
    """A step of `num_lanes` decodes whose inputs are at the same addresses in every step. Lanes
    without a request write to slot 0, which is in the null block.
    """

    def __init__(
        self,
        cache: XformersPagedAttention,
        device: Device,
        num_lanes: int,
        num_groups: int,
        decodes: dict[CallKey, DecodeCall],
    ) -> None:
        self.num_lanes = num_lanes
        self.decodes = decodes
        self._device = device
        slots = [
            torch.zeros(num_lanes, dtype=torch.int64, device=device.torch_device)
            for _ in range(num_groups)
        ]
        super().__init__(cache, slots, [(num_lanes, decodes)])

    def set(self, layouts: Sequence[attention.StepLayout]) -> None:
        """Replaces the inputs by layouts of at most `num_lanes` decodes and no chunks."""
        self.set_lanes(layouts)
        for own, layout in zip(self.slots, layouts, strict=True):
            own[layout.num_decodes :].zero_()
            slots = self._device.upload(layout.slot_mapping)
            own[: layout.num_decodes].copy_(slots, non_blocking=True)

    def set_lanes(self, layouts: Sequence[attention.StepLayout]) -> None:
        """Sets the lengths and block tables of the layouts' decodes, but not their slots."""
        num_decodes = layouts[0].num_decodes
        for at, call in self.decodes.items():
            layout = layouts[at.group]
            call.set(layout.seq_lens[:num_decodes], layout.block_tables[:num_decodes])
