"""Replicas in this process whose models write given texts.

The output of a model with random weights is unpredictable. Therefore the logit of the given text's
next token is raised before sampling. Everything else is computed normally.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.in_process import InProcess
from benchmarks.worker.texts import Text
from services.worker.core.drafts.draft_model import DraftModel
from services.worker.core.model_runner import ModelRunner
from services.worker.core.worker import Worker
from services.worker.models.model import Model, ModelInput
from services.worker.settings import WorkerSettings

RAISED = 1e4
"""Amount added to the logit of the given next token. It exceeds any difference between logits."""
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 32


class ToldModel:
    """A Model that writes a given text, at the cost of normal generation.

    It counts its steps, and times each step with at most one token per request. `clock` returns
    seconds.
    """

    def __init__(self, model: Model, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._next_tokens = torch.zeros(MAX_MODEL_LEN, dtype=torch.int64)
        self.num_steps = 0
        self.seconds: list[float] = []
        """Duration in seconds of each step that had at most one token per request."""

    def share_weights(self, other: ToldModel) -> None:
        """Uses another model's copy of the same weights, so that this model's copy can be freed."""
        self._model = other._model

    def tell(self, text: Text, share_right: float = 1) -> None:
        """Sets the text that all later sequences write, and resets the step count and step times.

        Randomly chosen tokens of the text are replaced. The fraction `share_right` stays right.
        """
        self.num_steps = 0
        self.seconds.clear()
        tokens = torch.tensor([*text.prompt, *text.answer][1:MAX_MODEL_LEN])
        is_wrong = np.random.default_rng(3).random(len(tokens)) >= share_right
        self._next_tokens[: len(tokens)] = tokens ^ torch.from_numpy(is_wrong)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed(token_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)

    def forward(self, given: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.num_steps += 1
        began = self._clock()
        found = self._model.forward(given)
        if len(given.token_ids) <= MAX_NUM_SEQS:
            self.seconds.append(self._clock() - began)
        if found[1] is not None:
            at = given.positions if given.wanted is None else given.positions[given.wanted]
            found[1][torch.arange(len(at)), self._next_tokens[at]] += RAISED
        return found


class ToldEngine:
    """A replica in this process, with or without speculation.

    `model` and `draft_model` are set inside the context of `composed`. `draft_model` is None if the
    replica has no draft model. `clock` returns seconds.
    """

    def __init__(
        self,
        model: Path,
        num_threads: int,
        config: Mapping[str, object] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        settings = WorkerSettings(
            model=model,
            num_threads=num_threads,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            num_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // 16,
            speculative_config=None if config is None else json.dumps(config),
        )
        self.composed = InProcess(settings, self._replace_models)
        self._runner: ModelRunner
        self.model: ToldModel
        self.draft_model: ToldModel | None = None

    def _replace_models(self, worker: Worker) -> None:
        runner = worker.runner
        if not isinstance(runner, ModelRunner):
            raise TypeError("this model is not run in steps of tokens")
        self._runner = runner
        runner.model = self.model = ToldModel(runner.model, self._clock)
        source = None if runner.drafter is None else runner.drafter.source
        if isinstance(source, DraftModel):
            source.model = self.draft_model = ToldModel(source.model, self._clock)

    def forget(self) -> None:
        """Clears the stored outputs of earlier requests, from which drafts are made."""
        runner = self._runner
        if runner.drafter is not None:
            runner.drafter.clear()

    async def turn(
        self, text: Text, num_at_once: int, share_right: float = 1
    ) -> tuple[float, float]:
        """Runs `num_at_once` requests that write the text.

        Returns (milliseconds per token, tokens per step) of one request. The first step is not
        counted. `share_right` is the fraction of the draft model's tokens that are right.
        """
        self.model.tell(text)
        if self.draft_model is not None:
            self.draft_model.tell(text, share_right)
        arrivals = await asyncio.gather(*(self._arrivals(text) for _ in range(num_at_once)))
        began = max(times[0][0] for times in arrivals)
        seconds = max(times[-1][0] for times in arrivals) - began
        behind = [sum(count for at, count in times if at > began) for times in arrivals]
        num_steps = self.model.num_steps - 1
        return 1000 * seconds / statistics.mean(behind), (len(text.answer) - 1) / num_steps

    async def _arrivals(self, text: Text) -> list[tuple[float, int]]:
        """Runs a request. Returns each arrival's time and number of tokens."""
        arrivals: list[tuple[float, int]] = []

        def arrived(count: int) -> None:
            arrivals.append((self._clock(), count))

        await self.composed.client.generate(text.prompt, len(text.answer), arrived)
        return arrivals
