"""Errors of model directories.

    ModelError
    ├── ModelFileError          a file is missing, truncated, or of another format
    ├── ModelConfigError        config.json has a wrong or contradictory value
    │   └── UnsupportedModel    config.json describes a model that this worker cannot run
    └── ModelTensorError        the tensors do not match config.json

Each message is one sentence that names the file and the problem. Each error ends the startup.
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
    """A file is missing, truncated, or of another format."""

    reason = "MODEL_FILE"


class ModelConfigError(ModelError):
    """config.json has a wrong or contradictory value."""

    reason = "MODEL_CONFIG"


class UnsupportedModel(ModelConfigError):
    """config.json describes a model that this worker cannot run."""

    reason = "MODEL_UNSUPPORTED"


def quantized(path: Path, quantization_config: object) -> UnsupportedModel:
    """The error for quantized weights. The message names the method if config.json does."""
    values = quantization_config if isinstance(quantization_config, dict) else {}
    method = values.get("quant_method")
    how = f"weights quantized by {str(method)[:40]!r}" if method else "quantized weights"
    return UnsupportedModel(path, f"quantization_config: {how} are not supported")


class ModelTensorError(ModelError):
    """The tensors do not match config.json."""

    reason = "MODEL_TENSORS"
