"""With --batch-invariant, the computations for CUDA have the same bits in every batch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from benchmarks.gpu.attention_check import Case
from benchmarks.gpu.invariance_check import InvarianceCheck, products_differ
from services.worker.backends.cuda.fixed_tiles import FixedTilesLinear
from services.worker.backends.device import CpuDevice
from tests.worker.interpreted.interpreted_ops import AnywhereSplitK, WideCpu


@pytest.fixture(autouse=True, scope="module")
def _rows_multiplied_alike() -> Iterator[None]:
    """Sums all products in the same order. Triton's interpreter multiplies tiles with NumPy's BLAS,
    which on some processors rounds a row differently at different places in the tile.
    """

    def create_dot(_: object, a: Any, b: Any, d: Any, *_options: object) -> Any:
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.mark.parametrize("bias", [False, True])
def test_products_have_torchs_bits_in_any_batch(bias: bool) -> None:
    torch.manual_seed(0)
    assert products_differ(CpuDevice(), torch.float32, 96, 200, bias=bias) == []
    weight, offsets, rows = torch.randn(200, 96), torch.randn(200), torch.randn(70, 96)
    linear = FixedTilesLinear(weight, offsets if bias else None)
    expected = torch.nn.functional.linear(rows, weight, offsets if bias else None)
    torch.testing.assert_close(linear(rows), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(linear.full(rows), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        Case(16, 4, 2, 32, dtype=torch.float32),
        Case(64, 4, 1, 16),
        Case(16, 2, 1, 32, window=20, dtype=torch.float32),
    ],
    ids=str,
)
def test_attention_has_the_same_bits_for_whole_and_chunked_prompts_in_any_batch(case: Case) -> None:
    check = InvarianceCheck(case, WideCpu(), [1, 37, 80], AnywhereSplitK)
    assert check.differing([[(2, 0, 80)], [(1, 0, 37)], [(0, 0, 1)]]) == []
    cuts = [
        [(1, 0, 20), (2, 0, 7)],
        [(1, 20, 21), (2, 7, 8)],
        [(0, 0, 1), (1, 21, 37), (2, 8, 79)],
        [(2, 79, 80)],
    ]
    assert check.differing(cuts) == []


def test_without_batch_invariance_key_splits_depend_on_the_number_of_lanes() -> None:
    """Shows that the test above is meaningful. Here the keys are split into parts of 256."""
    case = Case(64, 2, 1, 16, dtype=torch.float32)
    check = InvarianceCheck(
        case, WideCpu(), [260], AnywhereSplitK, max_model_len=512, batch_invariant=False
    )
    assert check.differing([[(0, 0, 259)], [(0, 259, 260)]]) == [(0, 259)]
