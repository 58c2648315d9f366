"""Paged attention through xFormers, for CUDA.

Per layer the cache is one pool of keys and one of values, [num_blocks * block_size, num_kv_heads,
head_dim]; a slot of the layout is a row. New keys and values are written first, so that a call
reads all it needs through the block tables. Then, once for each kind of layer:

* Decodes are one call with one query a lane. Its shape is part of the kernel, so lanes are
  rounded up to a power of two with lanes of no keys, and tables are as wide as the longest
  sequence. The inputs of a call of one size lie in the same memory at every step: what was
  recorded once can run again with other lengths and tables.
* Chunks are cut into lanes of 16 queries (`sub_chunks`), one call for all of them; or, where
  FlashAttention 3 is present, a step with chunks is one call of that, decodes included.
* A sliding window is a range of keys per lane. In a lane of several queries the range is that of
  the last one; what earlier queries see besides is a second call with a lane for each, and the two
  are joined by their normalizers.

Split-K: Dao et al., "Flash-Decoding for long-context inference".
"""

import numpy as np
import torch

from services.worker.attention.interface import (
    AttentionLayer,
    AttentionShape,
    Int32Array,
    Rotation,
    StepLayout,
)
from services.worker.attention.rotary import rotate
from services.worker.attention.sub_chunks import bucket
from services.worker.attention.xformers_calls import Call, DecodeCall, LayerKind
from services.worker.attention.xformers_ops import FLASH_HEAD_DIMS, Operator, flash_operator
from services.worker.device import Device


class XformersPagedAttention:
    """The KV cache of all layers on a device, and attention over it.

    `split_k` None is xFormers' own operator, which runs on CUDA.
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: Device,
        max_blocks_per_seq: int,
        split_k: Operator | None = None,
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
            for layer in shape.layers
        ]
        self._kinds = [
            LayerKind(layer, shape.block_size, max_blocks_per_seq, device, split_k)
            for layer in dict.fromkeys(shape.layers)
        ]
        self._has_flash = flash_operator() is not None and all(
            layer.window is None and layer.head_dim in FLASH_HEAD_DIMS for layer in shape.layers
        )
        self._decodes: dict[int, DecodeStep] = {}

    def begin_step(self, layout: StepLayout) -> "XformersStep":
        """See PagedAttention."""
        num_tokens, num_decodes = len(layout.slot_mapping), layout.num_decodes
        has_chunks = num_decodes < len(layout.seq_lens)
        calls: list[dict[AttentionLayer, Call]] = []
        counts: list[int] = []
        if has_chunks and self._has_flash:
            counts = [num_tokens]
            calls = [{kind.layer: kind.flash(layout) for kind in self._kinds}]
        else:
            if num_decodes:
                decodes = self.decode_step(num_decodes)
                decodes.set_lanes(layout)
                counts.append(num_decodes)
                calls.append(dict(decodes.calls))
            if has_chunks:
                counts.append(num_tokens - num_decodes)
                calls.append({kind.layer: kind.chunks(layout) for kind in self._kinds})
        return XformersStep(self, self._device.upload(layout.slot_mapping), counts, calls)

    def zero_blocks(self, block_ids: Int32Array) -> None:
        """See PagedAttention."""
        cleared = self._device.upload(block_ids.astype(np.int64))
        for pool in self._pools:
            blocks = pool.view(2, self._shape.num_blocks, self._shape.block_size, *pool.shape[2:])
            blocks.index_fill_(1, cleared, 0)

    def decode_step(self, num_decodes: int) -> "DecodeStep":
        """A step for so many decodes or fewer, rounded up; the same object each time."""
        num_lanes = bucket(num_decodes)
        if num_lanes not in self._decodes:
            calls = {kind.layer: kind.decodes(num_lanes) for kind in self._kinds}
            self._decodes[num_lanes] = DecodeStep(self, self._device, num_lanes, calls)
        return self._decodes[num_lanes]

    def layer(self, index: int) -> AttentionLayer:
        """What attention does in a layer."""
        return self._shape.layers[index]

    def store(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [n, num_kv_heads, head_dim] to cache slots [n]; the pools."""
        keys, values = self._pools[layer].unbind(0)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values


class XformersStep:
    """One step over an XformersPagedAttention: calls over `counts` tokens each, in their order."""

    def __init__(
        self,
        cache: XformersPagedAttention,
        slots: torch.Tensor,
        counts: list[int],
        calls: list[dict[AttentionLayer, Call]],
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._counts = counts
        self._calls = calls

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """See LayerAttention."""
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        num_tokens, kind = len(self._slots), self._cache.layer(layer)
        pools = self._cache.store(layer, self._slots, key[:num_tokens], value[:num_tokens])
        parts, first = [], 0
        for count, calls in zip(self._counts, self._calls, strict=True):
            parts.append(calls[kind](query[first : first + count], *pools))
            first += count
        if len(query) > num_tokens:
            parts.append(torch.zeros_like(query[num_tokens:]))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


class DecodeStep:
    """A step of `num_lanes` decodes whose inputs lie in memory that stays the same.

    `set` replaces them; a call reads them, and so does one that was recorded. Lanes without a
    request write to slot 0, which belongs to nobody.
    """

    def __init__(
        self,
        cache: XformersPagedAttention,
        device: Device,
        num_lanes: int,
        calls: dict[AttentionLayer, DecodeCall],
    ) -> None:
        self.num_lanes = num_lanes
        self.calls = calls
        self._device = device
        self._slots = torch.zeros(num_lanes, dtype=torch.int64, device=device.torch_device)
        self._step = XformersStep(cache, self._slots, [num_lanes], [dict(calls)])

    def set(self, layout: StepLayout) -> None:
        """Takes over a layout of decodes alone, `num_lanes` at most."""
        self.set_lanes(layout)
        num_decodes = layout.num_decodes
        self._slots[num_decodes:].zero_()
        slots = self._device.upload(layout.slot_mapping)
        self._slots[:num_decodes].copy_(slots, non_blocking=True)

    def set_lanes(self, layout: StepLayout) -> None:
        """Takes over the lengths and tables of a layout's decodes; its slots stay apart."""
        num_decodes = layout.num_decodes
        for call in self.calls.values():
            call.set(layout.seq_lens[:num_decodes], layout.block_tables[:num_decodes])

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """See LayerAttention; for `num_lanes` tokens."""
        return self._step(layer, query, key, value, rotation)
