"""Quantized weights in the blocks of GGUF: https://github.com/ggml-org/ggml, docs/gguf.md.

A row consists of consecutive blocks. In Q4_0 and Q8_0, a block of 32 numbers has one scale. In Q4_K
and Q6_K, a block of 256 numbers is divided into groups. Each group has a scale, and the block has a
scale for the scales of its groups. Q4_K has eight groups of unsigned codes, with a minimum for each
group. Q6_K has sixteen groups of codes around 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.backends.quantized import QuantizedWeight
from services.worker.models.suitability.gguf_tensors import BLOCK_SIZES

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """n blocks: codes [n, numbers in a block], scales and offsets [n, groups in a block]."""

    codes: npt.NDArray[np.int8]
    scales: Floats
    offsets: Floats | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type: a block has `size` numbers in `num_bytes` bytes."""

    size: int
    num_bytes: int
    bits: int
    read: Callable[[Bytes], _Numbers]


def _q4_0(blocks: Bytes) -> _Numbers:
    codes = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), axis=1)
    return _Numbers(codes.astype(np.int8) - 8, _halves(blocks[:, :2]))


def _q8_0(blocks: Bytes) -> _Numbers:
    return _Numbers(blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]))


def _q4_k(blocks: Bytes) -> _Numbers:
    """Each group's scale and minimum have six bits. Those of the first four groups are the low six
    bits of bytes 4 to 11. Those of the last four groups have their low four bits in bytes 12 to 15,
    and their high two bits in the remaining bits of bytes 4 to 11.
    """
    scale, least = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    first, second, rest = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate((first & 63, rest & 15 | first >> 6 << 4), axis=1)
    leasts = np.concatenate((second & 63, rest >> 4 | second >> 6 << 4), axis=1)
    bytes_of_pairs = blocks[:, 16:].reshape(len(blocks), 4, 1, 32)
    codes = np.concatenate((bytes_of_pairs & 15, bytes_of_pairs >> 4), axis=2)
    of_groups = scale * scales
    signed = codes.reshape(len(blocks), 256).astype(np.int8) - 8
    return _Numbers(signed, of_groups, 8 * of_groups - least * leasts)


def _q6_k(blocks: Bytes) -> _Numbers:
    """Each half of a block has 128 codes: low four bits in 64 bytes, high two bits in 32."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    lows = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    highs = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (lows | highs << 4).astype(np.int8) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _Numbers(codes.reshape(len(blocks), 256), _halves(blocks[:, 208:]) * scales)


def _halves(two_bytes: Bytes) -> Floats:
    """Float16 values [n, 1], as float32."""
    return np.ascontiguousarray(two_bytes).view(np.float16).astype(np.float32)


BLOCK_TYPES = {
    "Q4_0": BlockType(*BLOCK_SIZES["Q4_0"], 4, _q4_0),
    "Q8_0": BlockType(*BLOCK_SIZES["Q8_0"], 8, _q8_0),
    "Q4_K": BlockType(*BLOCK_SIZES["Q4_K"], 4, _q4_k),
    "Q6_K": BlockType(*BLOCK_SIZES["Q6_K"], 8, _q6_k),
}
"""Block types by name. A QuantizedWeight stores the 6-bit codes of Q6_K in 8 bits."""


def read_blocks(name: str, rows: Bytes, dtype: torch.dtype) -> QuantizedWeight:
    """Decodes rows of blocks of type `name`, uint8 [out, bytes], for computations in `dtype`."""
    kind = BLOCK_TYPES[name]
    numbers = kind.read(np.ascontiguousarray(rows).reshape(-1, kind.num_bytes))

    def by_row(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).reshape(len(rows), -1))

    offsets = None if numbers.offsets is None else by_row(numbers.offsets)
    return QuantizedWeight(by_row(numbers.codes), by_row(numbers.scales), offsets, kind.bits, dtype)
