"""Small LoRA adapters for the tiny models, written by peft."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "everywhere": {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP]},
    "rank stabilized": {
        "r": 20,
        "lora_alpha": 12,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
    },
    "patterns": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "k_proj", "gate_proj", "up_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 16, "gate_proj": 8},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 5, "up_proj": 9},
    },
}


def save_adapter(model_directory: Path, directory: Path, seed: int = 0, **config: Any) -> Path:
    """Saves an adapter. Its random weights are large enough to change the generated tokens."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - most processes need none

    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    torch.manual_seed(seed)
    with warnings.catch_warnings():  # peft's calls of transformers cause warnings
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(base, LoraConfig(**config, init_lora_weights=False))
    for name, weight in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(weight, std=0.15)
    adapted.save_pretrained(directory)
    return directory


def adapted_model(model_directory: Path, adapter: Path | None) -> PreTrainedModel:
    """The peft model of an adapter, or the model without adapters if `adapter` is None."""
    from peft import PeftModel  # noqa: PLC0415 - most processes need none

    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    if adapter is None:
        return base
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(base, adapter).eval()
