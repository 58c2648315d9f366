"""Builds config.json and generation_config.json from the metadata of a GGUF file. The metadata keys
are specified in https://github.com/ggml-org/ggml, docs/gguf.md.
"""

import math
import struct
from functools import partial
from pathlib import Path
from typing import Any

from services.common.model_source.errors import GgufError
from services.common.model_source.gguf_header import GgufHeader, GgufTensor

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""Maps an architecture's name in GGUF files to the class and model type in config.json."""

_F32, _F16 = 0, 1
_CONTROL = 3
_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Control tokens that end an output, besides the file's EOS token. The list is llama.cpp's."""
_ROPE_FREQUENCIES = "rope_freqs.weight"
_LOW, _HIGH, _LENGTH = 1.0, 4.0, 8192
"""Llama 3's low_freq_factor, high_freq_factor and original_max_position_embeddings."""


def gguf_config(file: Path, header: GgufHeader) -> dict[str, Any]:
    """Returns the content of config.json. Raises GgufError for unsupported metadata."""
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise GgufError(file, f"architecture {name!r} is not supported; {known} are")
    reader = _Reader(file, header, name)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if "token_embd.weight" not in tensors:
        raise GgufError(file, "tensor token_embd.weight is missing")
    if reader.optional("expert_count"):
        raise GgufError(file, "expert_count: models with experts are not supported as GGUF files")
    heads, width = reader.number("attention.head_count"), reader.number("embedding_length")
    kv_heads = reader.number("attention.head_count_kv", heads)
    head_dim = reader.optional("attention.key_length") or width // heads
    for tensor, count in ("blk.0.attn_q.weight", heads), ("blk.0.attn_k.weight", kv_heads):
        if tensor in tensors and (rows := tensors[tensor].shape[0]) != count * head_dim:
            raise GgufError(file, f"tensor {tensor} has {rows} rows, not {count} times {head_dim}")
    length, theta = reader.number("context_length"), reader.optional("rope.freq_base") or 10000.0
    frequencies = tensors.get(_ROPE_FREQUENCIES)
    architecture, model_type = ARCHITECTURES[name]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": reader.number("feed_forward_length"),
        "num_hidden_layers": reader.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": length,
        "rms_norm_eps": _shortest(reader.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(theta),
        "rope_scaling": _rope_scaling(reader)
        if frequencies is None
        else _llama3(file, frequencies, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": name == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "hidden_act": "silu",
        "dtype": _dtype(header.tensors),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def gguf_generation_config(header: GgufHeader) -> dict[str, Any]:
    """Returns the content of generation_config.json, which lists the tokens that end an output."""
    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    ]
    known = [token_id for token_id in (*named, *ends) if token_id is not None]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(known)) or None,
    }


class _Reader:
    def __init__(self, file: Path, header: GgufHeader, architecture: str) -> None:
        self.file = file
        self._metadata = header.metadata
        self._architecture = architecture

    def optional(self, key: str) -> Any:
        """Returns a key's value, or None if missing. A list of equal values counts as one value."""
        value = self._metadata.get(f"{self._architecture}.{key}")
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]
        if isinstance(value, list):
            raise GgufError(self.file, f"{self._architecture}.{key} differs from layer to layer")
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.optional(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or value <= 0:
            raise GgufError(self.file, f"{self._architecture}.{key} must be a number above 0")
        return value


def _rope_scaling(reader: _Reader) -> dict[str, Any] | None:
    """Returns `rope_scaling`, or None. GGUF files of 2023 store the factor of linear scaling as
    `rope.scale_linear`, and have no `rope.scaling.type`.
    """
    kind = reader.optional("rope.scaling.type") or "linear"
    factor = "rope.scaling.factor"
    if kind == "linear" and reader.optional(factor) is None:
        factor = "rope.scale_linear"
    if kind == "none" or (kind == "linear" and reader.optional(factor) is None):
        return None
    if kind not in ("linear", "yarn"):
        raise GgufError(
            reader.file, f"rope.scaling.type {kind!r} is not supported; linear and yarn are"
        )
    scaling = {"rope_type": kind, "factor": _shortest(reader.number(factor))}
    original = reader.optional("rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3(file: Path, tensor: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Infers the parameters of Llama 3's RoPE scaling from the divisors of the RoPE frequencies."""
    count = tensor.shape[0]
    with file.open("rb") as stream:
        stream.seek(tensor.begin)
        raw = stream.read(4 * count)
    if tensor.kind != _F32 or len(raw) < 4 * count or count != head_dim // 2:
        raise GgufError(file, f"tensor {_ROPE_FREQUENCIES} is not {head_dim // 2} numbers")
    divisors = struct.unpack(f"<{count}f", raw)
    factor = float(f"{max(divisors):.5g}")
    waves = [2 * math.pi * theta ** (2 * index / head_dim) for index in range(count)]
    length = next(filter(None, map(partial(_original_length, factor), divisors, waves)), _LENGTH)
    for divisor, wave in zip(divisors, waves, strict=True):
        smooth = min(max((length / wave - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise GgufError(file, f"tensor {_ROPE_FREQUENCIES} is not the scaling of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": length,
    }


def _original_length(factor: float, divisor: float, wave: float) -> int | None:
    """The context length for which a model was trained before its RoPE frequencies were scaled. The
    length is computed from the divisor of one RoPE frequency. Returns None if the divisor is not
    between 1 and `factor`. `wave` is the frequency's wavelength in tokens.
    """
    smooth = (1 / divisor - 1 / factor) / (1 - 1 / factor) if factor > 1 else 0.0
    is_between = 1e-3 < smooth < 1 - 1e-3
    return round((smooth * (_HIGH - _LOW) + _LOW) * wave) if is_between else None


def _dtype(tensors: list[GgufTensor]) -> str:
    """The data type for computation: the matrices' float type, or bfloat16 for other types."""
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
    if kinds == {_F32}:
        return "float32"
    return "float16" if kinds <= {_F32, _F16} else "bfloat16"


def _shortest(value: float) -> float:
    """Rounds a 32-bit float to 7 significant digits. Further digits are not accurate."""
    return float(f"{value:.7g}")
