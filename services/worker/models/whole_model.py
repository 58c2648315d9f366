"""Models that compute one whole prompt at a time: encoders, whose tokens attend to later tokens.

The library transformers runs the model, with its own attention. Each prompt is computed alone, so
that its vector does not depend on other prompts. Nothing is cached.
"""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from services.common.request.pooling import PoolingTask
from services.worker.backends.device import dtype_name
from services.worker.backends.torch.kernels import torch_has_bfloat16
from services.worker.models.config import resolve_max_model_len
from services.worker.models.errors import ModelFileError
from services.worker.models.files.checkpoint import CPU, Checkpoint
from services.worker.models.from_transformers.checkpoint import (
    construct,
    lazy_tensors,
    max_position_embeddings,
    one_line,
    read_config,
)
from services.worker.models.model import LoadOptions, log_loading, resolve_dtype
from services.worker.models.pooling_config import PoolingConfig
from services.worker.models.suitability.transformers_rules import check_whole


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A loaded model that processes whole prompts, and its properties."""

    model: PreTrainedModel
    pooling: PoolingConfig
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    max_model_len: int
    takes_token_types: bool

    @torch.inference_mode()
    def states(self, token_ids: torch.Tensor, num_first_text_tokens: int) -> torch.Tensor:
        """Maps the token ids of one prompt, int64 [n], to its hidden states, float32 [n,
        hidden_size]. A model with class scores returns these instead, float32 [1, num_labels].

        If `num_first_text_tokens` is above 0, the prompt has two texts, and this is the number of
        tokens of the first text.
        """
        ids = token_ids[None].to(self.model.device)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.takes_token_types and num_first_text_tokens:
            inputs["token_type_ids"] = torch.zeros_like(ids)
            inputs["token_type_ids"][:, num_first_text_tokens:] = 1
        output = self.model(**inputs)
        if self.pooling.task is PoolingTask.CLASSIFY:
            states: torch.Tensor = output.logits
        else:
            states = output.last_hidden_state[0]
        return states.float()


def load_whole_model(checkpoint: Checkpoint, options: LoadOptions) -> WholeModel:
    """Loads the model of a directory onto the checkpoint's device. Raises ModelError."""
    if options.pooling is None:
        raise AssertionError("a model that generates is not computed whole")
    directory = checkpoint.directory
    path = directory / "config.json"
    config = read_config(directory, check_whole)
    stored = dtype_name(config.dtype) if isinstance(config.dtype, torch.dtype) else None
    dtype = resolve_dtype(options.dtype, stored, has_bfloat16=torch_has_bfloat16())
    name = (config.architectures or [""])[0]
    log_loading(f"{name}, whole prompts by transformers,", directory, dtype)
    model = _load(checkpoint, config, dtype, options.pooling.task)
    model.to(checkpoint.device)
    longest = _longest_prompt(model, config, path)
    default = min(longest, options.pooling.max_seq_length or longest)
    return WholeModel(
        model,
        options.pooling,
        dtype,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_model_len=resolve_max_model_len(options.max_model_len, default, longest, path),
        takes_token_types="token_type_ids" in inspect.signature(model.forward).parameters
        and getattr(config, "type_vocab_size", 0) > 1,
    )


def _load(
    checkpoint: Checkpoint, config: PretrainedConfig, dtype: torch.dtype, task: PoolingTask
) -> PreTrainedModel:
    classes: Any = transformers.MODEL_MAPPING
    if task is PoolingTask.CLASSIFY:
        classes = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    try:
        found = classes[type(config)]
    except KeyError as error:
        problem = f"transformers cannot load the model: {one_line(error)}"
        raise ModelFileError(checkpoint.directory, problem) from error
    cls = found[0] if isinstance(found, tuple) else found
    # The layer "pooler" pools the first hidden state. Models for embeddings do not use it.
    unused = () if task is PoolingTask.CLASSIFY else ("pooler.",)
    with replace(checkpoint, device=CPU).open() as reader:
        tensors = lazy_tensors(checkpoint, reader)
        return construct(cls, checkpoint.directory, config, dtype, tensors, unused)


def _longest_prompt(model: PreTrainedModel, config: PretrainedConfig, path: Path) -> int:
    """The number of positions. RoBERTa's positions start after the padding index."""
    longest = max_position_embeddings(config, path)
    for name, module in model.named_modules():
        counts = name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if counts and module.padding_idx is not None:
            return longest - int(module.padding_idx) - 1
    return longest
