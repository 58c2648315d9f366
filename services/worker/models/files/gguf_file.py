"""Reads tensors of a GGUF file. Format: https://github.com/ggml-org/ggml, docs/gguf.md."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.backends.quantized import QuantizedWeight
from services.worker.models.files.gguf_blocks import BLOCK_TYPES, read_blocks
from services.worker.models.suitability.gguf_tensors import read_gguf_tensors


class GgufFile:
    """An open file. Its tensors are returned in the layout of Hugging Face checkpoints."""

    def __init__(self, file: Path) -> None:
        header, tensors = read_gguf_tensors(file)
        metadata = header.metadata
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._bytes: npt.NDArray[np.uint8] = np.memmap(file, np.uint8, "r")
        architecture = metadata["general.architecture"]
        heads = metadata.get(f"{architecture}.attention.head_count", 1)
        kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
        self._heads = {"attn_q.": heads, "attn_k.": kv_heads} if architecture == "llama" else {}

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor, dequantized to float32 if it is quantized."""
        tensor = self._tensors[name]
        if tensor.dtype in BLOCK_TYPES:
            return self.get_quantized(name, torch.float32).dequantized()
        raw = torch.from_numpy(self._bytes[tensor.begin : tensor.end].copy())
        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        whole: torch.Tensor = self._in_order(name, raw.view(kinds[tensor.dtype]).view(tensor.shape))
        return whole

    def get_slice(self, name: str) -> torch.Tensor:
        """The whole tensor, which the caller slices."""
        return self.get_tensor(name)

    def get_quantized(self, name: str, dtype: torch.dtype) -> QuantizedWeight:
        """A quantized weight, for computations in `dtype`."""
        tensor = self._tensors[name]
        rows = self._bytes[tensor.begin : tensor.end].reshape(tensor.shape[0], -1)
        return read_blocks(tensor.dtype, self._in_order(name, rows), dtype)

    def _in_order(self, name: str, rows: Any) -> Any:
        """Reorders rows for rotary embeddings, which rotate element i of a head's first half with
        element i of its second half. Llama's GGUF files store these elements as adjacent pairs.
        """
        heads = next((count for part, count in self._heads.items() if part in name), None)
        if heads is None:
            return rows
        length = len(rows) // heads
        places = np.arange(len(rows)).reshape(heads, length // 2, 2).swapaxes(1, 2).reshape(-1)
        return rows[places]
