"""A decoder as one call into the compiled library: see cpp/decoder.h."""

import ctypes
from collections.abc import Mapping
from typing import TypeGuard

import numpy as np
import torch

from services.worker.backends.attention import LayerAttention
from services.worker.backends.kernels import DecoderConstants, DecoderWeights, GatedMlp, Linear
from services.worker.backends.lora import LoraStep
from services.worker.backends.native import library
from services.worker.backends.native.linear import NativeLinear
from services.worker.backends.native.lora import NativeLoraStep
from services.worker.backends.native.paged_attention import NativePagedStep
from services.worker.backends.native.shared_ranks import NativeRanks
from services.worker.backends.ranks import Ranks


def fused_decoder(
    functions: Mapping[torch.dtype, library.Functions],
    weights: DecoderWeights,
    constants: DecoderConstants,
) -> "NativeDecoder | None":
    """Returns the decoder as one operation, or None if an MLP has experts, a projection is not
    native, or ranks do not share memory. `functions` maps data types of the computation to the
    library's functions.
    """
    head = weights.head
    if not (weights.ranks.size == 1 or isinstance(weights.ranks, NativeRanks)):
        return None
    if head is not None and not _takes_rows(head):
        return None
    for layer in weights.layers:
        if not isinstance(layer.mlp, GatedMlp):
            return None
        projections = layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down
        if not all(map(_takes_rows, projections)):
            return None
    return NativeDecoder(functions[weights.embedding.dtype], weights, constants, head)


def _takes_rows(projection: Linear) -> TypeGuard[NativeLinear]:
    """Whether the projection is native, and its inputs need no padding."""
    return isinstance(projection, NativeLinear) and not projection.is_padded


class NativeDecoder:
    """A FusedDecoder in the compiled library."""

    def __init__(
        self,
        functions: library.Functions,
        weights: DecoderWeights,
        constants: DecoderConstants,
        head: NativeLinear | None,
    ) -> None:
        self._functions = functions
        self._owners = weights, constants
        """Keeps alive the memory to which the structures point."""
        self._embedding = weights.embedding.contiguous()
        self._width = weights.embedding.shape[1]
        self._vocab_size = 0 if head is None else head.out_features * weights.head_ranks.size
        self._ranks = weights.ranks
        self._layers = (library.DecoderLayer * len(weights.layers))()
        layers = zip(self._layers, weights.layers, constants.rotation_of, strict=True)
        for target, layer, rotation in layers:
            library.set_weights(target, layer)
            target.rotation = rotation
        addresses = ((each.cos.data_ptr(), each.sin.data_ptr()) for each in constants.rotations)
        rotations = [library.Rotation(*pair) for pair in addresses]
        self._rotations = (library.Rotation * len(rotations))(*rotations)
        self._decoder = library.Decoder(
            *(self._embedding.data_ptr(), constants.embedding_scale),
            *(self._rotations, len(rotations), constants.rotations[0].cos.shape[-1]),
            *(self._layers, len(self._layers)),
            _address(weights.norm),
            library.Projection() if head is None else head.projection,
            *(self._width, constants.epsilon),
            *(_reference(weights.ranks), _reference(weights.head_ranks)),
        )
        self._dtype = weights.embedding.dtype
        self._cache: object = None
        """The attention layers whose pages the structures' addresses refer to."""

    def accepts(self, attention: LayerAttention) -> bool:
        return isinstance(attention, NativePagedStep)

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: LayerAttention,
        embedded: torch.Tensor | None,
        wanted: torch.Tensor | None,
        lora: LoraStep | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert isinstance(attention, NativePagedStep)
        self._use_pages(attention)
        rows, decoder = token_ids.numel(), self._decoder
        hidden = _empty(rows, self._width, self._dtype)
        count = rows if wanted is None else len(wanted)
        if not self._vocab_size:
            count = 0
        shape = count, self._vocab_size
        logits = torch.from_numpy(np.empty(shape, np.float32)) if count else None
        self._functions.run_decoder(
            *(decoder, attention.layouts, token_ids.data_ptr(), _address(embedded)),
            *(hidden.data_ptr(), _address(wanted), count, _address(logits)),
            lora.structure if isinstance(lora, NativeLoraStep) else None,
        )
        if isinstance(self._ranks, NativeRanks):
            self._ranks.check()
        return hidden, logits

    def _use_pages(self, attention: NativePagedStep) -> None:
        if self._cache is attention.layers:
            return
        for target, source in zip(self._layers, attention.layers, strict=True):
            target.attention, target.pages = source.layer, source.pages
            target.group = source.group
        self._cache = attention.layers


def _empty(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocates with NumPy, because torch would release the interpreter's lock before the step."""
    return torch.from_numpy(np.empty((rows, width * dtype.itemsize), np.uint8)).view(dtype)


def _reference(ranks: Ranks) -> int | None:
    return ctypes.addressof(ranks.structure) if isinstance(ranks, NativeRanks) else None


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
