"""Finds the directory and the served name of a model that a setting names."""

from pathlib import Path

from services.common.model_source.errors import ModelSourceError
from services.common.model_source.gguf_directory import SUFFIX, gguf_directory, single_gguf
from services.common.model_source.hub import (
    fetch_snapshot,
    find_snapshot,
    name_of_snapshot,
    parse_hub_name,
)


def find_model(text: str) -> Path:
    """Returns the directory of a model with its weights. Raises ModelSourceError. `text` is the
    path of a directory or of a GGUF file, or a name of the Hugging Face hub such as
    Qwen/Qwen3-0.6B. A name may end with @ and a revision.
    """
    return _find(text, with_weights=True)


def find_model_files(text: str) -> Path:
    """Returns the directory of a model, which may lack the weights. Raises ModelSourceError."""
    return _find(text, with_weights=False)


def model_name(directory: Path) -> str:
    """The default served name of a model: its hub name, or else the directory's name."""
    directory = directory.absolute()
    return name_of_snapshot(directory) or directory.resolve().name


def _find(text: str, *, with_weights: bool) -> Path:
    path = Path(text).expanduser()
    if path.is_dir():
        return _with_configuration(path)
    if path.exists() and path.suffix == SUFFIX:
        return gguf_directory(path)
    if path.exists():
        raise ModelSourceError(f"{path} is neither a directory nor a GGUF file")
    name = parse_hub_name(text)
    kind = "GGUF file" if path.suffix == SUFFIX else "directory"
    missing = ModelSourceError(f"there is no {kind} {path}")
    if name is None:
        raise missing
    cached = find_snapshot(name, with_weights=with_weights)
    if cached is not None:
        return _with_configuration(cached)
    # Without this check, a mistyped path would be looked up on the hub.
    if "/" not in name.repo or Path(name.repo).parent.exists():
        raise missing
    return _with_configuration(fetch_snapshot(name, with_weights=with_weights))


def _with_configuration(directory: Path) -> Path:
    """Returns `directory` or, if the model is a GGUF file, the directory generated for the file."""
    file = single_gguf(directory)
    return directory if file is None else gguf_directory(file)
