"""Converts the weights of a Llama checkpoint to llama.cpp's names and order.

This module needs only numpy, because llama.cpp's interpreter has neither torch nor Stepwell.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def read_bfloat16(path: Path) -> Iterator[tuple[str, Array]]:
    """Yields the name and the tensor of each entry of a safetensors file. Each bfloat16 is returned
    as a uint16 with the same bits.
    """
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    header_end = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(bytes(raw[8:header_end]))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} of {path} is {entry['dtype']}, not BF16")
        begin, end = (header_end + offset for offset in entry["data_offsets"])
        yield name, raw[begin:end].view(np.uint16).reshape(entry["shape"])


def to_float32(tensor: Array) -> Array:
    """Converts bfloat16 bits in a uint16 tensor to float32, exactly."""
    return (tensor.astype(np.uint32) << 16).view(np.float32)


def llama_name(name: str) -> str:
    """Converts the Hugging Face name of a tensor to llama.cpp's name."""
    if name in _NAMES:
        return _NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def llama_order(name: str, tensor: Array, config: Mapping[str, Any]) -> Array:
    """Reorders the rows of query and key projections for llama.cpp's rotation. Other tensors are
    unchanged.

    llama.cpp rotates adjacent elements (0 with 1, 2 with 3). Hugging Face's Llama rotates the
    halves of a head.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    kind = name.rpartition(".weight")[0].rpartition(".")[2]
    if kind not in heads:
        return tensor
    halves = tensor.reshape(config[heads[kind]], 2, -1, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
