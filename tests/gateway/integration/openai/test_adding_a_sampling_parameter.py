"""Adds a sampling parameter `top_a` to a copy of the repository, layer by layer. The imports and
tests report each layer that lacks the parameter.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[4]
CHECK = "tests/gateway/unit/openai/test_sampling_parameters.py"
PROTO, DATACLASS = "protos/stepwell/common/v1/common.proto", "services/common/request/sampling.py"
BODIES, SAMPLER = (
    "services/gateway/adapters/http/openai/sampling_fields.py",
    "services/worker/sampling/filters.py",
)
DOCUMENT = "docs/sampling.md"
FLAGS = "services/cli/arguments.py"
COPIED = ("services", "gen", "pyproject.toml", PROTO, DOCUMENT, CHECK)
BEING_WRITTEN = shutil.ignore_patterns("*.pyc.*")
"""Ignores temporary bytecode files that other processes are still writing."""


class Tree:
    def __init__(self, root: Path) -> None:
        self._root = root
        self.changed: set[str] = set()
        for name in COPIED:
            source, target = REPOSITORY / name, root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=BEING_WRITTEN)
            else:
                shutil.copy(source, target)

    def add_after(self, name: str, line: str, added: str) -> None:
        """Adds a line to a file, after the only line that begins with `line`."""
        path = self._root / name
        lines = path.read_text().splitlines()
        (index,) = [index for index, text in enumerate(lines) if text.startswith(line)]
        path.write_text("\n".join([*lines[: index + 1], added, *lines[index + 1 :], ""]))
        self.changed.add(name)

    def generate(self) -> None:
        failed = self._run("-m", "grpc_tools.protoc", "-Iprotos", "--python_out=gen", PROTO)
        assert not failed

    def import_problem(self, module: str) -> str:
        """The error output if the import of a module fails, otherwise an empty text."""
        return self._run("-c", f"import {module}")

    def failed_checks(self) -> set[str]:
        report = self._run("-m", "pytest", "-q", "-rf", CHECK)
        failures = [line for line in report.splitlines() if line.startswith("FAILED ")]
        return {line.split("::")[1].split(" ")[0] for line in failures}

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self._root,
            env={"PYTHONPATH": f"{self._root}:{self._root / 'gen'}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr if done.returncode else ""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_new_parameter_touches_six_files_and_none_can_be_forgotten(tree: Tree) -> None:
    tree.add_after(PROTO, "  optional float min_p = 4;", "  optional float top_a = 99;")
    tree.generate()
    assert "differ in ['top_a']" in tree.import_problem("services.common.request.messages")

    tree.add_after(DATACLASS, "    min_p: float = 0.0", "    top_a: float = 0.0")
    lacking = tree.import_problem("services.gateway.adapters.http.openai.sampling")
    assert "request bodies lack the sampling parameters ['top_a']" in lacking

    tree.add_after(BODIES, "    min_p: float | None = None", "    top_a: float | None = None")
    assert tree.failed_checks() == {
        "test_the_documentation_has_a_row_for_each_parameter",
        "test_worker_or_scheduler_read_each_parameter",
        "test_every_parameter_has_an_example",
        "test_the_terminal_has_a_flag_for_each_number",
    }

    tree.add_after(DOCUMENT, "| `min_p` |", "| `top_a` | 0 | 0 to 1 | |")
    tree.add_after(SAMPLER, "    min_p: float = 0.0", "    top_a: float = 0.0")
    tree.add_after(SAMPLER, "    limit = size = len(logits)", "    assert filters.top_a == 0")
    tree.add_after(CHECK, '    "min_p":', '    "top_a": ({"top_a": 0.5}, 0.5),')
    flag = '    ("top_a", _number, "drop improbable tokens"),'
    tree.add_after(FLAGS, '    ("presence_penalty", _number', flag)
    assert not tree.failed_checks()
    assert tree.changed - {CHECK} == {PROTO, DATACLASS, BODIES, DOCUMENT, SAMPLER, FLAGS}
