"""An adapter in PEFT's format with random weights, for every projection of a Llama model."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common.random_model import read_shape
from services.common.request.adapter import CONFIG_FILE, WEIGHTS_FILE


def write_adapter(model: Path, directory: Path, *, rank: int, seed: int) -> None:
    """Writes an adapter for the model to `directory`. Equal seeds give equal bytes."""
    shape = read_shape(model)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = (count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads))
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for name, (rows, columns) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, size in (("A", (rank, columns)), ("B", (rows, rank))):
                weight = torch.randn(size, generator=generator) * 0.02
                tensors[f"{prefix}.lora_{part}.weight"] = weight.bfloat16()
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    targets = [name.partition(".")[2] for name in sizes]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (directory / CONFIG_FILE).write_text(json.dumps(config))
