"""Compares attention over a paged cache with plain attention over contiguous keys and values.

Plain attention is computed in float32, one sequence after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from services.worker.backends.attention import AttentionLayer, AttentionShape, StepLayout
from services.worker.backends.cuda.paged_attention import XformersPagedAttention
from services.worker.backends.device import Device
from services.worker.backends.torch.paged_attention import TorchPagedAttention
from services.worker.platforms.cuda_setup import suits_xformers


@dataclass(frozen=True, slots=True)
class Case:
    """The shape of a model and a KV cache."""

    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: torch.dtype = torch.float16
    softcap: float | None = None

    @property
    def layer(self) -> AttentionLayer:
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return AttentionLayer(*heads, self.head_dim**-0.5, self.window, self.softcap)


@dataclass(slots=True)
class AttentionCheck:
    """Checks attention over `num_sequences` sequences in shuffled blocks."""

    case: Case
    device: Device
    num_sequences: int
    max_model_len: int
    split_k: Any = None
    attention: Any = field(init=False)
    tables: np.ndarray = field(init=False)
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        case, there = self.case, self.device.torch_device
        width = self.max_model_len // case.block_size
        num_blocks = self.num_sequences * width + 1
        shape = AttentionShape((case.layer,), case.block_size, num_blocks, case.dtype, there)
        self.attention = (
            XformersPagedAttention(shape, self.device, width, self.split_k)
            if suits_xformers(shape.layers)
            else TorchPagedAttention(shape, self.device, batch_invariant=False)
        )
        blocks = np.random.default_rng(0).permutation(num_blocks - 1) + 1
        self.tables = blocks.reshape(self.num_sequences, width).astype(np.int32)
        empty = self.random(0, case.num_kv_heads)
        self.keys = [empty] * self.num_sequences
        self.values = [empty] * self.num_sequences

    def random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        """Normal random numbers, [num_tokens, num_heads, head_dim]."""
        case, there = self.case, self.device.torch_device
        return torch.randn(num_tokens, num_heads, case.head_dim, device=there).to(case.dtype)

    def store(self, lengths: list[int]) -> None:
        """Appends `lengths[i]` random keys and values to sequence i, like earlier steps."""
        for sequence, length in enumerate(lengths):
            key, value = (self.random(length, self.case.num_kv_heads) for _ in range(2))
            slots = self._grow(sequence, key, value)
            blocks = self.device.upload(np.unique(slots // self.case.block_size))
            opened = () if suits_xformers([self.case.layer]) else (blocks,)
            self.attention.store(0, self.device.upload(slots), *opened, key, value)

    def step(self, counts: list[int]) -> float:
        """Computes `counts[i]` new tokens of sequence i. Returns the largest difference from plain
        attention.

        A difference is relative if the expected value's magnitude is at least 1, and absolute
        otherwise. NaN counts as infinite.
        """
        query, key, value = self._new(sum(counts))
        layout = self._layout(counts, key, value)
        output = self.attention.begin_step([layout])(0, query, key, value, None)
        assert output.dtype is self.case.dtype
        return self._difference(output, query, counts)

    def recorded_steps(self, num_steps: int) -> float:
        """Runs steps of one token per sequence as one recorded program (CUDA graph). Returns the
        largest difference of any step, measured as in `step`.
        """
        counts = [1] * self.num_sequences
        step = self.attention.decode_step(self.num_sequences)
        inputs = self._new(step.num_lanes)
        run = self.device.record(lambda: step(0, *inputs, None))
        worst = 0.0
        for _ in range(num_steps):
            query, key, value = self._new(self.num_sequences)
            step.set([self._layout(counts, key, value)])
            for own, new in zip(inputs, (query, key, value), strict=True):
                own[: self.num_sequences].copy_(new)
            output = run()[: self.num_sequences]
            worst = max(worst, self._difference(output, query, counts))
        return worst

    def _new(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        case = self.case
        return (
            self.random(num_tokens, case.num_heads),
            self.random(num_tokens, case.num_kv_heads),
            self.random(num_tokens, case.num_kv_heads),
        )

    def _grow(self, sequence: int, key: torch.Tensor, value: torch.Tensor) -> np.ndarray:
        """Appends keys and values to a sequence, and returns the slots of the new tokens."""
        start, block_size = len(self.keys[sequence]), self.case.block_size
        self.keys[sequence] = torch.cat((self.keys[sequence], key))
        self.values[sequence] = torch.cat((self.values[sequence], value))
        positions = np.arange(start, start + len(key), dtype=np.int64)
        blocks = self.tables[sequence, positions // block_size]
        slots: np.ndarray = blocks * block_size + positions % block_size
        return slots

    def _layout(self, counts: list[int], key: torch.Tensor, value: torch.Tensor) -> StepLayout:
        parts = zip(torch.split(key, counts), torch.split(value, counts), strict=True)
        for sequence, part in enumerate(parts):
            self._grow(sequence, *part)
        lengths = np.array([len(keys) for keys in self.keys], np.int32)
        return StepLayout(
            num_decodes=counts.count(1),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            seq_lens=lengths,
            rows=np.arange(len(counts), dtype=np.int32),
            tables=self.tables,
            block_size=self.case.block_size,
        )

    def _difference(self, output: torch.Tensor, query: torch.Tensor, counts: list[int]) -> float:
        parts = enumerate(torch.split(query, counts))
        expected = torch.cat([self._attend_plainly(sequence, part) for sequence, part in parts])
        difference = (output.float() - expected).abs() / expected.abs().clamp(min=1)
        return float(difference.nan_to_num(nan=torch.inf).max())

    def _attend_plainly(self, sequence: int, query: torch.Tensor) -> torch.Tensor:
        case = self.case
        keys, values = (
            whole[sequence].float().repeat_interleave(case.num_heads // case.num_kv_heads, dim=1)
            for whole in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * case.head_dim**-0.5
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        positions = torch.arange(len(keys), device=query.device)
        distance = positions[len(keys) - len(query) :, None] - positions
        hidden = distance < 0
        if case.window is not None:
            hidden |= distance >= case.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
