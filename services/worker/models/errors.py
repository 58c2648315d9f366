"""Errors of model directories.

    ModelError
    ├── ModelFileError          a file is missing, cut short, or of another format
    ├── ModelConfigError        config.json holds a wrong or contradictory value
    │   └── UnsupportedModel    it describes a model that this worker cannot run
    └── ModelTensorError        the tensors are not those that config.json describes

Each message is one sentence that names the file and the problem; it ends the worker's start.
"""

from pathlib import Path

from services.common.errors import StepwellError


class ModelError(StepwellError):
    """A model directory cannot be served."""

    reason = "MODEL_UNUSABLE"

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class ModelFileError(ModelError):
    """A file is missing, cut short, or of another format."""

    reason = "MODEL_FILE"


class ModelConfigError(ModelError):
    """config.json holds a wrong or contradictory value."""

    reason = "MODEL_CONFIG"


class UnsupportedModel(ModelConfigError):
    """config.json describes a model that this worker cannot run."""

    reason = "MODEL_UNSUPPORTED"


def quantized(path: Path, quantization_config: object) -> UnsupportedModel:
    """The error for quantized weights, with the name of their method if config.json gives it."""
    values = quantization_config if isinstance(quantization_config, dict) else {}
    method = values.get("quant_method")
    how = f"weights quantized by {str(method)[:40]!r}" if method else "quantized weights"
    return UnsupportedModel(path, f"quantization_config: {how} are not read")


class ModelTensorError(ModelError):
    """The tensors are not those that config.json describes."""

    reason = "MODEL_TENSORS"
