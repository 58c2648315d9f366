"""The weights of a Llama checkpoint as llama.cpp names and orders them.

Runs beside llama.cpp, in an interpreter that has neither torch nor anything of ours: numpy alone.
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
    """Names and tensors of a safetensors file, the bits of each bfloat16 as a uint16."""
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
    """The values whose bfloat16 bits a uint16 tensor holds, exactly."""
    return (tensor.astype(np.uint32) << 16).view(np.float32)


def llama_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if name in _NAMES:
        return _NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def llama_order(name: str, tensor: Array, config: Mapping[str, Any]) -> Array:
    """The rows of queries and keys as llama.cpp rotates them; any other tensor as it is.

    It rotates adjacent elements (0 with 1, 2 with 3), Hugging Face's Llama the halves of a head.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    kind = name.rpartition(".weight")[0].rpartition(".")[2]
    if kind not in heads:
        return tensor
    halves = tensor.reshape(config[heads[kind]], 2, -1, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
