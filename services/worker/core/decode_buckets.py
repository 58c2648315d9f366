"""Runs decode-only steps as recorded programs, which work on fixed memory.

A step of n decodes runs the program for the next power of two. A lane is a row of a program's
input, used or not. Only the step's inputs are copied into the program's memory, so a device can
record the program once and replay it without calls from Python, as with CUDA graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from services.worker.backends.arrays import Int64Array
from services.worker.backends.attention import LayerAttention, StepLayout
from services.worker.backends.device import Device
from services.worker.models.model import Model, ModelInput


class DecodeStep(LayerAttention, Protocol):
    """Attention for decode-only steps. Each step's inputs overwrite those of the previous step."""

    @property
    def num_lanes(self) -> int:
        """The number of tokens that the program computes, including unused lanes."""

    def set(self, layouts: Sequence[StepLayout]) -> None:
        """Copies in the inputs of a step of at most `num_lanes` decodes. `layouts` has one layout
        for each KV-cache group. Unused lanes write to the null block, and not to blocks of
        requests.
        """


class StaticAttention(Protocol):
    """An attention implementation for decode-only steps that can be recorded and replayed."""

    def decode_step(self, num_decodes: int) -> DecodeStep:
        """Returns attention for `num_decodes`, rounded up to a power of two."""


@dataclass(eq=False)
class DecodeBuckets:
    """The programs of a model, one for each number of lanes."""

    model: Model
    attention: StaticAttention
    device: Device
    _programs: "dict[int, _Program]" = field(init=False, default_factory=dict)

    def logits(
        self, token_ids: torch.Tensor, positions: Int64Array, layouts: Sequence[StepLayout]
    ) -> torch.Tensor:
        """Returns the logits of n decodes, float32 [n, vocab_size], valid until the next call."""
        step = self.attention.decode_step(layouts[0].num_decodes)
        program = self._programs.get(step.num_lanes)
        if program is None:
            program = self._programs[step.num_lanes] = _Program(self.model, step, self.device)
        return program.run(token_ids, positions, layouts)


class _Program:
    def __init__(self, model: Model, step: DecodeStep, device: Device) -> None:
        lanes, there = step.num_lanes, device.torch_device
        self._device = device
        self._step = step
        self._token_ids = torch.zeros(lanes, dtype=torch.int64, device=there)
        self._positions = torch.zeros(lanes, dtype=torch.int64, device=there)
        given = ModelInput(self._token_ids, self._positions, step)

        def logits() -> torch.Tensor:
            _, computed = model.forward(given)
            assert computed is not None
            return computed

        self._run = device.record(logits)

    def run(
        self, token_ids: torch.Tensor, positions: Int64Array, layouts: Sequence[StepLayout]
    ) -> torch.Tensor:
        count = layouts[0].num_decodes
        self._step.set(layouts)
        self._token_ids[:count].copy_(token_ids)
        self._token_ids[count:].zero_()  # so that all unused lanes use the same experts
        self._positions[:count].copy_(self._device.upload(positions), non_blocking=True)
        self._positions[count:].zero_()
        return self._run()[:count]
