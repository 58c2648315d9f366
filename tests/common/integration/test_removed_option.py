"""Each service works after its options are removed from a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
COPIED = ("services", "gen", "pyproject.toml")
COPIED_TESTS = {
    "gateway": ("gateway",),
    "scheduler": ("scheduler", "scenarios", "conformance"),
    "worker": (),
}
"""Maps each service to the folders of `tests` that the tests of its options need."""
OTHER_TESTS = {
    "gateway": ["tests/gateway/integration/grpc/test_gateway_grpc_limits.py"],
    "scheduler": [
        "tests/scheduler/unit/test_scheduling_budget.py",
        "tests/conformance/test_recordings.py::test_decisions_are_those_recorded"
        "[16_prefix_evict_lru]",
    ],
    "worker": [],
}
BEING_WRITTEN = shutil.ignore_patterns("*.pyc.*")
"""Ignores temporary bytecode files that other processes are still writing."""


@pytest.mark.parametrize("service", OTHER_TESTS)
def test_the_rest_works_without_the_options(service: str, tmp_path: Path) -> None:
    """Removes one option after another. After each removal, no module may import the removed
    option, and the option's test module `without.py` must pass.
    """
    copy_tree(service, tmp_path)
    tests = [*OTHER_TESTS[service]]
    own_tests = Path("tests", service, "options")
    (tmp_path / own_tests).mkdir(parents=True, exist_ok=True)
    for path in sorted(REPOSITORY.glob(f"services/{service}/options/*/__init__.py")):
        option = path.parent.name
        without = REPOSITORY / own_tests / option / "without.py"
        tests.append(shutil.copy(without, tmp_path / own_tests / f"without_{option}.py"))
        remove(service, option, tmp_path)
        name = re.compile(rf"\b{service}\.options\.{option}\b|\boptions import .*\b{option}\b")
        importers = [
            one for one in (tmp_path / "services").rglob("*.py") if name.search(one.read_text())
        ]
        assert importers == []
    assert len(tests) > len(OTHER_TESTS[service])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def copy_tree(service: str, root: Path) -> None:
    for name in (*COPIED, *(f"tests/{folder}" for folder in COPIED_TESTS[service])):
        source, target = REPOSITORY / name, root / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=BEING_WRITTEN)
        else:
            shutil.copy(source, target)
    (root / "tests").mkdir(exist_ok=True)
    for source in (REPOSITORY / "tests").glob("*.py"):
        shutil.copy(source, root / "tests")


def remove(service: str, option: str, root: Path) -> None:
    """Removes an option as its documentation says: the option's folder, the folder of its tests,
    and all lines of `listed.py` that contain a name imported from it.
    """
    options = f"services/{service}/options"
    shutil.rmtree(root / options / option)
    shutil.rmtree(root / "tests" / service / "options" / option, ignore_errors=True)
    listed = root / options / "listed.py"
    text, package = listed.read_text(), rf"services\.{service}\.options\.{option}"
    [imported] = re.findall(rf"^from {package}(?:\.\w+)* import (.+)$", text, re.M)
    its = re.compile(rf"\b({imported.replace(', ', '|')})\b")
    lines = text.splitlines(keepends=True)
    listed.write_text("".join(line for line in lines if not its.search(line)))
