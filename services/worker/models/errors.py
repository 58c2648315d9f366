"""What can be wrong with a model directory.

    ModelError
    ├── ModelFileError          a file is missing, cut short, or not what its name says
    ├── ModelConfigError        config.json asks for something wrong or contradictory
    │   └── UnsupportedModel    it asks for something that this worker does not have
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
    """A file is missing, cut short, or not what its name says."""

    reason = "MODEL_FILE"


class ModelConfigError(ModelError):
    """config.json holds a wrong or contradictory value."""

    reason = "MODEL_CONFIG"


class UnsupportedModel(ModelConfigError):
    """config.json asks for something that this worker does not have."""

    reason = "MODEL_UNSUPPORTED"


def quantized(path: Path, quantization_config: object) -> UnsupportedModel:
    """The refusal of quantized weights, by the name of their method where there is one."""
    told = quantization_config if isinstance(quantization_config, dict) else {}
    method = told.get("quant_method")
    how = f"weights quantized by {str(method)[:40]!r}" if method else "quantized weights"
    return UnsupportedModel(path, f"quantization_config: {how} are not read")


class ModelTensorError(ModelError):
    """The tensors are not those that config.json describes."""

    reason = "MODEL_TENSORS"
