"""Writes GGUF files with the package gguf, and models with the same weights in float32."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.dequantized import HEAD, Floats

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Types = gguf.GGMLQuantizationType


def random_blocks(of: Types, rows: int, columns: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random codes and scales [rows, bytes], for types to which gguf cannot quantize."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[of]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // size, num_bytes), np.uint8)
    scale = random.uniform(1e-4, 2e-4, (len(blocks), 1)).astype(np.float16)
    # The offsets give the weights both signs.
    halves = {Types.Q4_K: {0: scale, 2: 7.5 * scale}, Types.Q6_K: {208: scale}}[of]
    for place, half in halves.items():
        blocks[:, place : place + 2] = half.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def save_gguf(
    directory: Path,
    to: Path,
    types: dict[str, Types],
    architecture: str,
    heads: tuple[int, int],
    *,
    num_layers: int | None = None,
) -> Path:
    """Copies a model with its weights in a GGUF file. `types` maps the last part of a weight's name
    to the weight's type. All other weights are in float32. With `num_layers`, the numbers of heads
    are lists with an entry for each layer. A second copy, at `to` with the suffix .float, has the
    same weights in safetensors. Returns the directory of the second copy.
    """
    floats = to.with_suffix(".float")
    for copy in (to, floats):
        shutil.copytree(directory, copy)
    (to / "model.safetensors").unlink()
    writer = gguf.GGUFWriter(to / "model.gguf", architecture)
    listed = [count if num_layers is None else [count] * num_layers for count in heads]
    writer.add_head_count(listed[0])
    writer.add_head_count_kv(listed[1])
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0])
    dequantized: dict[str, Floats] = {}
    for number, (name, tensor) in enumerate(load_file(directory / "model.safetensors").items()):
        module, _, kind = name.rpartition(".")
        of = types.get(module.rpartition(".")[2]) if kind == "weight" else None
        stored, dequantized[name] = _stored(tensor, of, number)
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            stored = in_pairs(stored, heads[module.endswith("k_proj")])
        writer.add_tensor(_name_of(module, kind), stored, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(dequantized, floats / "model.safetensors", metadata={"format": "pt"})
    assert HEAD in dequantized
    return floats


def in_pairs(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorders the rows of each head, in which rotary embedding pairs the two halves, so that the
    pairs are adjacent, as llama.cpp does for Llama.
    """
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _stored(tensor: Floats, of: Types | None, seed: int) -> tuple[npt.NDArray[Any], Floats]:
    """A tensor as it is written to the file, and the values that the written tensor has."""
    if of is None:
        return tensor, tensor
    if of in (Types.Q4_K, Types.Q6_K):
        blocks = random_blocks(of, *tensor.shape, seed)
    else:
        blocks = gguf.quants.quantize(tensor, of)
    return blocks, gguf.quants.dequantize(blocks, of)


def _name_of(module: str, kind: str) -> str:
    prefix, _, rest = module.partition("model.layers.")
    if prefix or not rest:
        return f"{NAMES[module]}.{kind}"
    index, _, part = rest.partition(".")
    return f"blk.{index}.{NAMES[part]}.{kind}"


def save_alone(
    directory: Path, file: Path, architecture: str, *, pre: str = "qwen2", **metadata: Any
) -> None:
    """Writes a GGUF file that needs no other files: with the configuration, the byte-level BPE
    tokenizer and the float32 weights of a model directory, by the keys of llama.cpp's converter.
    `metadata` has further values by key, with __ in place of a dot.
    """
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads[0])
    writer.add_head_count_kv(heads[1])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads[0])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    _add_tokenizer(writer, directory, pre, config["vocab_size"])
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }[type(value)]
        add(key.replace("__", "."), value)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, config))
    for name, tensor in load_file(directory / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        stored = tensor
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            stored = in_pairs(tensor, heads[module.endswith("k_proj")])
        writer.add_tensor(_name_of(module, kind), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, pre: str, size: int) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    special = {token["id"]: token for token in tokenizer["added_tokens"]}
    names = {token_id: name for name, token_id in tokenizer["model"]["vocab"].items()}
    names |= {token_id: token["content"] for token_id, token in special.items()}
    kinds = {i: 3 if token["special"] else 4 for i, token in special.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([kinds.get(i, 1 if i in names else 5) for i in range(size)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    ids = {token["content"]: token_id for token_id, token in special.items()}
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        if settings.get(f"{name}_token"):
            add(ids[settings[f"{name}_token"]])
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def _llama3_divisors(rope: dict[str, Any], config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Transformers' divisors of rotary frequencies, which GGUF files store as a tensor."""
    plain = rope["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    return (plain / stretched.numpy()).astype(np.float32)
