"""The GPU benchmark on a machine without a GPU, with only the packages that it needs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.outcome import attempt

ROOT = Path(__file__).parents[3]
ABSENT = (
    "grpc",
    "google",
    "opentelemetry",
    "stepwell",
    "uvloop",
    "httpx",
    "starlette",
    "tokenizers",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert capsys.readouterr().err == "There is no GPU here, so nothing was run.\n"


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["speed"])
    assert "there is no part speed" in capsys.readouterr().err


def test_a_failed_case_is_printed_with_the_place_of_its_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not attempt(lambda: 1 / 0 > 0, "| case")
    line = capsys.readouterr().out
    assert line.startswith("| case | FAILED: ZeroDivisionError: division by zero (test_gpu_program")


def test_no_part_imports_a_package_of_the_services() -> None:
    """docs/cuda.md names the needed packages. One is transformers, which needs tokenizers."""
    script = "import sys\n"
    script += "".join(f"sys.modules[{name!r}] = None\n" for name in ABSENT)
    script += "".join(f"import benchmarks.gpu.{name}\n" for name in ("__main__", *PARTS[:-1]))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
