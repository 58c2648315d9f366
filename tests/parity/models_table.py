"""The table of model architectures in the documentation."""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@dataclass(frozen=True)
class Row:
    """A row of the table. `bfloat16` is the largest error that is tolerated with this data type."""

    architecture: str
    run_by: str
    kinds: tuple[str, ...]
    bfloat16: float


def rows() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines
    ]
    return [
        Row(architecture, run_by, tuple(kinds.split()), float(bfloat16))
        for architecture, run_by, kinds, bfloat16, _ in cells
    ]
