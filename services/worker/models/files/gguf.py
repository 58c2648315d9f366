"""Reads tensors of a GGUF file. Format: https://github.com/ggml-org/ggml, docs/gguf.md.

A row of a quantized weight consists of consecutive blocks. In Q4_0 and Q8_0, a block of 32 numbers
has one scale. In Q4_K and Q6_K, a block of 256 numbers is divided into groups. Each group has a
scale, and these scales are multiplied by a scale of the block. Q4_K has eight groups of unsigned
codes, with a minimum for each group. Q6_K has sixteen groups of codes around 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.backends.arrays import Float32Array, UInt8Array
from services.worker.backends.quantized import QuantizedWeight
from services.worker.models.files.gguf_tensors import BLOCK_SIZES, read_gguf_tensors


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers of n blocks: codes [n, block size], scales and offsets [n, groups in a block]."""

    codes: npt.NDArray[np.int8]
    scales: Float32Array
    offsets: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of block, with `size` numbers in `num_bytes` bytes."""

    size: int
    num_bytes: int
    bits: int
    read: Callable[[UInt8Array], _Numbers]


def _q4_0(blocks: UInt8Array) -> _Numbers:
    codes = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), axis=1)
    return _Numbers(codes.astype(np.int8) - 8, _halves(blocks[:, :2]))


def _q8_0(blocks: UInt8Array) -> _Numbers:
    return _Numbers(blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]))


def _q4_k(blocks: UInt8Array) -> _Numbers:
    """Each group's scale and minimum have six bits. For the first four groups, these are the low
    six bits of bytes 4 to 11. For the last four groups, the low four bits are in bytes 12 to 15,
    and the high two bits are the remaining bits of bytes 4 to 11.
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


def _q6_k(blocks: UInt8Array) -> _Numbers:
    """Each half of a block has 128 codes: low four bits in 64 bytes, high two bits in 32."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    lows = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    highs = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (lows | highs << 4).astype(np.int8) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _Numbers(codes.reshape(len(blocks), 256), _halves(blocks[:, 208:]) * scales)


def _halves(two_bytes: UInt8Array) -> Float32Array:
    return np.ascontiguousarray(two_bytes).view(np.float16).astype(np.float32)


BLOCK_TYPES = {
    "Q4_0": BlockType(*BLOCK_SIZES["Q4_0"], 4, _q4_0),
    "Q8_0": BlockType(*BLOCK_SIZES["Q8_0"], 8, _q8_0),
    "Q4_K": BlockType(*BLOCK_SIZES["Q4_K"], 4, _q4_k),
    "Q6_K": BlockType(*BLOCK_SIZES["Q6_K"], 8, _q6_k),
}
"""Block types by name. A QuantizedWeight stores the 6-bit codes of Q6_K in 8 bits."""


def read_blocks(name: str, rows: UInt8Array, dtype: torch.dtype) -> QuantizedWeight:
    """Decodes rows of blocks of type `name`, uint8 [out, bytes], for computations in `dtype`."""
    kind = BLOCK_TYPES[name]
    numbers = kind.read(np.ascontiguousarray(rows).reshape(-1, kind.num_bytes))

    def by_row(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).reshape(len(rows), -1))

    offsets = None if numbers.offsets is None else by_row(numbers.offsets)
    return QuantizedWeight(by_row(numbers.codes), by_row(numbers.scales), offsets, kind.bits, dtype)


class GgufFile:
    """An open GGUF file. Its tensors are returned in the layout of Hugging Face checkpoints."""

    def __init__(self, file: Path) -> None:
        header, tensors = read_gguf_tensors(file)
        metadata = header.metadata
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._bytes: UInt8Array = np.memmap(file, np.uint8, "r")
        architecture = metadata["general.architecture"]
        heads = metadata.get(f"{architecture}.attention.head_count", 1)
        kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
        counts = {"attn_q.": heads, "attn_k.": kv_heads} if architecture == "llama" else {}
        # A list has one number for each layer. Only models whose layers have equal numbers of heads
        # are supported.
        self._heads = {
            part: count[0] if isinstance(count, list) else count for part, count in counts.items()
        }

    def get_tensor(self, name: str) -> torch.Tensor:
        """Reads a tensor, and dequantizes it to float32 if it is quantized."""
        tensor = self._tensors[name]
        if tensor.dtype in BLOCK_TYPES:
            return self.get_quantized(name, torch.float32).dequantized()
        raw = torch.from_numpy(self._bytes[tensor.begin : tensor.end].copy())
        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        whole: torch.Tensor = self._in_order(name, raw.view(kinds[tensor.dtype]).view(tensor.shape))
        return whole

    def get_slice(self, name: str) -> torch.Tensor:
        """Returns the whole tensor, of which the caller selects a part."""
        return self.get_tensor(name)

    def get_quantized(self, name: str, dtype: torch.dtype) -> QuantizedWeight:
        """Reads a quantized weight, for computations in `dtype`."""
        tensor = self._tensors[name]
        rows = self._bytes[tensor.begin : tensor.end].reshape(tensor.shape[0], -1)
        return read_blocks(tensor.dtype, self._in_order(name, rows), dtype)

    def _in_order(self, name: str, rows: Any) -> Any:
        """Reorders rows of queries and keys for rotary embeddings, which rotate element i of a
        head's first half with element i of its second half. Llama's GGUF files store these two
        elements side by side.
        """
        heads = next((count for part, count in self._heads.items() if part in name), None)
        if heads is None:
            return rows
        length = len(rows) // heads
        places = np.arange(len(rows)).reshape(heads, length // 2, 2).swapaxes(1, 2).reshape(-1)
        return rows[places]
