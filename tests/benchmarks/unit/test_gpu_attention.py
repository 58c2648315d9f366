"""Measuring a GPU where there is none says so, and is a failure."""

import pytest
import torch

from benchmarks.gpu.__main__ import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert capsys.readouterr().err == "There is no GPU here, so nothing was run.\n"
