"""A decoder as one call into the compiled library: see cpp/decoder.cpp."""

from collections.abc import Mapping, Sequence

import torch

from services.worker.attention.interface import LayerAttention
from services.worker.attention.native_paged import NativePagedStep
from services.worker.kernels.interface import DecoderBlock, DecoderFrame
from services.worker.kernels.native import Decoder, DecoderLayer, Functions, Rotation
from services.worker.kernels.native_linear import NativeLinear


def stack_of(
    functions: Mapping[torch.dtype, Functions],
    blocks: Sequence[DecoderBlock],
    frame: DecoderFrame,
) -> "NativeStack | None":
    """The decoder as one; None where a layer of it has a projection that is not native.

    `functions`: by the data type of what they compute.
    """
    for block in blocks:
        projections = (block.qkv, block.output, block.gate_up, block.down)
        if not all(isinstance(projection, NativeLinear) for projection in projections):
            return None
    first = blocks[0].qkv
    assert isinstance(first, NativeLinear)
    return NativeStack(functions[first.dtype], first.dtype, blocks, frame)


class NativeStack:
    """See Stack. Scratch is kept between calls, and grows with the largest step."""

    def __init__(
        self,
        functions: Functions,
        dtype: torch.dtype,
        blocks: Sequence[DecoderBlock],
        frame: DecoderFrame,
    ) -> None:
        self._functions = functions
        self._blocks = blocks
        self._frame = frame
        self._embedding = frame.embedding.contiguous()
        self._width = len(frame.norm)
        self._layers = (DecoderLayer * len(blocks))(*(_layer(block) for block in blocks))
        rotations = [Rotation(r.cos.data_ptr(), r.sin.data_ptr()) for r in frame.rotations]
        self._rotations = (Rotation * len(rotations))(*rotations)
        self._decoder = Decoder(
            *(self._embedding.data_ptr(), frame.embedding_scale),
            *(self._rotations, len(rotations), frame.rotations[0].cos.shape[-1]),
            *(self._layers, len(blocks)),
            *(frame.norm.data_ptr(), self._width, frame.epsilon),
        )
        self._scratch = torch.empty(0, dtype=dtype)
        self._cache: object = None
        """What the layers' pages were taken from."""

    def takes(self, attention: LayerAttention) -> bool:
        """See Stack."""
        return isinstance(attention, NativePagedStep)

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: LayerAttention,
        embedded: torch.Tensor | None,
    ) -> torch.Tensor:
        """See Stack."""
        assert isinstance(attention, NativePagedStep)
        self._open(attention)
        rows, decoder = len(token_ids), self._decoder
        needed = self._functions.decoder_scratch(decoder, rows, torch.get_num_threads())
        if len(self._scratch) < needed:
            self._scratch = self._scratch.new_empty(needed)
        output = self._scratch.new_empty(rows, self._width)
        self._functions.run_decoder(
            *(decoder, attention.layouts, token_ids.data_ptr()),
            None if embedded is None else embedded.data_ptr(),
            *(output.data_ptr(), self._scratch.data_ptr()),
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
