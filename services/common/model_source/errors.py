"""The errors of a failed search for a model. Each message is one sentence."""

import enum
from pathlib import Path


class ModelSourceError(ValueError):
    """A model does not exist or cannot be read."""


class GgufError(ModelSourceError):
    """A file is damaged or is not a GGUF file."""

    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.problem = problem


class HubCause(enum.Enum):
    """Why the hub did not return files of a model."""

    GATED = enum.auto()
    NO_MODEL = enum.auto()
    NO_REVISION = enum.auto()
    NO_WEIGHTS = enum.auto()
    TOKEN = enum.auto()
    """The hub rejects the token."""
    REFUSED = enum.auto()
    """The hub returns another HTTP error."""
    OFFLINE = enum.auto()
    """HF_HUB_OFFLINE is set."""
    UNREACHABLE = enum.auto()
    DAMAGED = enum.auto()
    """A file differs from the hub's checksum."""
    NO_SPACE = enum.auto()
    WRITING = enum.auto()
    """A file cannot be written. `__cause__` is the OSError."""


class HubError(ModelSourceError):
    """The hub did not return files of a model, or they cannot be written."""

    def __init__(self, cause: HubCause, sentence: str) -> None:
        super().__init__(sentence)
        self.cause = cause
