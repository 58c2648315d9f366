"""How a model's directory defines pooling: whether the model returns vectors, from which hidden
states they are computed, and their final activation.

Directories of sentence-transformers list their modules in modules.json: the transformer, a pooling
module with its own config.json, and optionally a normalization. Architectures of cross-encoders end
in ForSequenceClassification.
"""

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.request.pooling import PoolingTask, PoolingType
from services.worker.models.config import read_architecture
from services.worker.models.errors import ModelFileError, UnsupportedModel
from services.worker.models.files.json_file import JsonReader, read_json_object

MODULES_FILE = "modules.json"
CLASSIFIER = "ForSequenceClassification"
_GENERATORS = ("ForCausalLM", "LMHeadModel")
_MODES = {
    "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_lasttoken": PoolingType.LAST,
    "pooling_mode_mean_tokens": PoolingType.MEAN,
}
_MODE_NAMES = {"cls": PoolingType.CLS, "lasttoken": PoolingType.LAST, "mean": PoolingType.MEAN}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


class RunnerSetting(enum.Enum):
    """How a model is used, as in vLLM's `--runner`."""

    AUTO = "auto"
    GENERATE = "generate"
    POOLING = "pooling"


class Activation(enum.Enum):
    """The final function applied to a vector."""

    NONE = "none"
    NORMALIZE = "normalize"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": Activation.NONE,
    "torch.nn.modules.activation.Sigmoid": Activation.SIGMOID,
    "torch.nn.modules.activation.Softmax": Activation.SOFTMAX,
}
_OF_PROBLEMS = {
    "regression": Activation.NONE,
    "multi_label_classification": Activation.SIGMOID,
}
"""As in vLLM, the activations for single texts by `problem_type` in config.json."""


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    task: PoolingTask
    pooling_type: PoolingType | None
    """The pooling type that the directory sets. None means CLS for models whose tokens attend to
    later tokens, and LAST for others.
    """
    activation: Activation
    """The activation for requests that do not set `use_activation`."""
    pair_activation: Activation | None = None
    """The same for prompts that join two texts. None means `activation`."""
    num_labels: int = 0
    """The number of classes. It is 0 for embeddings."""
    max_seq_length: int | None = None
    """The directory's limit on the tokens of a prompt. None means the model's own limit."""
    may_shorten: bool = True
    """See `services.common.request.pooling.Pooler`, also for `matryoshka_dimensions`."""
    matryoshka_dimensions: tuple[int, ...] = ()

    @property
    def forced_activation(self) -> Activation:
        """The activation for requests that set `use_activation` to true."""
        if self.task is PoolingTask.EMBED:
            return Activation.NORMALIZE
        if self.activation is not Activation.NONE:
            return self.activation
        return Activation.SIGMOID if self.num_labels == 1 else Activation.SOFTMAX


def generates(architecture: str) -> bool:
    """Whether an architecture has a language model's head."""
    return architecture.endswith(_GENERATORS)


def read_pooling(directory: Path, runner: RunnerSetting) -> PoolingConfig | None:
    """Reads how the model pools, or returns None if the model generates text.

    With RunnerSetting.AUTO a model pools if the directory lists sentence-transformers modules, or
    if its architecture has no language model's head. Raises ModelError.
    """
    name = read_architecture(directory)
    modules = directory / MODULES_FILE
    if runner is RunnerSetting.AUTO:
        pools = modules.exists() or not generates(name)
        runner = RunnerSetting.POOLING if pools else RunnerSetting.GENERATE
    if runner is RunnerSetting.GENERATE:
        return None
    path = directory / "config.json"
    reader = JsonReader(path, read_json_object(path))
    if name.endswith(CLASSIFIER):
        return _classifier(reader)
    return _embedder(directory, reader)


def _classifier(reader: JsonReader) -> PoolingConfig:
    labels = reader.raw("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else reader.integer("num_labels", 2)
    of_pairs = Activation.SIGMOID if num_labels == 1 else Activation.SOFTMAX
    activation = _OF_PROBLEMS.get(str(reader.raw("problem_type")), of_pairs)
    named = reader.raw("sbert_ce_default_activation_function")
    nested = reader.raw("sentence_transformers")
    if isinstance(nested, dict):
        named = nested.get("activation_fn", named)
    if named is not None:
        if named not in _ACTIVATIONS:
            raise UnsupportedModel(reader.path, f"the activation {named!r} is not supported")
        activation = of_pairs = _ACTIVATIONS[named]
    task = PoolingTask.CLASSIFY
    return PoolingConfig(task, None, activation, of_pairs, num_labels, may_shorten=False)


def _embedder(directory: Path, reader: JsonReader) -> PoolingConfig:
    kind, normalizes = None, True
    modules = directory / MODULES_FILE
    if modules.exists():
        kind, normalizes = _read_modules(modules)
    return PoolingConfig(
        PoolingTask.EMBED,
        kind,
        Activation.NORMALIZE if normalizes else Activation.NONE,
        max_seq_length=_max_seq_length(directory),
        may_shorten=reader.boolean("is_matryoshka", True),
        matryoshka_dimensions=reader.integers("matryoshka_dimensions"),
    )


def _read_modules(path: Path) -> tuple[PoolingType | None, bool]:
    try:
        modules: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(path, f"the file cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ModelFileError(path, "the file must hold a list of modules")
    kind, normalizes = None, False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name not in _KNOWN_MODULES:
            raise UnsupportedModel(path, f"the module {module.get('type')!r} is not supported")
        if name == "Pooling":
            kind = _pooling_type(path.parent / str(module.get("path", "")) / "config.json")
        normalizes |= name == "Normalize"
    return kind, normalizes


def _pooling_type(path: Path) -> PoolingType:
    config = read_json_object(path)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        if named not in _MODE_NAMES:
            raise UnsupportedModel(path, f"pooling_mode {named!r} is not supported")
        return _MODE_NAMES[named]
    chosen = [key for key in config if key.startswith("pooling_mode_") and config[key] is True]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        asked = ", ".join(sorted(chosen)) or "no pooling mode"
        supported = ", ".join(sorted(_MODES))
        raise UnsupportedModel(
            path, f"pooling has {asked}, but exactly one of these is supported: {supported}"
        )
    return _MODES[chosen[0]]


def _max_seq_length(directory: Path) -> int | None:
    path = directory / "sentence_bert_config.json"
    if not path.exists():
        return None
    reader = JsonReader(path, read_json_object(path))
    return reader.integer("max_seq_length") if "max_seq_length" in reader else None
