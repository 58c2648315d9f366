"""The tensors of a GGUF file, by their names in Hugging Face checkpoints."""

from math import prod
from pathlib import Path

from services.common.model_source.errors import GgufError
from services.common.model_source.gguf_config import ARCHITECTURES
from services.common.model_source.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from services.worker.models.errors import ModelFileError, UnsupportedModel
from services.worker.models.files.tensor_info import TensorInfo

BLOCK_SIZES = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Maps block types to the number of weights and the number of bytes in a block."""
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K", 30: "BF16"}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_IGNORED = "rope_freqs.weight"
"""A tensor of rotary frequencies, ignored because config.json defines them too."""

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
    """Maps names in Hugging Face checkpoints to the tensors of a file. Each TensorInfo has the name
    in the file. Raises ModelFileError, and UnsupportedModel for an unsupported file.
    """
    _, tensors = read_gguf_tensors(file)
    return {_name_of(file, tensor.name): tensor for tensor in tensors if tensor.name != _IGNORED}


def read_gguf_tensors(file: Path) -> tuple[GgufHeader, list[TensorInfo]]:
    """Returns the header, and the tensors with their names in the file."""
    try:
        header, size = read_gguf_header(file), file.stat().st_size
    except GgufError as error:
        raise ModelFileError(file, error.problem) from error
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            file,
            f"architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} are",
        )
    tensors = [_info(file, tensor) for tensor in header.tensors]
    for tensor in tensors:
        if tensor.end > size:
            raise ModelFileError(
                file, f"the file is incomplete: it ends within tensor {tensor.name}"
            )
    return header, tensors


def _info(file: Path, tensor: GgufTensor) -> TensorInfo:
    name, shape = tensor.name, tensor.shape
    if tensor.kind not in _TYPES:
        known = ", ".join(_TYPES.values())
        raise UnsupportedModel(file, f"tensor {name} is of type {tensor.kind}, not one of {known}")
    kind, count = _TYPES[tensor.kind], prod(shape)
    if kind in _ITEM_BYTES:
        num_bytes = count * _ITEM_BYTES[kind]
    else:
        size, block_bytes = BLOCK_SIZES[kind]
        if len(shape) != 2 or shape[1] % size:
            raise ModelFileError(
                file,
                f"tensor {name} of shape {list(shape)} cannot be divided into blocks of {kind}",
            )
        num_bytes = count // size * block_bytes
    return TensorInfo(name, file, kind, shape, tensor.begin, tensor.begin + num_bytes)


def _name_of(file: Path, name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    prefix, _, rest = module.partition(".")
    index, _, part = rest.partition(".")
    if prefix != "blk" or not index.isdigit() or part not in _LAYER_NAMES:
        raise UnsupportedModel(file, f"tensor {name} is not supported")
    return f"model.layers.{index}.{_LAYER_NAMES[part]}.{kind}"
