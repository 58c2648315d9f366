from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA weights of a model's projections. `digest` is the SHA-256 of the adapter's files
    (adapter_files.py), `name` the name that clients use, and `path` the adapter's directory.
    """

    digest: bytes
    name: str
    path: str
