"""How precompiled kernels are built, and which of them a worker selects for its processor."""

import itertools
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from services.worker.backends.native import compiled, tiles
from services.worker.backends.native.build import NAME
from services.worker.backends.native.prebuilt import (
    X86_KINDS,
    Kind,
    build,
    kinds_for,
    load_prebuilt,
)

AMX, VBMI, BF16, AVX512, AVX2 = (kind.features for kind in X86_KINDS)


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the kernels' sources by a function that returns the compiler's target."""
    found = shutil.which("c++")
    if found is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "kind.cpp").write_text(
        "#if defined(STEPWELL_TILES)\n#define KIND 4\n"
        "#elif defined(__AVX512VBMI__)\n#define KIND 3\n"
        "#elif defined(__AVX512BF16__)\n#define KIND 2\n"
        "#elif defined(__AVX512F__)\n#define KIND 1\n"
        '#else\n#define KIND 0\n#endif\nextern "C" int kind() { return KIND; }\n'
        'extern "C" int tile_palettes() { return 0; }\n'
    )
    compiler = tmp_path / "quick-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'for argument in "$@"; do\n'
        "  shift\n"
        '  case "$argument" in\n'
        f'    */float32.cpp) set -- "$@" "{tmp_path}/kind.cpp";;\n'
        '    *.cpp) set -- "$@" -xc++ /dev/null -xnone;;\n'
        '    *) set -- "$@" "$argument";;\n'
        "  esac\n"
        "done\n"
        f'exec {found} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.mark.usefixtures("quick_compiler")
def test_the_best_kernels_for_the_processor_are_loaded(tmp_path: Path) -> None:
    build(tmp_path / "built", X86_KINDS)

    def taken(features: frozenset[str]) -> int | None:
        library = load_prebuilt(features, tmp_path / "built")
        return None if library is None else library.kind()

    assert taken(AMX) == 4
    assert taken(VBMI | {"amx_tile"}) == 3
    assert taken(BF16) == 2
    assert taken(AVX512 | {"avx512vbmi"}) == 1
    assert taken(AVX512 - {"avx512vl"}) == 0
    assert taken(AVX2) == 0
    assert taken(AVX2 - {"fma"}) is None


@pytest.mark.usefixtures("quick_compiler")
def test_kernels_find_the_openmp_library_beside_them(tmp_path: Path) -> None:
    build(tmp_path, X86_KINDS[-1:])
    built = tmp_path / X86_KINDS[-1].name
    assert sorted(path.name for path in built.iterdir()) == [
        "libgomp.so.1",
        f"{NAME}.sha256",
        f"{NAME}.so",
    ]
    listed = subprocess.run(
        ["readelf", "--dynamic", str(built / f"{NAME}.so")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "$ORIGIN" in listed.stdout


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_kind_needs_what_the_next_one_needs(machine: str) -> None:
    for better, worse in itertools.pairwise(kinds_for(machine)):
        assert better.features > worse.features


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (
            "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt "
            "fcma lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs "
            "paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng",
            "neon-bf16",
        ),
        (
            "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc "
            "dcpop asimddp ssbs",
            "neon-dot",
        ),
        ("fp asimd evtstrm crc32 cpuid", "neon"),
    ],
    ids=["Graviton 3", "Graviton 2", "Raspberry Pi 4"],
)
def test_the_kind_of_an_arm_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str, expected: str
) -> None:
    information = tmp_path / "cpuinfo"
    information.write_text(f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {features}\n")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    found = compiled.processor_features(information)
    usable = [kind.name for kind in kinds_for("aarch64") if kind.features <= found]
    assert usable[0] == expected


@pytest.mark.usefixtures("quick_compiler")
def test_damaged_kernels_are_skipped(tmp_path: Path) -> None:
    build(tmp_path, X86_KINDS)
    (tmp_path / X86_KINDS[-2].name / f"{NAME}.so").write_bytes(b"")
    library = load_prebuilt(AVX512, tmp_path)
    assert library is not None
    assert library.kind() == 0


@pytest.mark.usefixtures("quick_compiler")
def test_a_worker_uses_prebuilt_kernels_instead_of_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, [Kind("avx2", (), AVX2)])
    monkeypatch.setattr(
        compiled, "load_prebuilt", lambda features: load_prebuilt(features, tmp_path)
    )
    monkeypatch.setattr(compiled, "processor_features", lambda: AVX2)
    assert compiled.load_compiled(tmp_path / "cache", lambda: None).kind() == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("refusal", ["No space left on device", None])
def test_without_usable_tiles_the_next_kernels_are_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusal: str | None,
) -> None:
    """The operating system does not permit the use of tiles, or the processor has none."""
    build(tmp_path, X86_KINDS[:2])
    monkeypatch.setattr(
        compiled, "load_prebuilt", lambda features: load_prebuilt(features, tmp_path)
    )
    monkeypatch.setattr(compiled, "processor_features", lambda: AMX)
    monkeypatch.setattr(tiles, "refusal", lambda: refusal)
    for _ in range(2):
        assert compiled.load_compiled(tmp_path / "cache", lambda: None).kind() == 3
    reason = refusal or "the processor reports no tile palette"
    assert caplog.messages == [
        f"the compiled kernels do not use the processor's tile registers (AMX): {reason}"
    ]
