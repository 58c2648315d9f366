"""Which kernels a worker uses. Without a compiler it uses torch's."""

import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.errors import Aborted
from services.worker.backends.choices import KernelsSetting
from services.worker.backends.kernels import Kernels
from services.worker.backends.native.cached_library import CachedLibrary
from services.worker.backends.native.compiled import (
    NotCompiled,
    default_cache_directory,
    load_compiled,
)
from services.worker.backends.native.kernels import NativeKernels
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.platforms.cpu_kernels import KernelsUnavailable, select_kernels

ROOT = Path(__file__).parents[3]


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.fixture
def with_compiler() -> str:
    """The path of the C++ compiler. Skips the test if there is none."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no compiler")
    return compiler


def select(setting: KernelsSetting, cache: Path, *, batch_invariant: bool = True) -> Kernels:
    return select_kernels(setting, cache, lambda: None, batch_invariant=batch_invariant)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_torch_serves_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert type(select(KernelsSetting.AUTO, tmp_path)) is TorchKernels
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "kernels: torch, batch-invariant, which are slower than native kernels: "
    )


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_native_kernels_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=r"^native kernels cannot be used: "):
        select(KernelsSetting.NATIVE, tmp_path)


def test_the_setting_torch_selects_torchs_kernels(tmp_path: Path) -> None:
    assert type(select(KernelsSetting.TORCH, tmp_path)) is TorchKernels
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_the_setting_batch_invariant_applies_to_torchs_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batch_invariant: bool
) -> None:
    with caplog.at_level(logging.INFO):
        kernels = select(KernelsSetting.TORCH, tmp_path, batch_invariant=batch_invariant)
    assert kernels.padded_rows(1) == (4 if batch_invariant else 1)
    mode = "batch-invariant" if batch_invariant else "not batch-invariant"
    assert caplog.messages == [f"kernels: torch, {mode}, as set by --kernels"]


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, with_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "failing-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  *bfloat16.cpp*) echo "fatal error: out of patience" >&2; exit 1;;\n'
        "  *.cpp*) exit 0;;\n"
        "esac\n"
        f'exec {with_compiler} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        NotCompiled, match=r"^the C\+\+ compiler failed: fatal error: out of patience$"
    ):
        load_compiled(tmp_path / "cache", lambda: None)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_stopping_the_start_does_not_wait_for_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "slow-compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 300\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    def end() -> None:
        raise Aborted("the worker was stopped while it loaded the model")

    began = time.monotonic()
    with pytest.raises(Aborted):
        load_compiled(tmp_path / "cache", end)
    assert time.monotonic() - began < 60


@pytest.fixture
def quick_compiler(tmp_path: Path, with_compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "float32.cpp").write_text(
        'extern "C" int panel_width() { return 16; }\n'
        'extern "C" int tile_palettes() { return 1; }\n'
    )
    compiler = tmp_path / "quick-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *-shared*) echo made >> {tmp_path}/made;; esac\n'
        'for argument in "$@"; do\n'
        "  shift\n"
        '  case "$argument" in\n'
        f'    */float32.cpp) argument="{tmp_path}/float32.cpp";;\n'
        '    *.cpp) argument="-xc++ /dev/null -xnone";;\n'
        "  esac\n"
        '  case "$argument" in -xc*) set -- "$@" $argument;; *) set -- "$@" "$argument";; esac\n'
        "done\n"
        f'exec {with_compiler} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.mark.usefixtures("quick_compiler")
def test_kernels_that_cannot_be_cached_are_used_by_this_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO):
        library = load_compiled(tmp_path / "file" / "cache", lambda: None)
    assert library.panel_width() == 16
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    expected = (
        f"the compiled kernels cannot be stored in {tmp_path}/file/cache, and are compiled again "
        "at the next start: Not a directory"
    )
    assert warning.getMessage() == expected


@pytest.mark.usefixtures("quick_compiler")
def test_damaged_kernels_are_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_compiled(tmp_path / "cache", lambda: None).panel_width() == 16
    [kept] = (tmp_path / "cache").rglob("*.so")
    whole = kept.read_bytes()
    # The library is truncated, as after a crash. A new file is needed, as the old one is mapped.
    kept.unlink()
    kept.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.INFO):
        assert load_compiled(tmp_path / "cache", lambda: None).panel_width() == 16
    assert "the cached kernels are damaged or incomplete, and are compiled again" in caplog.messages
    assert len(kept.read_bytes()) >= len(whole)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load_compiled(tmp_path / "cache", lambda: None)
    assert caplog.messages == []


def test_a_full_disk_leaves_no_part_of_a_library(tmp_path: Path) -> None:
    """A limit on the size of files has the same effect as a full disk."""
    whole = tmp_path / "whole.so"
    whole.write_bytes(bytes(100_000))
    cached = CachedLibrary(tmp_path / "cache", "kernels")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            cached.put(whole)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not cached.exists
    assert cached.load() is None
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("quick_compiler")
def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from services.worker.backends.native.compiled "
        "import load_compiled; print(load_compiled(Path(sys.argv[1]), lambda: None).panel_width())"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "cache")],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    first, second = (process.communicate(timeout=280)[0] for process in starts)
    assert int(first) == int(second) == 16
    assert (tmp_path / "made").read_text() == "made\n"


@pytest.mark.usefixtures("native")
def test_native_kernels_are_selected_if_they_compile() -> None:
    assert isinstance(select(KernelsSetting.AUTO, default_cache_directory()), NativeKernels)
