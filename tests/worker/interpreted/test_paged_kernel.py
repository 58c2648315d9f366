"""Paged attention as on CUDA equals explicit attention over one sequence at a time."""

import pytest
import torch

from benchmarks.gpu.attention_check import AttentionCheck, Case
from services.worker.backends.cuda import sub_chunks
from tests.worker.interpreted.interpreted_ops import AnywhereSplitK, WideCpu

# Each pair of values of page size, ratio of heads and kind of window, not all combinations.
CASES = [
    Case(16, 4, 4, 32),
    Case(32, 4, 2, 64),
    Case(64, 8, 2, 128),
    Case(256, 4, 1, 16),
    Case(16, 4, 1, 32, window=20),
    Case(32, 4, 4, 16, window=7),
    Case(64, 4, 2, 32, window=64),
    Case(256, 4, 2, 16, window=100),
    Case(16, 3, 1, 32, dtype=torch.float32),
    Case(16, 4, 2, 24, window=20, dtype=torch.float32, softcap=3.0),
]


def tolerance(case: Case) -> float:
    return 2e-3 if case.dtype is torch.float16 else 1e-5


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decodes_and_chunks_equal_plain_attention(case: Case) -> None:
    """Three decodes in four lanes, a later chunk in two lanes, and a chunk at a prompt's start."""
    torch.manual_seed(1)
    check = AttentionCheck(case, WideCpu(), 5, 1024, AnywhereSplitK)
    check.store([0, 37, 300, 45, 0])
    assert check.step([1, 1, 1, 17, 3]) < tolerance(case)


def test_lanes_in_several_calls_equal_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight lanes of 16 queries are cut into calls of two lanes, with at most 34 rows of a grid."""
    monkeypatch.setattr(sub_chunks, "_MOST_GRID_ROWS", 34)
    case = Case(16, 2, 1, 16, window=20)
    torch.manual_seed(1)
    check = AttentionCheck(case, WideCpu(), 2, 128, AnywhereSplitK)
    check.store([30, 0])
    assert check.step([40, 20]) < tolerance(case)


@pytest.mark.parametrize("case", [Case(32, 4, 2, 32), Case(32, 4, 2, 32, window=9)], ids=str)
def test_stale_values_in_a_block_do_not_change_results(case: Case) -> None:
    torch.manual_seed(3)
    check = AttentionCheck(case, WideCpu(), 3, 256, AnywhereSplitK)
    for pool in check.attention.pools(0):
        pool.fill_(torch.nan)
    check.store([5, 40, 20])
    assert check.step([1, 1, 18]) < tolerance(case)


@pytest.mark.parametrize("case", [Case(16, 4, 2, 32), Case(16, 4, 2, 32, window=9)], ids=str)
def test_a_recorded_decode_program_can_be_replayed_with_other_inputs(case: Case) -> None:
    torch.manual_seed(2)
    check = AttentionCheck(case, WideCpu(), 3, 256, AnywhereSplitK)
    check.store([0, 15, 40])
    assert check.recorded_steps(2) < tolerance(case)
