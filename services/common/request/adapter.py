"""An adapter that requests may name in place of the model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """Weights that are added to a model's projections (LoRA): `digest` is the SHA-256 of its files,
    see adapter_files.py; `name` is what clients call it; `path` is its directory.
    """

    digest: bytes
    name: str
    path: str
