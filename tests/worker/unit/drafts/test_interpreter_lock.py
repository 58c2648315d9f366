"""If no draft is found, the compute thread keeps the interpreter's lock from the beginning of a
step until the model computes. The event loop, which then sends the answer to the step before,
should run while the model computes, and not earlier.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.core.drafts.draft_source import DraftSource, ProposerSource, SuffixSource
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import NewRequest, StepInput
from services.worker.speculation.config import SpeculativeConfig
from services.worker.speculation.ngram import NgramProposer
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import GREEDY, build_runner, ints
from tests.worker.suffix_reference import suffix_trees

ROWS = 3
NUM_STEPS = 20


class Waiting:
    def __init__(self) -> None:
        self.num_turns = 0
        self._ends = False
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs the thread inside the context, in which no thread is forced to release the lock. It
        shares the caller's processor, and so acquires the lock even if this is free for a very
        short time.
        """
        interval, processors = sys.getswitchinterval(), os.sched_getaffinity(0)
        sys.setswitchinterval(1000)
        os.sched_setaffinity(0, {min(processors)})
        self._thread.start()
        try:
            yield
        finally:
            self._ends = True
            os.sched_setaffinity(0, processors)
            sys.setswitchinterval(interval)
            self._thread.join()

    def turns_when_waiting(self) -> int:
        """Waits until the thread wants the lock, which takes longer than the thread sleeps. Returns
        its number of turns so far.
        """
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            pass
        return self.num_turns

    def _run(self) -> None:
        while not self._ends:
            self.num_turns += 1
            time.sleep(1e-5)


class Watched:
    def __init__(self, model: Any, waiting: Waiting) -> None:
        self._model = model
        self._waiting = waiting
        self.num_turns = 0

    def forward(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.num_turns = self._waiting.num_turns
        found: tuple[torch.Tensor, torch.Tensor | None] = self._model.forward(*arguments)
        return found


def _source(method: str) -> DraftSource | None:
    if method == "ngram":
        return ProposerSource(NgramProposer(SpeculativeConfig(4, 2, 4)))
    return SuffixSource(suffix_trees()) if method == "suffix" else None


def _entered(runner: ModelRunner) -> None:
    prompts = np.random.default_rng(3).permutation(90)[: 5 * ROWS].reshape(ROWS, 5)
    tables = np.arange(1, 1 + 8 * ROWS, dtype=np.int32).reshape(ROWS, 8)
    new = tuple(
        NewRequest(row, prompts[row].astype(np.int32), 5, GREEDY, (tables[row],))
        for row in range(ROWS)
    )
    rows = ints(*range(ROWS))
    runner.execute(StepInput(1, 0, rows, ints(*ROWS * [5]), ints(*ROWS * [0]), new_requests=new))


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_the_lock_is_kept_until_the_model_computes(tmp_path: Path, method: str) -> None:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path, "llama")
    runner = build_runner(tmp_path, num_blocks=40, source=_source(method))
    waiting = Waiting()
    watched = runner.model = Watched(runner.model, waiting)
    _entered(runner)
    most = 0 if method == "none" else 4
    turns = []
    with waiting.running():
        for number in range(1, 1 + NUM_STEPS):
            computed = ints(*ROWS * [4 + number + most * (number > 1)])
            step = StepInput(
                *(1, number, ints(*range(ROWS)), ints(*ROWS * [1 + most]), computed),
                num_draft_tokens=ints(*ROWS * [most]),
                draft_token_ids=ints(*ROWS * most * [-1]),
            )
            before = waiting.turns_when_waiting()
            if not runner.execute(step).num_draft_tokens.any():
                turns.append(watched.num_turns - before)
    # The first step may release the lock, because adding its prompts to suffix trees may take long.
    assert len(turns) > 2
    assert not any(turns[1:])
    assert waiting.num_turns > 1
