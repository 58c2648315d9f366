"""Tiny pooling models in the usual directory formats, and the results that transformers computes
for them.

A decoder is saved without an output head, as sentence-transformers does, or with a classification
head.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    PretrainedConfig,
    PreTrainedModel,
    XLMRobertaConfig,
)

from tests.tiny_models import TINY_MODELS, VOCAB_SIZE

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
}
ENCODERS: dict[str, PretrainedConfig] = {
    "bert": BertConfig(**_ENCODER, max_position_embeddings=128, pad_token_id=0),
    "xlm_roberta": XLMRobertaConfig(
        **_ENCODER, max_position_embeddings=130, pad_token_id=1, type_vocab_size=1
    ),
}

MODES = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}


def _config(kind: str, **changes: Any) -> PretrainedConfig:
    if kind in ENCODERS:
        return type(ENCODERS[kind])(**{**ENCODERS[kind].to_dict(), **changes})
    return TINY_MODELS[kind].configured(**changes)


def _randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Sets random biases and norms, and switches the model to inference mode."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in name.lower():
                parameter.normal_(mean=1.0, std=0.2)
    return model.float().eval()


def save_embedder(
    directory: Path, kind: str, mode: str | None = None, *, normalize: bool = True, **changes: Any
) -> PreTrainedModel:
    """Saves a model without a head. A pooling `mode` adds files of sentence-transformers."""
    torch.manual_seed(7)
    model = _randomized(AutoModel.from_config(_config(kind, **changes)))
    model.save_pretrained(directory)
    if mode is not None:
        add_modules(directory, mode, normalize=normalize)
    return model


def add_modules(directory: Path, mode: str, *, normalize: bool = True) -> None:
    """Adds the files of sentence-transformers for a pooling mode to a model's directory."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{n}",
        }
        for index, (n, path) in enumerate(zip(names, paths, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    modes = {name: name == MODES[mode] for name in MODES.values()}
    config = {"word_embedding_dimension": 48, **modes, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))


def save_classifier(directory: Path, kind: str, num_labels: int = 1) -> PreTrainedModel:
    torch.manual_seed(8)
    # Without a padding token, transformers always uses the state of the last token.
    changes: dict[str, Any] = {} if kind in ENCODERS else {"pad_token_id": None}
    config = _config(kind, num_labels=num_labels, **changes)
    model = _randomized(AutoModelForSequenceClassification.from_config(config))
    model.save_pretrained(directory)
    return model


@torch.inference_mode()
def embedding(
    model: PreTrainedModel,
    token_ids: list[int],
    mode: str,
    *,
    normalize: bool = True,
    dimensions: int | None = None,
) -> list[float]:
    """A prompt's vector: transformers' hidden states, pooled here explicitly."""
    states = model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    vector = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[mode][:dimensions]
    return (nn.functional.normalize(vector, dim=0) if normalize else vector).tolist()


@torch.inference_mode()
def class_scores(
    model: PreTrainedModel, token_ids: list[int], num_first_text_tokens: int = 0
) -> torch.Tensor:
    """The logits of the classes, computed by transformers."""
    ids = torch.tensor([token_ids])
    types = {}
    if num_first_text_tokens:
        types["token_type_ids"] = (torch.arange(len(token_ids)) >= num_first_text_tokens).int()[
            None
        ]
    return model(input_ids=ids, **types).logits[0]
