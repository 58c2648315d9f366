"""Each option of the gateway is removed from a copy of the tree, and the rest still works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
COPIED = ("services", "gen", "tests/gateway", "pyproject.toml")
LISTED = "services/gateway/options/listed.py"
OPTIONS = sorted(path.parent.name for path in (REPOSITORY / LISTED).parent.glob("*/__init__.py"))
"""Folders of options. Each one's tests have a module `without.py`: the tests of a gateway without
the option.
"""
OTHER_TESTS = ("tests/gateway/integration/grpc/test_gateway_grpc_limits.py",)
BEING_WRITTEN = shutil.ignore_patterns("*.pyc.*")
"""Bytecode of another process that has not been renamed yet."""


@pytest.mark.parametrize("option", OPTIONS)
def test_the_rest_works_without_an_option(option: str, tmp_path: Path) -> None:
    copy_tree(tmp_path)
    own_tests = tmp_path / "tests/gateway/options" / option
    tests = [shutil.move(own_tests / "without.py", own_tests.parent), *OTHER_TESTS]
    remove(option, tmp_path)
    importers = [
        path
        for path in (tmp_path / "services").rglob("*.py")
        if f"options.{option}" in (text := path.read_text()) or f"import {option}" in text
    ]
    assert importers == []
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def copy_tree(root: Path) -> None:
    """Copies the files that the tests need."""
    for name in COPIED:
        source, target = REPOSITORY / name, root / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=BEING_WRITTEN)
        else:
            shutil.copy(source, target)
    for source in (REPOSITORY / "tests").glob("*.py"):
        shutil.copy(source, root / "tests")


def remove(option: str, root: Path) -> None:
    """Removes an option as a person would: its folder, its tests, and its lines of the list, which
    have a name that is imported from it.
    """
    for folder in ("services/gateway/options", "tests/gateway/options"):
        shutil.rmtree(root / folder / option)
    listed = root / LISTED
    text = listed.read_text()
    [imported] = re.findall(rf"^from services\.gateway\.options\.{option} import (.+)$", text, re.M)
    its = re.compile(rf"\b({imported.replace(', ', '|')})\b")
    lines = text.splitlines(keepends=True)
    listed.write_text("".join(line for line in lines if not its.search(line)))
