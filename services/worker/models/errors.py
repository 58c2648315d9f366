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


class ModelTensorError(ModelError):
    """The tensors are not those that config.json describes."""

    reason = "MODEL_TENSORS"
