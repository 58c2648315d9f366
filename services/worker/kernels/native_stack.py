"""All layers of a decoder as one call into the compiled library: see cpp/decoder.cpp."""

from collections.abc import Mapping, Sequence

import torch

from services.worker.attention.interface import LayerAttention
from services.worker.attention.interface import Rotation as StepRotation
from services.worker.attention.native_paged import NativePagedStep
from services.worker.kernels.interface import DecoderBlock
from services.worker.kernels.native import Decoder, DecoderLayer, Functions, Layout, Rotation
from services.worker.kernels.native_linear import NativeLinear


def stack_of(
    functions: Mapping[torch.dtype, Functions],
    blocks: Sequence[DecoderBlock],
    norm: torch.Tensor,
    epsilon: float,
) -> "NativeStack | None":
    """The layers as one; None where one of them has a projection that is not native.

    `functions`: by the data type of what they compute.
    """
    for block in blocks:
        projections = (block.qkv, block.output, block.gate_up, block.down)
        if not all(isinstance(projection, NativeLinear) for projection in projections):
            return None
    first = blocks[0].qkv
    assert isinstance(first, NativeLinear)
    return NativeStack(functions[first.dtype], first.dtype, blocks, norm, epsilon)


class NativeStack:
    """See Stack. Scratch is kept between calls, and grows with the largest step."""

    def __init__(
        self,
        functions: Functions,
        dtype: torch.dtype,
        blocks: Sequence[DecoderBlock],
        norm: torch.Tensor,
        epsilon: float,
    ) -> None:
        self._functions = functions
        self._blocks = blocks
        self._norm = norm
        self._layers = (DecoderLayer * len(blocks))(*(_layer(block) for block in blocks))
        self._decoder = Decoder(self._layers, len(blocks), norm.data_ptr(), len(norm), epsilon)
        self._scratch = torch.empty(0, dtype=dtype)
        self._cache: object = None
        """What the layers' pages were taken from."""

    def takes(self, attention: LayerAttention) -> bool:
        """See Stack."""
        return isinstance(attention, NativePagedStep)

    def __call__(
        self,
        residual: torch.Tensor,
        rotations: Sequence[StepRotation],
        attention: LayerAttention,
    ) -> torch.Tensor:
        """See Stack."""
        assert isinstance(attention, NativePagedStep)
        self._open(attention)
        rows, decoder = len(residual), self._decoder
        decoder.half = rotations[0].cos.shape[-1]
        needed = self._functions.decoder_scratch(decoder, rows, torch.get_num_threads())
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=residual.dtype)
        output = torch.empty_like(residual)
        layouts = (Layout * len(attention.layouts))(*attention.layouts)
        angles = (Rotation * len(rotations))(
            *(Rotation(rotation.cos.data_ptr(), rotation.sin.data_ptr()) for rotation in rotations)
        )
        self._functions.run_decoder(
            *(decoder, layouts, angles),
            *(residual.data_ptr(), output.data_ptr(), self._scratch.data_ptr(), rows),
        )
        return output

    def _open(self, attention: NativePagedStep) -> None:
        """Takes over how the layers attend, and where their pages are."""
        if self._cache is attention.layers:
            return
        for target, source in zip(self._layers, attention.layers, strict=True):
            target.attention, target.pages = source.layer, source.pages
            target.group = source.group
        self._cache = attention.layers


def _layer(block: DecoderBlock) -> DecoderLayer:
    def address(norm: torch.Tensor | None) -> int | None:
        return None if norm is None else norm.data_ptr()

    layer = DecoderLayer(rotation=block.rotation)
    for name in ("input_norm", "query_norm", "key_norm", "mlp_norm"):
        setattr(layer, name, address(getattr(block, name)))
    layer.attention_output_norm = address(block.attention_output_norm)
    layer.mlp_output_norm = address(block.mlp_output_norm)
    for name in ("qkv", "output", "gate_up", "down"):
        setattr(layer, name, getattr(block, name).projection)
    return layer
