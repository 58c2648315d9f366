"""Tensors in safetensors files, one file or shards with an index, or in a GGUF file.

Headers are read and checked here, so that a damaged file is reported before anything is loaded. The
bytes are then mapped by the safetensors library.
Format: https://huggingface.co/docs/safetensors, an 8-byte little-endian length, a JSON header,
and the tensors' bytes.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.worker.backends.quantized import QuantizedWeight
from services.worker.models.errors import ModelFileError, ModelTensorError
from services.worker.models.gguf_blocks import BLOCK_TYPES
from services.worker.models.gguf_file import GgufFile, read_gguf
from services.worker.models.json_file import read_json_object
from services.worker.models.tensor_info import TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CPU = torch.device("cpu")
_LENGTH_BYTES = 8
WHOLE = slice(None)
"""Everything along an axis."""
Index = tuple[slice | int, ...]
"""The part along each axis that is read; an axis without an index is read whole."""

_GGUF_SUFFIX = ".gguf"
_READABLE = {"F32", "BF16", "F16", "F64", *BLOCK_TYPES}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Every tensor of a model directory by name. `device`: where tensors are read to."""

    directory: Path
    tensors: dict[str, TensorInfo]
    device: torch.device = CPU

    @property
    def source(self) -> Path:
        """The file that an error about the whole checkpoint names."""
        index = self.directory / INDEX_FILE
        single = self.directory / SINGLE_FILE
        if single.exists() or index.exists():
            return single if single.exists() else index
        return self.files[0]

    def prefixed(self, prefix: str, apart: str) -> "Checkpoint":
        """The same, each tensor known by its name with this prefix, except one called `apart`."""
        named = {
            name if name == apart else prefix + name: info for name, info in self.tensors.items()
        }
        return replace(self, tensors=named)

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in the files."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """The files with tensors, in order."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    def check(
        self,
        expected: dict[str, tuple[int, ...]],
        others: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """Raises ModelTensorError unless the tensors are exactly `expected`. `others`: data types
        that a tensor may have besides those of unquantized weights. A number may also be stored as
        a vector of one.
        """
        missing = sorted(expected.keys() - self.tensors.keys())
        if missing:
            raise ModelTensorError(self.source, f"{_named('tensor', missing)} missing")
        extra = sorted(self.tensors.keys() - expected.keys())
        if extra:
            unknown = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
            if unknown:
                raise ModelTensorError(
                    self.source, f"{_named('tensor', unknown)} not part of this architecture"
                )
        for name, shape in expected.items():
            tensor = self.tensors[name]
            if tensor.shape != shape and (shape or tensor.shape != (1,)):
                raise ModelTensorError(
                    tensor.file,
                    f"tensor {name} has shape {list(tensor.shape)}, "
                    f"but config.json describes {list(shape)}",
                )
            check_dtype(tensor, others.get(name, ()))

    @contextmanager
    def open(self) -> Iterator["TensorReader"]:
        """Maps the files for reading. Raises ModelFileError when one cannot be opened."""
        with ExitStack() as stack:
            handles: dict[Path, Any] = {}
            for file in self.files:
                if file.suffix == _GGUF_SUFFIX:
                    handles[file] = GgufFile(file)
                    continue
                try:
                    opened = safe_open(file, framework="pt", device=str(self.device))
                    handles[file] = stack.enter_context(opened)
                except (OSError, SafetensorError) as error:
                    raise ModelFileError(file, f"the file cannot be read: {error}") from error
            yield TensorReader(self, handles)


def check_dtype(tensor: TensorInfo, others: Collection[str] = ()) -> None:
    """Raises ModelTensorError for a data type that is neither of unquantized weights nor one of
    `others`.
    """
    if tensor.dtype not in _READABLE and tensor.dtype not in others:
        raise ModelTensorError(
            tensor.file, f"tensor {tensor.name} has data type {tensor.dtype}, which is not read"
        )


class TensorReader:
    """Reads tensors of an open checkpoint."""

    def __init__(self, checkpoint: Checkpoint, handles: dict[Path, Any]) -> None:
        self._checkpoint = checkpoint
        self._handles = handles
        self._sizes: list[int] = []

    @property
    def device(self) -> torch.device:
        """Where tensors are read to."""
        return self._checkpoint.device

    @property
    def num_bytes(self) -> int:
        """The number of bytes read so far, in the stored data types."""
        return sum(self._sizes)

    def dimensions(self, name: str) -> int:
        """The number of a tensor's axes."""
        return len(self._checkpoint.tensors[name].shape)

    def read_parts(self, *parts: tuple[str, Index], dtype: torch.dtype) -> torch.Tensor:
        """Parts of tensors, each by name and index, stacked along their first axis, as a new tensor
        of `dtype`. Only the parts are read.
        """
        read = [self.read_part(name, index).to(dtype) for name, index in parts]
        return torch.cat(read) if len(read) > 1 else read[0].clone()

    def read_part(self, name: str, index: Index) -> torch.Tensor:
        """A part of a tensor, in its stored data type, perhaps a view of the file. Thread-safe."""
        tensor = self._checkpoint.tensors[name]
        handle, stored_name = self._handles[tensor.file], tensor.name
        taken = zip(index, tensor.shape, strict=False)
        if all(isinstance(x, slice) and x.indices(n) == (0, n, 1) for x, n in taken):
            part: torch.Tensor = handle.get_tensor(stored_name)
        else:
            part = handle.get_slice(stored_name)[index]
        self._sizes.append(part.nbytes)
        return part.to(self.device)

    def read_quantized(self, name: str, dtype: torch.dtype) -> QuantizedWeight:
        """A weight that a GGUF file holds quantized, for a computation in `dtype`."""
        tensor = self._checkpoint.tensors[name]
        self._sizes.append(tensor.num_bytes)
        weight: QuantizedWeight = self._handles[tensor.file].get_quantized(tensor.name, dtype)
        return weight.to(self.device)


def open_checkpoint(directory: Path, device: torch.device = CPU) -> Checkpoint:
    """Finds the tensors of a model directory and checks its files. Raises ModelFileError, and
    UnsupportedModel for a GGUF file that is not read.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists():
        return Checkpoint(
            directory, {tensor.name: tensor for tensor in read_header(single)}, device
        )
    files = list(directory.glob(f"*{_GGUF_SUFFIX}"))
    if not index.exists() and len(files) == 1:
        return Checkpoint(directory, read_gguf(files[0]), device)
    if not index.exists():
        raise ModelFileError(single, f"the file is missing, and so is {INDEX_FILE}")
    return Checkpoint(directory, _read_shards(directory, index), device)


def read_header(file: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, in the order of their bytes. Raises ModelFileError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
                raise ModelFileError(file, f"the file is cut short: it ends after {size} bytes")
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise ModelFileError(file, "the file is missing") from None
    except OSError as error:
        raise ModelFileError(file, f"the file cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelFileError(file, f"the header is not valid JSON: {error}") from error
    tensors = _parse_header(file, header, _LENGTH_BYTES + length)
    needed = max((tensor.end for tensor in tensors), default=0)
    if needed > size:
        raise ModelFileError(
            file, f"the file is cut short: its header describes {needed} bytes, it has {size}"
        )
    return tensors


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
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFileError(file, "the header is not that of a safetensors file") from error
    return sorted(tensors, key=lambda tensor: (tensor.begin, tensor.name))


def _read_shards(directory: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index, "weight_map must map tensor names to files")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelFileError(index, f"weight_map names {file_name!r}, which is no file name")
    tensors = {}
    for file_name in sorted(set(weight_map.values())):
        for tensor in read_header(directory / file_name):
            tensors[tensor.name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ModelTensorError(directory / file_name, f"tensor {name} is missing")
    return tensors


def _named(noun: str, names: list[str]) -> str:
    """'tensor a is', 'tensors a, b and 3 more are'."""
    if len(names) == 1:
        return f"{noun} {names[0]} is"
    shown, rest = names[:2], len(names) - 2
    more = f" and {rest} more" if rest else ""
    return f"{noun}s {', '.join(shown)}{more} are"
