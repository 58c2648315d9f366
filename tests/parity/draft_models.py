"""Draft models for tests, and recordings of the drafts that a worker proposes."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.worker.backends.arrays import Int32Array
from services.worker.core.batch.input_batch import InputBatch
from services.worker.core.drafts.draft_source import DraftSource, WantedDrafts
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import NewRequest, StepInput
from services.worker.core.worker import Worker


def save_perturbed(model: Path, directory: Path) -> Path:
    """Saves a copy of a model with noise on its matrices, small enough that most greedy tokens do
    not change. The noise has a hundredth of the standard deviation of each matrix.
    """
    shutil.copytree(model, directory)
    random = torch.Generator().manual_seed(5)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            noise = torch.randn(tensor.shape, generator=random)
            tensors[name] = (tensor + 0.01 * tensor.std() * noise).to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass(frozen=True)
class Proposed:
    """The drafts of one request in one step. `known` has the tokens before the drafts. `num_forced`
    is the number of drafts that a grammar forced.
    """

    known: list[int]
    drafts: list[int]
    num_forced: int
    num_accepted: int


class Recorded:
    """A DraftSource that returns and records the drafts of another DraftSource."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self._open: dict[int, tuple[list[int], list[int], int]] = {}
        self.proposed: list[Proposed] = []

    def propose(
        self, step: StepInput, batch: InputBatch, wanted: Sequence[WantedDrafts]
    ) -> Sequence[Sequence[int]]:
        rows = [int(step.rows[want.index]) for want in wanted]
        known = [batch.token_ids[row, : batch.num_tokens[row]].tolist() for row in rows]
        proposed = self._source.propose(step, batch, wanted)
        for row, tokens, drafts, want in zip(rows, known, proposed, wanted, strict=True):
            self._open[row] = (tokens, list(drafts), len(want.forced))
        return proposed

    def enter(self, requests: Sequence[NewRequest]) -> None:
        self._source.enter(requests)

    def sampled(self, rows: Int32Array, batch: InputBatch) -> None:
        self._source.sampled(rows, batch)

    def verified(self, rows: Int32Array, batch: InputBatch) -> None:
        for row in rows.tolist():
            known, drafts, num_forced = self._open.pop(row)
            num_sampled = int(batch.num_tokens[row]) - len(known)
            self.proposed.append(Proposed(known, drafts, num_forced, num_sampled - 1))
        self._source.verified(rows, batch)

    def forget(self, rows: Int32Array) -> None:
        self._source.forget(rows)

    def clear(self) -> None:
        self._source.clear()

    @property
    def num_drafts(self) -> int:
        return sum(len(of.drafts) for of in self.proposed)

    @property
    def num_accepted(self) -> int:
        return sum(of.num_accepted for of in self.proposed)


def record_drafts(worker: Worker) -> Recorded:
    """Starts to record the drafts that a worker proposes. Returns the recording."""
    runner = worker.runner
    assert isinstance(runner, ModelRunner)
    assert runner.drafter is not None
    recorded = runner.drafter.source
    if not isinstance(recorded, Recorded):
        recorded = runner.drafter.source = Recorded(recorded)
    recorded.proposed = []
    return recorded
