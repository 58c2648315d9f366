"""Paged attention through xFormers equals attention written out over one sequence at a time."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from services.worker.attention.interface import AttentionLayer, AttentionShape, StepLayout
from services.worker.attention.xformers_paged import XformersPagedAttention
from tests.worker.interpreted.interpreted_ops import InterpretedSplitK, WideCpu

MAX_MODEL_LEN = 1024
NUM_SEQUENCES = 5


@dataclass(frozen=True)
class Case:
    """A shape of model and cache."""

    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: torch.dtype = torch.float16


# Every page size, ratio of heads, and kind of window; pairs of them, not all combinations.
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
]


@dataclass
class World:
    """A cache, and beside it the keys and values of each sequence, whole."""

    case: Case
    attention: XformersPagedAttention
    tables: np.ndarray
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def remember(self, sequence: int, count: int) -> None:
        """So many tokens that an earlier step computed."""
        case = self.case
        key, value = torch.randn(2, count, case.num_kv_heads, case.head_dim, dtype=case.dtype)
        self.attention.store(0, torch.from_numpy(self.grow(sequence, key, value)), key, value)

    def grow(self, sequence: int, key: torch.Tensor, value: torch.Tensor) -> np.ndarray:
        """Appends to a sequence; the slots of what was appended."""
        start = len(self.keys[sequence])
        self.keys[sequence] = torch.cat((self.keys[sequence], key))
        self.values[sequence] = torch.cat((self.values[sequence], value))
        positions = np.arange(start, start + len(key), dtype=np.int64)
        blocks = self.tables[sequence, positions // self.case.block_size]
        return blocks * self.case.block_size + positions % self.case.block_size

    def step(self, counts: list[int]) -> float:
        """New tokens of each sequence; the largest difference to attention written out."""
        case, total = self.case, sum(counts)
        query = torch.randn(total, case.num_heads, case.head_dim, dtype=case.dtype)
        key, value = torch.randn(2, total, case.num_kv_heads, case.head_dim, dtype=case.dtype)
        slots = [
            self.grow(sequence, *new)
            for sequence, new in enumerate(zip(key.split(counts), value.split(counts), strict=True))
        ]
        lengths = np.array([len(keys) for keys in self.keys], np.int32)
        layout = StepLayout(
            num_decodes=counts.count(1),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            seq_lens=lengths,
            block_tables=self.tables[:, : -(-int(lengths.max()) // case.block_size)],
            slot_mapping=np.concatenate(slots),
        )
        output = self.attention.begin_step([layout])(0, query, key, value, None)
        expected = [
            self.attend_plainly(sequence, part) for sequence, part in enumerate(query.split(counts))
        ]
        assert output.dtype is case.dtype
        return float((output.float() - torch.cat(expected)).abs().max())

    def attend_plainly(self, sequence: int, query: torch.Tensor) -> torch.Tensor:
        case = self.case
        repeats = case.num_heads // case.num_kv_heads
        keys, values = (
            whole[sequence].float().repeat_interleave(repeats, dim=1)
            for whole in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * case.head_dim**-0.5
        own = torch.arange(len(keys) - len(query), len(keys))[:, None]
        distance = own - torch.arange(len(keys))
        hidden = distance < 0
        if case.window is not None:
            hidden |= distance >= case.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def build(case: Case) -> World:
    width = MAX_MODEL_LEN // case.block_size
    num_blocks = NUM_SEQUENCES * width + 1
    layer = AttentionLayer(
        case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim**-0.5, case.window
    )
    shape = AttentionShape((layer,), case.block_size, num_blocks, case.dtype)
    attention = XformersPagedAttention(shape, WideCpu(), width, InterpretedSplitK)
    blocks = np.random.default_rng(0).permutation(num_blocks - 1) + 1
    empty = torch.empty(0, case.num_kv_heads, case.head_dim, dtype=case.dtype)
    return World(
        case,
        attention,
        blocks.reshape(NUM_SEQUENCES, width).astype(np.int32),
        [empty] * NUM_SEQUENCES,
        [empty] * NUM_SEQUENCES,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decodes_beside_chunks(case: Case) -> None:
    """Three decodes in four lanes; a chunk after a past, in two lanes, and one without."""
    torch.manual_seed(1)
    world = build(case)
    for sequence, count in enumerate([0, 37, 300, 45]):
        world.remember(sequence, count)
    tolerance = 2e-3 if case.dtype is torch.float16 else 1e-5
    assert world.step([1, 1, 1, 17, 3]) < tolerance


def test_zeroed_blocks_hold_zeros_and_the_others_what_they_held() -> None:
    torch.manual_seed(2)
    world = build(CASES[0])
    world.remember(1, 40)
    world.attention.zero_blocks(world.tables[1, 1:2])
    world.keys[1][16:32] = world.values[1][16:32] = 0
    assert world.step([1, 1, 1, 1, 1]) < 2e-3
