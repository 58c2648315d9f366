"""Known defects that can be planted in the services. The TOML files of this folder list them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Defect:
    name: str
    sentence: str
    """One sentence about what the defect breaks."""
    path: str
    """The file that is changed, relative to the root of the tree."""
    before: str
    after: str

    def plant(self, root: Path) -> None:
        """Replaces `before` by `after` in the file `path` of the tree `root`. Raises ValueError
        unless `before` occurs exactly once.
        """
        file = root / self.path
        text = file.read_text()
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: {self.path} has its text {count} times")
        changed = text.replace(self.before, self.after)
        file.unlink()  # writes a new file, because the old one may be a hard link
        file.write_text(changed)


def all_defects() -> list[Defect]:
    """The defects of all files, in the order of files and of their lines."""
    tables = [
        table
        for file in sorted(Path(__file__).parent.glob("*.toml"))
        for table in tomllib.loads(file.read_text())["defect"]
    ]
    return [Defect(**table) for table in tables]
