"""The output of `stepwell doctor` equals what the operating system reports about the machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.cli.doctor.kernels import choose_kernels, prebuilt_reasons
from services.cli.doctor.machine import processor_name
from services.cli.doctor.report import Fact, json_of, text_of
from services.cli.doctor.run import Work, work_of
from services.worker.backends.native.prebuilt import X86_KINDS
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.files.tensor_info import TensorInfo

DEMO = Path("models/demo")


def test_the_report_is_true_and_names_nobody(tmp_path: Path) -> None:
    home = tmp_path / "somebody"
    home.mkdir()
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    ran = subprocess.run(
        [sys.executable, "-m", "services.cli", "doctor", "--json", "--model", DEMO.absolute()],
        env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout)
    info = Path("/proc/cpuinfo").read_text()
    assert found["machine"]["processors"] == len(os.sched_getaffinity(0))
    assert sum(found["machine"]["numa_nodes"].values()) == len(os.sched_getaffinity(0))
    assert found["machine"]["processor"] in info
    assert set(found["machine"]["features"]) <= set(info.split())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = found["machine"]["memory"]
    assert memory["available_bytes"] < memory["total_bytes"] == pytest.approx(pages, rel=0.01)
    assert any("kernels:" in line for line in found["kernels"]["log"])
    assert all(0.1 < found["limits"][name]["gflops"] < 1e5 for name in ("float32", "bfloat16"))
    assert 0.1 < found["limits"]["memory"]["gb_per_s"] < 1e4
    run = found["run"]
    assert run["model"]["name"] == "demo"
    dtype = run["model"]["dtype"]
    weights = (DEMO / "model.safetensors").stat().st_size * getattr(torch, dtype).itemsize / 2
    assert run["bandwidth"]["step_bytes"] == pytest.approx(weights, rel=0.01)
    for figure, limit in (("arithmetic", dtype), ("bandwidth", "memory")):
        assert 0 < run[figure]["share"] < 20, figure
        unit = "gflops" if figure == "arithmetic" else "gb_per_s"
        share = run[figure][unit] / found["limits"][limit][unit]
        assert run[figure]["share"] == pytest.approx(share, abs=0.05, rel=0.1)
    for private in (str(home), socket.gethostname(), cache, str(DEMO.absolute().parent)):
        assert private not in ran.stdout


def test_without_a_compiler_the_reason_for_torchs_kernels_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    kernels, facts = choose_kernels(lambda _: None)
    found = json_of({"kernels": facts})["kernels"]
    assert isinstance(kernels, TorchKernels)
    assert found["chosen"] == "torch"
    assert "used" not in found["prebuilt"].values()
    (line,) = found["log"]
    assert line.startswith("kernels: torch")


def test_each_kind_of_prebuilt_kernels_has_its_reason(tmp_path: Path) -> None:
    kinds = {kind.name: kind.features for kind in X86_KINDS}
    for name in ("avx512", "avx2", "amx"):
        (tmp_path / name).mkdir()
    has_tiles, usable = kinds["amx"], kinds["avx512-bf16-vbmi"]
    assert prebuilt_reasons(has_tiles, usable, "avx512", tmp_path) == {
        "amx": "this process may not use tiles",
        "avx512-bf16-vbmi": "not part of this installation",
        "avx512-bf16": "not part of this installation",
        "avx512": "used",
        "avx2": "avx512 is better",
    }
    reasons = prebuilt_reasons(kinds["avx2"], kinds["avx2"], None, tmp_path)
    assert reasons["avx2"] == "its files are damaged"
    assert reasons["avx512"].startswith("the processor lacks avx512bw ")


@pytest.mark.parametrize(
    ("implementer", "part", "expected"),
    [
        ("0x41", "0xd40", "Neoverse V1, implementer 0x41, part 0xd40"),
        ("0x41", "0xd08", "ARM, implementer 0x41, part 0xd08"),
        ("0x61", "0x022", "Apple, implementer 0x61, part 0x022"),
        ("0x48", "0xd01", "unknown, implementer 0x48, part 0xd01"),
    ],
    ids=["Graviton 3", "Raspberry Pi 4", "Apple M1", "Kunpeng 920"],
)
def test_an_arm_processor_is_named_by_its_numbers(
    tmp_path: Path, implementer: str, part: str, expected: str
) -> None:
    core = (
        "BogoMIPS\t: 2100.00\nFeatures\t: fp asimd evtstrm\n"
        f"CPU implementer\t: {implementer}\nCPU architecture: 8\nCPU variant\t: 0x1\n"
        f"CPU part\t: {part}\nCPU revision\t: 1\n"
    )
    information = tmp_path / "cpuinfo"
    information.write_text("\n".join(f"processor\t: {index}\n{core}" for index in range(2)))
    assert processor_name(information) == expected
    information.write_text("processor\t: 0\n")
    assert processor_name(information) == "unknown"


def test_directories_are_left_out_of_text_and_json() -> None:
    problem = "kernels cannot be cached in /home/ann/.cache/stepwell: 3 GiB/s, and/or ~/a/b.so"
    report = {"kernels": [Fact("log", [problem, {"at": "'/srv/x/y'"}], problem)]}
    kept = "kernels cannot be cached in stepwell: 3 GiB/s, and/or b.so"
    assert json_of(report) == {"kernels": {"log": [kept, {"at": "'y'"}]}}
    assert text_of(report) == f"kernels\n  log               {kept}"


def test_the_work_of_a_token_counts_the_experts_that_it_uses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 8, "num_experts_per_tok": 2}')
    shapes = {
        "model.embed_tokens.weight": (100, 10),
        "model.layers.0.norm.weight": (10,),
        "model.layers.0.q.weight": (10, 10),
        **{f"model.layers.0.mlp.experts.{n}.up.weight": (40, 10) for n in range(8)},
    }
    own = {name: TensorInfo(name, tmp_path, "BF16", shape, 0, 0) for name, shape in shapes.items()}
    work = work_of(Checkpoint(tmp_path, own), torch.float32)
    assert work == Work(step_bytes=4 * (1000 + 10 + 100 + 800), flops=2 * (100 + 800))
    own["lm_head.weight"] = TensorInfo("lm_head.weight", tmp_path, "BF16", (70, 10), 0, 0)
    work = work_of(Checkpoint(tmp_path, own), torch.bfloat16)
    assert work == Work(step_bytes=2 * (700 + 10 + 100 + 800), flops=2 * (100 + 800))
    own["lm_head.weight"] = TensorInfo("lm_head.weight", tmp_path, "I32", (70, 2), 0, 0)
    assert work_of(Checkpoint(tmp_path, own), torch.bfloat16) is None


@pytest.mark.parametrize("config", ['{"num_experts": null}', '{"num_local_experts": 0}'])
def test_a_configuration_may_say_that_it_has_no_experts(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    layer = "model.layers.0.q.weight"
    own = {layer: TensorInfo(layer, tmp_path, "F32", (10, 10), 0, 0)}
    assert work_of(Checkpoint(tmp_path, own), torch.float32) == Work(step_bytes=400, flops=200)
