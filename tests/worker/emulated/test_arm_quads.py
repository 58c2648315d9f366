"""Sums of products of bytes are exact with the instructions of each kind of ARM processor."""

import subprocess
from pathlib import Path

import pytest

from services.worker.backends.native.build import FLAGS, SOURCES
from services.worker.backends.native.prebuilt import ARM_KINDS, Kind
from tests.worker.emulated.arm import COMPILER, EmulatedLibrary, compile_calls, require_tools
from tests.worker.unit.backends.test_native_quads import PROGRAM, assert_exact


@pytest.mark.parametrize("kind", ARM_KINDS, ids=lambda kind: kind.name)
def test_sums_are_exact(kind: Kind, tmp_path: Path) -> None:
    require_tools()
    source, library = tmp_path / "sums.cpp", tmp_path / "sums.so"
    source.write_text(PROGRAM)
    command = [COMPILER, *FLAGS, *kind.flags, "-I", str(SOURCES), "-shared", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    compile_calls(tmp_path)
    arm = EmulatedLibrary(library, tmp_path)
    assert_exact(lambda *given: arm.call("sums", *given), arm.copy)
    arm.close()
