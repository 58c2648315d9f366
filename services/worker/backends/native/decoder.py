"""A decoder as one call into the compiled library: see cpp/decoder.cpp."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from services.worker.backends.attention import LayerAttention
from services.worker.backends.kernels import DecoderBlock, DecoderFrame
from services.worker.backends.native.library import Decoder, DecoderLayer, Functions, Rotation
from services.worker.backends.native.linear import NativeLinear
from services.worker.backends.native.paged_attention import NativePagedStep


def stack_of(
    functions: Mapping[torch.dtype, Functions],
    blocks: Sequence[DecoderBlock],
    frame: DecoderFrame,
) -> "NativeStack | None":
    """The decoder as one; None where a projection of it is not native.

    `functions`: by the data type of what they compute.
    """
    for block in blocks:
        projections = (block.qkv, block.output, block.gate_up, block.down)
        if not all(isinstance(projection, NativeLinear) for projection in projections):
            return None
    head = frame.head
    if not isinstance(head, NativeLinear):
        return None
    return NativeStack(functions[head.dtype], blocks, frame, head)


class NativeStack:
    """See Stack. Scratch is kept between calls, and grows with the largest step."""

    def __init__(
        self,
        functions: Functions,
        blocks: Sequence[DecoderBlock],
        frame: DecoderFrame,
        head: NativeLinear,
    ) -> None:
        self._functions = functions
        self._blocks = blocks
        self._frame = frame
        self._embedding = frame.embedding.contiguous()
        self._width, self._vocab_size = len(frame.norm), head.out_features
        self._layers = (DecoderLayer * len(blocks))(*(_layer(block) for block in blocks))
        rotations = [Rotation(r.cos.data_ptr(), r.sin.data_ptr()) for r in frame.rotations]
        self._rotations = (Rotation * len(rotations))(*rotations)
        self._decoder = Decoder(
            *(self._embedding.data_ptr(), frame.embedding_scale),
            *(self._rotations, len(rotations), frame.rotations[0].cos.shape[-1]),
            *(self._layers, len(blocks)),
            *(frame.norm.data_ptr(), head.projection, self._width, frame.epsilon),
        )
        self._scratch = torch.empty(0, dtype=head.dtype)
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
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See Stack."""
        assert isinstance(attention, NativePagedStep)
        self._open(attention)
        rows, decoder = len(token_ids), self._decoder
        needed = self._functions.decoder_scratch(decoder, rows, torch.get_num_threads())
        if len(self._scratch) < needed:
            self._scratch = self._scratch.new_empty(needed)
        hidden = _empty(rows, self._width, self._scratch.dtype)
        count = rows if wanted is None else len(wanted)
        logits = _empty(count, self._vocab_size, torch.float32) if count else None
        self._functions.run_decoder(
            *(decoder, attention.layouts, token_ids.data_ptr(), _address(embedded)),
            *(hidden.data_ptr(), _address(wanted), count, _address(logits)),
            self._scratch.data_ptr(),
        )
        return hidden, logits

    def _open(self, attention: NativePagedStep) -> None:
        """Takes over how the layers attend, and where their pages are."""
        if self._cache is attention.layers:
            return
        for target, source in zip(self._layers, attention.layers, strict=True):
            target.attention, target.pages = source.layer, source.pages
            target.group = source.group
        self._cache = attention.layers


def _empty(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Not by torch, which lets go of the interpreter's lock: an event loop that waits for it would
    have its turn before the step, not beside it.
    """
    return torch.from_numpy(np.empty((rows, width * dtype.itemsize), np.uint8)).view(dtype)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer(block: DecoderBlock) -> DecoderLayer:
    layer = DecoderLayer(rotation=block.rotation)
    for name in ("input_norm", "query_norm", "key_norm", "mlp_norm"):
        setattr(layer, name, _address(getattr(block, name)))
    layer.attention_output_norm = _address(block.attention_output_norm)
    layer.mlp_output_norm = _address(block.mlp_output_norm)
    for name in ("qkv", "output", "gate_up", "down"):
        setattr(layer, name, getattr(block, name).projection)
    return layer
