"""Finds the tensors of a model directory from the headers of its files: one safetensors file,
shards with an index, or a GGUF file.

Headers are checked here, so that a damaged file is reported before anything is loaded. A
safetensors file is an 8-byte little-endian length, a JSON header, and the tensors' bytes:
https://huggingface.co/docs/safetensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.worker.models.errors import ModelFileError, ModelTensorError
from services.worker.models.files.gguf_tensors import read_gguf
from services.worker.models.files.json_file import read_json_object
from services.worker.models.files.other_weights import no_weights
from services.worker.models.files.tensor_info import TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GGUF_SUFFIX = ".gguf"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """The tensors of a model directory by name, and a note on tensors that are not read."""

    tensors: dict[str, TensorInfo]
    unread: str | None = None
    """A sentence for the log. It is None if all tensors are read."""


def find_tensors(directory: Path) -> TensorFiles:
    """Returns the tensors of a directory. If there is an index, each tensor is read from the file
    that the index names, and other files are ignored. Raises ModelError.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if index.exists():
        return _read_shards(directory, index)
    if single.exists():
        return TensorFiles({tensor.name: tensor for tensor in read_header(single)})
    files = list(directory.glob(f"*{GGUF_SUFFIX}"))
    if len(files) == 1:
        return TensorFiles(read_gguf(files[0]))
    raise no_weights(directory, single, INDEX_FILE)


def read_header(file: Path) -> list[TensorInfo]:
    """Returns a safetensors file's tensors in the order of their bytes. Raises ModelFileError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
                raise ModelFileError(file, f"the file is incomplete: it ends after {size} bytes")
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise ModelFileError(file, "the file is missing") from None
    except OSError as error:
        raise ModelFileError(file, f"the file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(file, f"the header is not valid JSON: {error}") from error
    tensors = _parse_header(file, header, _LENGTH_BYTES + length)
    needed = max((tensor.end for tensor in tensors), default=0)
    if needed > size:
        raise ModelFileError(
            file,
            f"the file is incomplete: its header describes {needed} bytes, but the file has {size}",
        )
    return tensors


def named(noun: str, names: list[str]) -> str:
    """A phrase such as 'tensor a is' or 'tensors a, b and 3 more are'."""
    if len(names) == 1:
        return f"{noun} {names[0]} is"
    shown, rest = names[:2], len(names) - 2
    more = f" and {rest} more" if rest else ""
    return f"{noun}s {', '.join(shown)}{more} are"


def _parse_header(file: Path, header: object, base: int) -> list[TensorInfo]:
    tensors = []
    try:
        for name, entry in header.items():  # type: ignore[attr-defined]
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape = tuple(int(size) for size in entry["shape"])
            tensors.append(
                TensorInfo(name, file, str(entry["dtype"]), shape, base + begin, base + end)
            )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelFileError(
            file, "the header is not a valid header of a safetensors file"
        ) from error
    return sorted(tensors, key=lambda tensor: (tensor.begin, tensor.name))


def _read_shards(directory: Path, index: Path) -> TensorFiles:
    weight_map = _read_weight_map(index)
    shards = {
        file_name: {tensor.name: tensor for tensor in _read_shard(directory, file_name)}
        for file_name in sorted(set(weight_map.values()))
    }
    tensors = {}
    for name, file_name in weight_map.items():
        if name not in shards[file_name]:
            raise ModelTensorError(directory / file_name, f"tensor {name} is missing")
        tensors[name] = shards[file_name][name]
    unlisted = sorted({name for shard in shards.values() for name in shard} - tensors.keys())
    unread = [f"{named('tensor', unlisted)} not listed in the index"] if unlisted else []
    if (directory / SINGLE_FILE).exists():
        unread.append(f"the index does not list {SINGLE_FILE}")
    return TensorFiles(
        tensors,
        f"only the tensors in the index {index} are read: {'; '.join(unread)}" if unread else None,
    )


def _read_shard(directory: Path, file_name: str) -> list[TensorInfo]:
    single = directory / SINGLE_FILE
    if not (directory / file_name).exists() and single.exists():
        raise ModelFileError(
            directory / file_name,
            f"the file is missing; to read {SINGLE_FILE} instead, remove {INDEX_FILE}",
        )
    return read_header(directory / file_name)


def _read_weight_map(index: Path) -> Mapping[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index, "weight_map must map tensor names to files")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelFileError(index, f"weight_map has {file_name!r}, which is not a file name")
    return weight_map
