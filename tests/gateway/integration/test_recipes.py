"""Applies the recipes "A route" and "A service setting" of docs/contributing.md to a copy of the
repository. The tests in the recipes must pass.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "contributing.md"
COPIED = ("services", "tests", "gen", "deploy", "docs", "pyproject.toml")
FLAGS = "tests/common/unit/process/test_documented_flags.py"


class Tree:
    """A copy of the repository. Unchanged files and folders are symbolic links."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for name in COPIED:
            (root / name).symlink_to(REPOSITORY / name)

    def write(self, name: str, text: str) -> None:
        """Writes a file. Links to folders on its path are replaced by folders."""
        for folder in reversed(Path(name).parents[:-1]):
            path = self._root / folder
            if path.is_symlink():
                linked = path.readlink()
                path.unlink()
                path.mkdir()
                for entry in linked.iterdir():
                    (path / entry.name).symlink_to(entry)
        (self._root / name).unlink(missing_ok=True)
        (self._root / name).write_text(text)

    def change(self, name: str, hunk: str) -> None:
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        text = (self._root / name).read_text()
        assert text.count(f"\n{old}") == 1, f"{name} has not exactly once:\n{old}"
        self.write(name, text.replace(f"\n{old}", f"\n{new}"))

    def failed(self, *tests: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", *tests]
        done = subprocess.run(
            command,
            cwd=self._root,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return done.stdout + done.stderr if done.returncode else ""


def apply(recipe: str, tree: Tree) -> list[str]:
    """Applies the code blocks of a recipe in order. Returns the test files that it adds."""
    (section,) = re.findall(rf"^## {recipe}\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    added = []
    for kind, name, text in re.findall(
        r"^```(python|diff)\n(?:#|---) (\S+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL
    ):
        if kind == "diff":
            for hunk in text.split("@@\n"):
                tree.change(name, hunk)
        else:
            assert not (REPOSITORY / name).exists()
            tree.write(name, text)
            added += [name] if name.startswith("tests/") else []
    return added


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_recipes_lead_to_a_route_that_answers_and_a_setting_that_bounds_it(tree: Tree) -> None:
    tests = [*apply("A route", tree), *apply("A service setting", tree)]
    assert len(tests) == 2
    assert not tree.failed(*tests, FLAGS)
