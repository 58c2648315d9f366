"""Records the logits of every token that a runner computes, for bitwise comparisons.

The reference logits of a sequence are computed without other sequences, in one step and with one
thread. In every other situation each token must get the same logits: in batches, in chunks, after
prefix hits, after preemptions, and in any blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from services.worker.backends.arrays import Int32Array
from services.worker.backends.attention import LayerAttention, PagedAttention, StepLayout
from services.worker.backends.choices import KernelsSetting, KVCacheDtype
from services.worker.backends.ranks import ALONE, Ranks
from services.worker.core.model_runner import ModelRunner
from services.worker.models.model import Model, ModelInput
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.sampling.logprobs import LogprobRows
from tests.worker.runner_driver import Driver, Request, build_runner

BLOCK_SIZE = 4
NUM_BLOCKS = 4000
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 4096


class Recorder:
    """Wraps a model and its attention, and stores the logits of all rows of the last step."""

    def __init__(self) -> None:
        self._rows_of: dict[int, torch.Tensor] = {}
        self._layout: StepLayout | None = None

    def around(self, model: Model, attention: PagedAttention) -> tuple[Model, PagedAttention]:
        """Wraps a model and its attention. This is the argument `around` of build_runner."""
        self._model, self._attention = model, attention
        return self, self

    def logits_of(self, row: int) -> torch.Tensor:
        """The logits of a row's tokens in the last step, [n, vocab_size]."""
        return self._rows_of[row]

    def begin_step(self, layouts: Sequence[StepLayout]) -> LayerAttention:
        self._layout = layouts[0]
        return self._attention.begin_step(layouts)

    def zero_blocks(self, block_ids: Int32Array) -> None:
        self._attention.zero_blocks(block_ids)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed(token_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)

    def forward(self, given: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the model. Computes the logits of all rows, even of those that need none."""
        hidden, logits = self._model.forward(given)
        whole = self._model.compute_logits(hidden)
        if logits is not None:
            assert_same_bits(
                logits, whole if given.wanted is None else whole[given.wanted], "wanted rows"
            )
        assert self._layout is not None
        starts = self._layout.query_starts.tolist()
        for number, row in enumerate(self._layout.rows.tolist()):
            self._rows_of[row] = whole[starts[number] : starts[number + 1]]
        return hidden, logits


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    differing = (actual.view(torch.int32) != expected.view(torch.int32)).any(1)
    assert not differing.any(), (
        f"{what}: rows {differing.nonzero().flatten().tolist()} differ, by up to "
        f"{(actual - expected).abs().max().item():.1e}"
    )


def assert_same_answer(request: Request, other: Request, what: str) -> None:
    """Asserts that two requests have the same tokens, and log-probabilities equal in every bit."""
    assert request.output == other.output, what
    for own, others in (
        (request.prompt_rows, other.prompt_rows),
        (request.sampled_rows, other.sampled_rows),
    ):
        assert bool(own) == bool(others), what
        if own:
            found, expected = LogprobRows.joined(own), LogprobRows.joined(others)
            np.testing.assert_array_equal(found.token_ids, expected.token_ids, what)
            np.testing.assert_array_equal(found.logprobs, expected.logprobs, what)


@dataclass
class ExactModel:
    """A model runner, and the reference logits of sequences."""

    directory: Path
    dtype: torch.dtype
    kernels_setting: KernelsSetting
    ranks: Ranks = ALONE
    quantization: QuantizationSetting = QuantizationSetting.AUTO
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    block_size: int = BLOCK_SIZE
    recorder: Recorder = field(default_factory=Recorder)
    references: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner: ModelRunner = build_runner(
            self.directory,
            block_size=self.block_size,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            dtype=self.dtype,
            kernels_setting=self.kernels_setting,
            ranks=self.ranks,
            around=self.recorder.around,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def serving(self, *, seed: int = 0, keeps: bool = False) -> "ExactServing":
        """An ExactServing with an empty cache. The seed determines the order in which blocks are
        allocated. With `keeps`, blocks that have left a window are allocated last.
        """
        self.runner.reset()
        return ExactServing(
            self,
            Driver(
                self.runner,
                block_size=self.block_size,
                num_blocks=NUM_BLOCKS,
                seed=seed,
                keeps=keeps,
            ),
        )

    def reference(self, tokens: Sequence[int]) -> torch.Tensor:
        """The reference logits of all tokens of a sequence."""
        key = tuple(tokens)
        if key not in self.references:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            request = Request(list(tokens), 1)
            serving = self.serving()
            serving.driver.step([(request, len(tokens))])
            self.references[key] = self.recorder.logits_of(serving.row_of(request)).clone()
            torch.set_num_threads(threads)
        return self.references[key]


@dataclass
class ExactServing:
    """Runs requests step by step, and compares every row of logits with its reference."""

    model: ExactModel
    driver: Driver

    def step(
        self,
        scheduled: Sequence[tuple[Request, int]],
        what: str,
        beside: Sequence[tuple[Request, int]] = (),
    ) -> None:
        """Runs a step with the given number of tokens of each request. Requests in `beside` share
        the step, but are not compared.
        """
        begins = [request.num_computed for request, _ in scheduled]
        self.driver.step([*scheduled, *beside])
        for begin, (request, count) in zip(begins, scheduled, strict=True):
            expected = self.model.references[tuple(request.prompt)][begin : begin + count]
            actual = self.model.recorder.logits_of(self.row_of(request))
            name = f"{what}: {len(request.prompt)} tokens, step from {begin} to {begin + count}"
            assert_same_bits(actual, expected, name)

    def run(self, requests: Sequence[Request], chunks: Sequence[int], what: str) -> None:
        """Computes all prompts together, request i in chunks of chunks[i % len(chunks)] tokens."""
        while running := [request for request in requests if not request.finished]:
            self.step(
                [
                    (request, min(chunk, len(request.prompt) - request.num_computed))
                    for request, chunk in zip(requests, _cycled(chunks, len(requests)), strict=True)
                    if not request.finished
                ],
                what,
            )
            self.driver.remove_finished(running)

    def run_preempted(self, requests: Sequence[Request], random: np.random.Generator) -> None:
        """Computes requests in chunks of random lengths, and preempts random ones of them."""
        while running := [request for request in requests if not request.finished]:
            self.step(
                [
                    (one, int(random.integers(1, 1 + len(one.prompt) - one.num_computed)))
                    for one in running
                ],
                "preempted again and again",
            )
            for request in running:
                if request.finished or random.random() < 0.2:
                    self.driver.remove(request)

    @staticmethod
    def row_of(request: Request) -> int:
        assert request.row is not None
        return request.row


def drawn(length: int, seed: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab_size, length).tolist()  # type: ignore[no-any-return]


def _cycled(chunks: Sequence[int], count: int) -> list[int]:
    return [chunks[number % len(chunks)] for number in range(count)]
