"""Reads the tensors of a model directory. The safetensors library memory-maps its files."""

import logging
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
from services.worker.models.files.gguf import BLOCK_TYPES, GgufFile
from services.worker.models.files.tensor_files import (
    GGUF_SUFFIX,
    INDEX_FILE,
    SINGLE_FILE,
    find_tensors,
    named,
)
from services.worker.models.files.tensor_info import TensorInfo

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
WHOLE = slice(None)
"""Selects a whole axis in an Index."""
Index = tuple[slice | int, ...]
"""The part to read along each axis. Axes without an entry are read whole."""

_READABLE = {"F32", "BF16", "F16", "F64", *BLOCK_TYPES}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a model directory, by name. They are read onto `device`."""

    directory: Path
    tensors: dict[str, TensorInfo]
    device: torch.device = CPU

    @property
    def source(self) -> Path:
        """The file to name in errors about the whole checkpoint."""
        named = (self.directory / name for name in (INDEX_FILE, SINGLE_FILE))
        return next(filter(Path.exists, named), None) or self.files[0]

    def prefixed(self, prefix: str, apart: str) -> "Checkpoint":
        """Returns a copy with `prefix` added to all tensor names except `apart`."""
        named = {
            name if name == apart else prefix + name: info for name, info in self.tensors.items()
        }
        return replace(self, tensors=named)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """The files with tensors, sorted by path."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    def check(
        self,
        expected: dict[str, tuple[int, ...]],
        others: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """Raises ModelTensorError unless the tensors are exactly `expected`.

        `others` maps names of tensors to the data types that they may have in addition to the types
        of unquantized weights. A scalar may also be stored as a vector of length 1.
        """
        missing = sorted(expected.keys() - self.tensors.keys())
        if missing:
            raise ModelTensorError(self.source, f"{named('tensor', missing)} missing")
        extra = sorted(self.tensors.keys() - expected.keys())
        if extra:
            unknown = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
            if unknown:
                raise ModelTensorError(
                    self.source, f"{named('tensor', unknown)} not part of this architecture"
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
        """Opens the files for reading. Raises ModelFileError if one cannot be opened."""
        with ExitStack() as stack:
            handles: dict[Path, Any] = {}
            for file in self.files:
                if file.suffix == GGUF_SUFFIX:
                    handles[file] = GgufFile(file)
                    continue
                try:
                    opened = safe_open(file, framework="pt", device=str(self.device))
                    handles[file] = stack.enter_context(opened)
                except (OSError, SafetensorError) as error:
                    raise ModelFileError(file, f"the file cannot be read: {error}") from error
            yield TensorReader(self, handles)


def check_dtype(tensor: TensorInfo, others: Collection[str] = ()) -> None:
    """Raises ModelTensorError unless the type is in `others` or a type of unquantized weights."""
    if tensor.dtype not in _READABLE and tensor.dtype not in others:
        raise ModelTensorError(
            tensor.file,
            f"tensor {tensor.name} has data type {tensor.dtype}, which is not supported",
        )


class TensorReader:
    def __init__(self, checkpoint: Checkpoint, handles: dict[Path, Any]) -> None:
        self._checkpoint = checkpoint
        self._handles = handles
        self._sizes: list[int] = []

    @property
    def device(self) -> torch.device:
        return self._checkpoint.device

    @property
    def num_bytes(self) -> int:
        """Bytes read so far, as stored in the files."""
        return sum(self._sizes)

    def dimensions(self, name: str) -> int:
        return len(self._checkpoint.tensors[name].shape)

    def read_parts(self, *parts: tuple[str, Index], dtype: torch.dtype) -> torch.Tensor:
        """Reads parts of tensors, each given by name and index, and stacks them along their first
        axis into a new tensor of `dtype`.
        """
        read = [self.read_part(name, index).to(dtype) for name, index in parts]
        return torch.cat(read) if len(read) > 1 else read[0].clone()

    def read_part(self, name: str, index: Index) -> torch.Tensor:
        """Reads a part of a tensor in its stored type, perhaps a view of the file. Thread-safe."""
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
        """Reads a quantized weight of a GGUF file, for computations in `dtype`."""
        tensor = self._checkpoint.tensors[name]
        self._sizes.append(tensor.num_bytes)
        weight: QuantizedWeight = self._handles[tensor.file].get_quantized(tensor.name, dtype)
        return weight.to(self.device)


def open_checkpoint(directory: Path, device: torch.device = CPU) -> Checkpoint:
    """Finds the tensors of a model directory and checks its files. Raises ModelFileError, and
    UnsupportedModel for an unsupported GGUF file.
    """
    found = find_tensors(directory)
    if found.unread is not None:
        logger.warning("%s", found.unread)
    return Checkpoint(directory, found.tensors, device)
