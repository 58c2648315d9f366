"""Which kernels a worker computes with, and that it starts without a compiler, and says so."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.kernels.compiled import (
    NotCompiled,
    default_cache_directory,
    load_compiled,
)
from services.worker.kernels.errors import KernelsUnavailable
from services.worker.kernels.native_kernels import NativeKernels
from services.worker.kernels.select import KernelsSetting, select_kernels
from services.worker.kernels.torch_kernels import TorchKernels

ROOT = Path(__file__).parents[3]


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.fixture
def with_compiler() -> str:
    """The compiler; skips where compiling is not possible anyway."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or shutil.which("ninja") is None:
        pytest.skip("there is no compiler, or no ninja")
    return compiler


def select(setting: KernelsSetting, cache: Path) -> object:
    return select_kernels(setting, cache, lambda: None)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_torch_serves_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(select(KernelsSetting.AUTO, tmp_path), TorchKernels)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("kernels: torch, which is slower: ")


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_native_kernels_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=r"^native kernels cannot be used: "):
        select(KernelsSetting.NATIVE, tmp_path)


def test_torch_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    assert isinstance(select(KernelsSetting.TORCH, tmp_path), TorchKernels)
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, with_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "failing-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *attention.cpp*) echo "fatal error: out of patience" >&2; exit 1;; esac\n'
        f'exec {with_compiler} "$@" -O0\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NotCompiled, match=r"^compiling failed: fatal error: out of patience$"):
        load_compiled(tmp_path / "cache", lambda: None)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotCompiled, match="cannot be kept or loaded"):
        load_compiled(tmp_path / "file" / "cache", lambda: None)


def test_processes_that_start_at_once_compile_once(
    tmp_path: Path, with_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler takes a note of each library that it makes, and does not optimize."""
    note, noting = tmp_path / "made", tmp_path / "compiler"
    noting.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *-shared*) echo made >> {note};; esac\n'
        f'exec {with_compiler} "$@" -O0\n'
    )
    noting.chmod(0o755)
    program = (
        "import sys; from pathlib import Path; "
        "from services.worker.kernels.compiled import load_compiled; "
        "print(load_compiled(Path(sys.argv[1]), lambda: None).panel_width())"
    )
    monkeypatch.setenv("CXX", str(noting))
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "cache")],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    first, second = (process.communicate(timeout=90)[0] for process in starts)
    assert int(first) == int(second) > 0
    assert note.read_text() == "made\n"


@pytest.mark.usefixtures("native")
def test_native_kernels_are_taken_where_they_can_be_had() -> None:
    assert isinstance(select(KernelsSetting.AUTO, default_cache_directory()), NativeKernels)
