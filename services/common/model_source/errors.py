"""The errors of a failed search for a model. Each message is one sentence."""

from pathlib import Path


class ModelSourceError(ValueError):
    """A model does not exist or cannot be read."""


class GgufError(ModelSourceError):
    """A file is damaged or is not a GGUF file."""

    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.problem = problem
