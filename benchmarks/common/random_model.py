"""A model of a realistic shape with random weights, made without a download.

    python -m benchmarks.common.random_model --size 135m --out models/random-135m

Writes a Hugging Face directory of a Llama model with a byte-level tokenizer. Every service loads it
like any other model. A step takes as long as with a trained model of the same shape. The generated
text is random. Equal sizes and seeds give equal bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.common.arguments import make_parser

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
MAX_POSITIONS = 2048
INITIAL_DEVIATION = 0.02
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions that determine the cost of a Llama model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


SIZES = {
    "15m": Shape(288, 6, 6, 6, 768, 32000, tied_embeddings=True),  # stories15M of llama2.c
    "135m": Shape(576, 30, 9, 3, 1536, 49152, tied_embeddings=True),  # SmolLM-135M
    "1.1b": Shape(2048, 22, 32, 4, 5632, 32000, tied_embeddings=False),  # TinyLlama-1.1B
}


def write_model(shape: Shape, directory: Path, seed: int = 0) -> int:
    """Writes config, bfloat16 weights and tokenizer, and returns the number of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = random_weights(shape, seed)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    end = {"bos_token_id": NUM_BYTES, "eos_token_id": NUM_BYTES}
    _write_json(directory / "config.json", model_config(shape) | end)
    _write_json(directory / "generation_config.json", end)
    write_tokenizer(shape.vocab_size, directory)
    return sum(tensor.numel() for tensor in tensors.values())


def model_config(shape: Shape) -> dict[str, object]:
    """The `config.json` of the shape, without special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def read_shape(directory: Path) -> Shape:
    """Reads the shape of a Llama model from its directory."""
    config = json.loads((directory / "config.json").read_text())
    return Shape(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tied_embeddings=config["tie_word_embeddings"],
    )


def random_weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Maps tensor names to random weights. Matrices are normally distributed with a standard
    deviation of 0.02, and norms are one.
    """
    generator = np.random.default_rng(seed)

    def tensor(dims: tuple[int, ...]) -> torch.Tensor:
        if len(dims) == 1:
            return torch.ones(dims, dtype=torch.bfloat16)
        values = generator.standard_normal(dims, dtype=np.float32) * np.float32(INITIAL_DEVIATION)
        return torch.from_numpy(values).to(torch.bfloat16)

    return {name: tensor(dims) for name, dims in tensor_dims(shape)}


def tensor_dims(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and dimensions of a Llama checkpoint, in the order of the layers."""
    hidden, kv_width = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_width, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_width, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate_size, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate_size, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, shape.intermediate_size)
    yield "model.norm.weight", (hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def write_tokenizer(vocab_size: int, directory: Path) -> None:
    """Writes a tokenizer with one token for each byte of UTF-8. Token 256 ends the text, and the
    remaining tokens of the vocabulary, `<|extra_0|>`, `<|extra_1|>` and so on, occur only in
    generated text.
    """
    vocabulary = [*sorted(ByteLevel.alphabet()), END_OF_TEXT]
    vocabulary += [f"<|extra_{index}|>" for index in range(vocab_size - len(vocabulary))]
    ids = {token: token_id for token_id, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    parser = make_parser("common.random_model", __doc__)
    parser.add_argument("--size", choices=SIZES, required=True, help="shape of the model")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    arguments = parser.parse_args(argv)
    num_parameters = write_model(SIZES[arguments.size], arguments.out, arguments.seed)
    print(f"{arguments.out}: {num_parameters / 1e6:.1f}M parameters in bfloat16")


if __name__ == "__main__":
    main(sys.argv[1:])
