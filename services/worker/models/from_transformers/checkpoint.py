"""Reads a checkpoint, or a rank's part of it, into a model of the library transformers.

transformers' own loader handles names in checkpoints, tied weights, and buffers that no checkpoint
contains. It is given lazy tensors: each reads its data, or this rank's part of the data, when the
loader copies it.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from services.worker.backends.out_of_memory import is_out_of_memory
from services.worker.models.errors import (
    ModelConfigError,
    ModelError,
    ModelFileError,
    ModelTensorError,
    UnsupportedModel,
)
from services.worker.models.files.checkpoint import CPU, Checkpoint, TensorReader
from services.worker.models.files.json_file import read_json_object
from services.worker.models.from_transformers.decoder import ATTENTION_NAME
from services.worker.models.from_transformers.division import Division
from services.worker.models.from_transformers.linear import Part
from services.worker.models.from_transformers.probe import Refused
from services.worker.models.suitability.transformers_rules import CONFIG_KEYS

_one_at_a_time = threading.Lock()
"""Locked while transformers builds a model, which changes torch's defaults for all threads."""


def read_config(
    directory: Path, check: Callable[[Mapping[str, Any], Path], None], why: str = ""
) -> PretrainedConfig:
    """Returns the configuration of a model as transformers reads it, if `check` accepts it. Raises
    UnsupportedModel, whose reason begins with `why`, if transformers cannot read it.
    """
    path = directory / "config.json"
    raw = read_json_object(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        problem = f"{why}transformers cannot read config.json: {one_line(error)}"
        raise UnsupportedModel(path, problem) from error
    read = {key: getattr(config, key, None) for key in CONFIG_KEYS}
    check(read | {"quantization_config": raw.get("quantization_config")}, path)
    return config


def max_position_embeddings(config: PretrainedConfig, path: Path) -> int:
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise ModelConfigError(path, "max_position_embeddings is missing")
    return longest


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that config.json names, or None if transformers lists no such decoder class."""
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    for cls in known if isinstance(known, tuple) else (known,):
        if cls is not None and cls.__name__ in (config.architectures or []):
            found: type[PreTrainedModel] = cls
            return found
    return None


def load_checkpoint(
    checkpoint: Checkpoint, config: PretrainedConfig, dtype: torch.dtype, division: Division | None
) -> PreTrainedModel:
    """Loads the model, or a rank's part of it, on the CPU. Raises Refused or ModelError."""
    directory, cls = checkpoint.directory, model_class(config)
    attention: Any = {"attn_implementation": ATTENTION_NAME}
    with replace(checkpoint, device=CPU).open() as reader:
        if division is None:
            tensors = lazy_tensors(checkpoint, reader)
            model = construct(cls, directory, config, dtype, tensors, **attention)
        else:
            tensors = lazy_tensors(checkpoint, reader, division.part_of)
            divided = _divided(cls, division)
            model = construct(divided, directory, config, dtype, tensors, **attention)
            division.shard.log_read(reader.num_bytes, checkpoint.num_bytes)
    if (directory / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def lazy_tensors(
    checkpoint: Checkpoint, reader: TensorReader, part_of: Callable[[str], Part] = lambda _: ()
) -> dict[str, Any]:
    """Returns the tensors of a checkpoint, by name. The part `part_of(name)` of a tensor, by
    default the whole tensor, is read when the tensor is copied.
    """
    return {name: _LazyTensor(reader, name, part_of) for name in checkpoint.tensors}


@dataclass(eq=False)
class _LazyTensor:
    """A tensor of a checkpoint. Its data is read when transformers indexes it."""

    reader: TensorReader
    name: str
    part_of: Callable[[str], Part]

    def __getitem__(self, _: object) -> torch.Tensor:
        return self.reader.read_part(self.name, self.part_of(self.name)).contiguous()


def _divided(cls: Any, division: Division) -> Any:
    """Returns a subclass whose models are divided over ranks as soon as they are constructed."""

    def make(self: PreTrainedModel, config: PretrainedConfig) -> None:
        cls.__init__(self, config)
        division.apply(self)

    return type(cls.__name__, (cls,), {"__init__": make, "__module__": cls.__module__})


def construct(
    cls: Any,
    directory: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    tensors: dict[str, Any],
    unused: tuple[str, ...] = (),
    **options: Any,
) -> PreTrainedModel:
    """Constructs a model of class `cls` with these tensors. Tensors whose names begin with one of
    `unused` may be missing. Raises Refused or ModelError.
    """
    transformers.logging.disable_progress_bar()
    try:
        with _one_at_a_time:
            model, report = cls.from_pretrained(
                None,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                state_dict=tensors,
                **options,
            )
    except (Refused, ModelError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            raise Refused("does not use transformers' attention interface") from error
        raise ModelFileError(
            directory, f"transformers cannot load the model: {one_line(error)}"
        ) from error
    missing = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    missing = [name for name in missing if not name.startswith(unused)]
    if missing:
        raise ModelTensorError(
            directory, f"tensor {missing[0]} is missing, or its shape differs from config.json"
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


def one_line(error: Exception) -> str:
    """The first 200 characters of an error's message, on one line."""
    return " ".join(str(error).split())[:200]
