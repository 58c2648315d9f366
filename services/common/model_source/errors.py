"""Errors of finding a model. Each message is one sentence."""

from pathlib import Path


class ModelSourceError(ValueError):
    """A model is not there, or cannot be read."""


class GgufError(ModelSourceError):
    """A file is not a GGUF file, or is damaged."""

    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.problem = problem
