"""Runs each engine of a comparison in a process that measures one load at a time."""

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_EXIT_SECONDS = 30.0


class EngineEnded(Exception):
    """Raised when an engine's process ended without a result. Its error is on standard error."""


class EngineProcess:
    """Runs `python -m benchmarks.worker.engine_<name>` inside `with`.

    The engine is warm after `wait_ready`. It runs in the checkout at `root`, with additional
    `flags`. Output lines that do not begin with a brace are not answers, and are dropped.
    """

    def __init__(
        self,
        name: str,
        python: str,
        model: Path,
        threads: int,
        root: Path = ROOT,
        flags: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._root = root
        self._command = [python, "-m", _module(name, root)]
        self._command += ["--model", str(model), "--threads", str(threads), *flags]
        self._environment = _environment(name, threads, root)
        self._process: subprocess.Popen[str]

    def __enter__(self) -> "EngineProcess":
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            cwd=self._root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_ready(self) -> str:
        """Waits until the engine is warm. Returns its name and version."""
        return str(self._read()["engine"])

    def measure(self, load: str, number: int) -> float:
        """Measures a load in round `number`, and returns its figure."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _read raises EngineEnded
            print(json.dumps([load, number]), file=self._process.stdin, flush=True)
        return float(self._read()["value"])

    def processor_seconds(self) -> float:
        """Processor seconds that the engine's process and all its descendants have used so far."""
        ticks = sum(map(_ticks, _family(self._process.pid)))
        return ticks / os.sysconf("SC_CLK_TCK")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                content: dict[str, Any] = json.loads(line)
                return content
        raise EngineEnded(f"{self.name} ended with {self._process.wait()}")


def _module(name: str, root: Path) -> str:
    """The name of the engine's module, which differs in checkouts without benchmarks/worker."""
    if (root / "benchmarks" / "worker").is_dir():
        return f"benchmarks.worker.engine_{name}"
    return f"benchmarks.worker_{name}"


def _environment(name: str, threads: int, root: Path) -> dict[str, str]:
    path = os.pathsep.join((str(root), str(root / "gen")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    if name == "stepwell":
        # Compute threads that wait do not spin, as in the worker's process.
        environment["OMP_WAIT_POLICY"] = "passive"
    return environment


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for listed in children for child in listed.read_text().split()]
    return [pid, *(member for child in found for member in _family(child))]


def _ticks(pid: int) -> int:
    """Processor time of a process and its ended threads, in clock ticks."""
    _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    user, system = fields.split()[11:13]
    return int(user) + int(system)
