"""Tensors in a GGUF file, by their names in Hugging Face's checkpoints.

Format: https://github.com/ggml-org/ggml, docs/gguf.md. The file's metadata is read for what its
tensors mean, and config.json and the tokenizer's files beside it for everything else.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from services.worker.backends.quantized import QuantizedWeight
from services.worker.models.errors import ModelFileError, UnsupportedModel
from services.worker.models.gguf_blocks import BLOCK_TYPES, read_blocks
from services.worker.models.tensor_info import TensorInfo

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_AXES = 4
_FORMATS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")
"""The type of `struct` for each type of value, by number; None for strings and arrays."""
_STRING, _ARRAY = 8, 9
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K", 30: "BF16"}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_IGNORED = "rope_freqs.weight"
"""A tensor that is not read: config.json has the same of rotary embeddings."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a file, by their names in Hugging Face's checkpoints; TensorInfo has those in
    the file. Raises ModelFileError, and UnsupportedModel for what is not read of it.
    """
    _, tensors = _read(file)
    return {_name_of(file, tensor.name): tensor for tensor in tensors if tensor.name != _IGNORED}


class GgufFile:
    """An open file, whose tensors are given as in Hugging Face's checkpoints."""

    def __init__(self, file: Path) -> None:
        metadata, tensors = _read(file)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._bytes: npt.NDArray[np.uint8] = np.memmap(file, np.uint8, "r")
        architecture = metadata["general.architecture"]
        heads = metadata.get(f"{architecture}.attention.head_count", 1)
        kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
        self._heads = {"attn_q.": heads, "attn_k.": kv_heads} if architecture == "llama" else {}

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor, in float32 if it is quantized."""
        tensor = self._tensors[name]
        if tensor.dtype in BLOCK_TYPES:
            return self.get_quantized(name, torch.float32).dequantized()
        raw = torch.from_numpy(self._bytes[tensor.begin : tensor.end].copy())
        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        whole: torch.Tensor = self._in_order(name, raw.view(kinds[tensor.dtype]).view(tensor.shape))
        return whole

    def get_slice(self, name: str) -> torch.Tensor:
        """The tensor, which a part is then taken of."""
        return self.get_tensor(name)

    def get_quantized(self, name: str, dtype: torch.dtype) -> QuantizedWeight:
        """A quantized weight, for a computation in `dtype`."""
        tensor = self._tensors[name]
        rows = self._bytes[tensor.begin : tensor.end].reshape(tensor.shape[0], -1)
        return read_blocks(tensor.dtype, self._in_order(name, rows), dtype)

    def _in_order(self, name: str, rows: Any) -> Any:
        """Rows in the order that rotary embeddings take: halves of heads, which Llama's files have
        in pairs.
        """
        heads = next((count for part, count in self._heads.items() if part in name), None)
        if heads is None:
            return rows
        length = len(rows) // heads
        places = np.arange(len(rows)).reshape(heads, length // 2, 2).swapaxes(1, 2).reshape(-1)
        return rows[places]


def _name_of(file: Path, name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    prefix, _, rest = module.partition(".")
    index, _, part = rest.partition(".")
    if prefix != "blk" or not index.isdigit() or part not in _LAYER_NAMES:
        raise UnsupportedModel(file, f"tensor {name} is not read")
    return f"model.layers.{index}.{_LAYER_NAMES[part]}.{kind}"


def _read(file: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Metadata, and tensors by their names in the file."""
    try:
        with file.open("rb") as stream:
            return _read_header(file, stream, file.stat().st_size)
    except OSError as error:
        raise ModelFileError(file, f"the file cannot be read: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise ModelFileError(file, "the header is not that of a GGUF file") from error


def _read_header(
    file: Path, stream: BinaryIO, size: int
) -> tuple[dict[str, Any], list[TensorInfo]]:
    if stream.read(4) != _MAGIC or _number(stream, "I") not in _VERSIONS:
        raise ModelFileError(file, "the header is not that of a GGUF file of version 2 or 3")
    num_tensors, num_values = _number(stream, "Q"), _number(stream, "Q")
    metadata = {}
    for _ in range(num_values):
        key = _text(stream)
        metadata[key] = _value(stream, _number(stream, "I"))
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            file, f"architecture {architecture!r} is not read; {', '.join(_ARCHITECTURES)} are"
        )
    entries = [_entry(file, stream) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    base = -(-stream.tell() // alignment) * alignment
    tensors = []
    for name, shape, kind, offset in entries:
        begin = base + offset
        end = begin + _num_bytes(file, name, shape, kind)
        if end > size:
            raise ModelFileError(file, f"the file is cut short: it ends within tensor {name}")
        tensors.append(TensorInfo(name, file, kind, shape, begin, end))
    return metadata, tensors


def _entry(file: Path, stream: BinaryIO) -> tuple[str, tuple[int, ...], str, int]:
    """Name, shape, type and offset of a tensor."""
    name, num_axes = _text(stream), _number(stream, "I")
    if num_axes > _MOST_AXES:
        raise ModelFileError(file, f"tensor {name} has {num_axes} axes")
    shape = tuple(_number(stream, "Q") for _ in range(num_axes))[::-1]
    number, offset = _number(stream, "I"), _number(stream, "Q")
    if number not in _TYPES:
        known = ", ".join(_TYPES.values())
        raise UnsupportedModel(file, f"tensor {name} is of type {number}, not one of {known}")
    return name, shape, _TYPES[number], offset


def _num_bytes(file: Path, name: str, shape: tuple[int, ...], kind: str) -> int:
    count = int(np.prod(shape, dtype=np.int64))
    if kind not in BLOCK_TYPES:
        return count * _ITEM_BYTES[kind]
    block = BLOCK_TYPES[kind]
    if len(shape) != 2 or shape[1] % block.size:
        raise ModelFileError(file, f"tensor {name} of shape {list(shape)} is not blocks of {kind}")
    return count // block.size * block.num_bytes


def _number(stream: BinaryIO, form: str) -> int:
    return int(_unpacked(stream, form))


def _unpacked(stream: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))[0]


def _text(stream: BinaryIO) -> str:
    return stream.read(_number(stream, "Q")).decode()


def _value(stream: BinaryIO, kind: int) -> Any:
    """A value, or None for an array, which is passed over."""
    if kind == _STRING:
        return _text(stream)
    if kind == _ARRAY:
        of, count = _number(stream, "I"), _number(stream, "Q")
        _pass_over(stream, of, count)
        return None
    form = _FORMATS[kind] if kind < len(_FORMATS) else None
    if form is None:
        raise struct.error(f"values of type {kind}")
    return _unpacked(stream, form)


def _pass_over(stream: BinaryIO, kind: int, count: int) -> None:
    form = _FORMATS[kind] if kind < len(_FORMATS) else None
    if form is not None:
        stream.seek(struct.calcsize(f"<{form}") * count, 1)
        return
    for _ in range(count):
        _value(stream, kind)
