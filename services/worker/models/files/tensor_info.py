from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The file of a tensor, its stored data type and shape, and its bytes in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin
