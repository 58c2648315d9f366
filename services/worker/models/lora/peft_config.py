"""Reads adapter_config.json, in PEFT's format. Only LoRA that adds to projections is supported."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.request.adapter import CONFIG_FILE
from services.worker.models.errors import ModelConfigError, UnsupportedModel
from services.worker.models.files.json_file import JsonReader, read_json_object

_REFUSED = {
    "use_dora": "DoRA",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "modules_to_save": "modules that replace modules of the model",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "parameters that are not projections",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases",
    "fan_in_fan_out": "transposed weights",
    "arrow_config": "Arrow",
    "velora_config": "VeLoRA",
}
"""Fields that change what an adapter computes. They must be false, null or empty."""
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the base weights, so that an adapter no longer fits the model."""
_QUANTIFIERS = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_MOST_QUANTIFIERS = 4


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Rank and scale of an adapter's modules. Patterns are regular expressions that match the end
    of a module's name, after a dot. The first pattern that matches determines the rank or scale.
    """

    path: Path
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]

    def rank(self, module: str) -> int:
        return int(self._by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """The factor of the product BA: alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski)."""
        rank = self.rank(module)
        alpha = self._by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _by_pattern(self, patterns: dict[str, Any], module: str, default: float) -> float:
        for pattern, value in patterns.items():
            try:
                if re.match(rf"(?:.*\.)?(?:{pattern})$", module):
                    return float(value)
            except re.error as error:
                problem = f"the pattern {pattern!r} is not a regular expression: {error}"
                raise ModelConfigError(self.path, problem) from error
        return default


def read_peft_config(directory: Path) -> PeftConfig:
    """Reads and checks adapter_config.json. Raises a ModelError that names an unsupported field."""
    path = directory / CONFIG_FILE
    values = read_json_object(path)
    reader = JsonReader(path, values)
    if values.get("peft_type") != "LORA":
        raise UnsupportedModel(
            path, f"peft_type is {values.get('peft_type')!r}, but only LORA is supported"
        )
    for name, what in _REFUSED.items():
        if values.get(name):
            raise UnsupportedModel(path, f"{name}: {what} in an adapter are not supported")
    if values.get("bias", "none") != "none":
        problem = f"bias is {values['bias']!r}: biases in an adapter are not supported"
        raise UnsupportedModel(path, problem)
    how = str(values.get("init_lora_weights", "")).lower()
    if how.startswith(_CHANGED_BASES):
        problem = (
            f"init_lora_weights is {how!r}: the adapter was trained with changed base weights, so "
            "it does not fit this model"
        )
        raise UnsupportedModel(path, problem)
    return PeftConfig(
        path,
        r=reader.integer("r"),
        lora_alpha=reader.positive_float("lora_alpha"),
        use_rslora=bool(values.get("use_rslora")),
        rank_pattern={key: int(value) for key, value in _numbers(reader, "rank_pattern").items()},
        alpha_pattern=_numbers(reader, "alpha_pattern"),
    )


def _numbers(reader: JsonReader, name: str) -> dict[str, float]:
    """Returns the numbers of patterns. Raises UnsupportedModel for a pattern whose match might take
    hours, during which the worker could do nothing else.
    """
    patterns = reader.nested(name)
    for key in reader.raw(name) or ():
        if len(_QUANTIFIERS.findall(key)) > _MOST_QUANTIFIERS or _REPEATED_GROUP.search(key):
            problem = (
                f"{name}: the pattern {key[:80]!r} is not supported: it may have "
                f"{_MOST_QUANTIFIERS} of *, +, ? and {{, and none after a group"
            )
            raise UnsupportedModel(reader.path, problem)
    return {key: patterns.positive_float(key) for key in reader.raw(name) or ()}
