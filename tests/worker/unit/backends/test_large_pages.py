"""Memory in large pages: allocations are disjoint, keep contents, and outlive their allocator."""

import gc

import pytest
import torch

from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.out_of_memory import NotEnoughMemory, memory_for


def test_pieces_do_not_touch_each_other() -> None:
    memory = LargePages()
    shapes = [(3, 5), (1,), (700, 64), (17_000_000,), (0, 7), (2, 3, 4), (5_000_000,)]
    pieces = [
        memory.take(shape, dtype)
        for shape in shapes
        for dtype in (torch.bfloat16, torch.float32)
        for _ in range(2)
    ]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    del memory
    gc.collect()
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        assert (piece == number).all()


def test_the_first_piece_begins_with_a_large_page() -> None:
    piece = LargePages().take((8 * 2**20,), torch.float32)
    assert piece.data_ptr() % 2**21 == 0
    assert piece.shape == (8 * 2**20,)
    assert piece.is_contiguous()


def test_an_allocation_beyond_the_machines_memory_names_a_remedy() -> None:
    more_than_can_be_addressed = (2**50,)
    with (
        pytest.raises(NotEnoughMemory, match="for the weights; use a machine with more"),
        memory_for("the weights", "use a machine with more"),
    ):
        LargePages().take(more_than_can_be_addressed, torch.uint8)
