"""Writes the demo model as a Hugging Face directory of a Llama model with bfloat16 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_model.tokenizer import END_OF_TEXT, TURN_END, save_tokenizer, write_json


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes all files except the model card. The tied output projection is stored once."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
    }
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes the file readable only by its owner
    write_json(folder / "config.json", _config(model.config, tokenizer))
    write_json(
        folder / "generation_config.json",
        {
            "eos_token_id": [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
            "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        },
    )
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


def _config(config: LlamaConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of config.json, with the field names that most readers of checkpoints know."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "torch_dtype": "bfloat16",
    }
