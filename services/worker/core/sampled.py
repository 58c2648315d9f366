"""Collects the tokens and log-probabilities that a step samples, by request."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.worker.backends.arrays import Int32Array
from services.worker.core.batch.device_tokens import PendingTokens
from services.worker.core.step import RequestLogprobs, StepInput, StepOutput, no_ints
from services.worker.sampling.logprobs import LogprobRows
from services.worker.sampling.sampler import SamplerOutput


class Sampled:
    """The sampled tokens and log-probabilities of a step. `parts` are arguments for `add`."""

    def __init__(self, parts: Iterable[tuple[np.ndarray, SamplerOutput]] = ()) -> None:
        self.parts = list(parts)

    def add(self, indexes: np.ndarray, output: SamplerOutput) -> None:
        """Adds one token for each request in `indexes`, which are parallel to `output`'s rows."""
        self.parts.append((indexes, output))

    def output(self, step: StepInput, prompt: dict[int, LogprobRows]) -> StepOutput:
        """Returns the step's output, ordered by request. `prompt` has prompt log-probabilities."""
        num_tokens = np.zeros(len(step.rows), np.int32)
        has_logprobs, has_missing = bool(prompt), False
        for indexes, output in self.parts:
            num_tokens[indexes] += 1
            has_logprobs = has_logprobs or bool(output.logprobs)
            has_missing = has_missing or bool(len(output.nan_rows) or len(output.refused_rows))
        token_ids = no_ints()
        if self.parts:
            by_request = _joined([indexes for indexes, _ in self.parts]).argsort(kind="stable")
            token_ids = _joined([output.token_ids for _, output in self.parts])[by_request]
        return StepOutput(
            step.generation,
            step.step,
            num_tokens=num_tokens,
            token_ids=token_ids,
            logprobs=self._request_logprobs(prompt) if has_logprobs else {},
            nan_requests=self._nan_requests() if has_missing else no_ints(),
            refused_tokens=self._refused_tokens() if has_missing else {},
            grammar_errors=self._grammar_errors() if has_missing else {},
            num_draft_tokens=step.num_draft_tokens,
        )

    def _nan_requests(self) -> Int32Array:
        found = _joined([indexes[output.nan_rows] for indexes, output in self.parts])
        return np.sort(found).astype(np.int32)

    def _refused_tokens(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for number, (indexes, output) in enumerate(self.parts):
            for index in indexes[output.refused_rows].tolist():
                before = self.parts[:number]
                found[index] = sum(int((of_part == index).sum()) for of_part, _ in before)
        return dict(sorted(found.items()))

    def _grammar_errors(self) -> dict[int, str]:
        return {
            int(indexes[row]): error
            for indexes, output in self.parts
            for row, error in output.grammar_errors.items()
        }

    def _request_logprobs(self, prompt: dict[int, LogprobRows]) -> dict[int, RequestLogprobs]:
        sampled: dict[int, list[LogprobRows]] = {}
        for indexes, output in self.parts:
            for row, rows in output.logprobs.items():
                sampled.setdefault(int(indexes[row]), []).append(rows)
        return {
            index: RequestLogprobs(
                LogprobRows.joined(sampled[index]) if index in sampled else None, prompt.get(index)
            )
            for index in sorted(sampled.keys() | prompt.keys())
        }


class PendingOutput(Protocol):
    """The output of a step that a device may still compute."""

    def wait(self) -> StepOutput:
        """Waits for the device and returns the output. Callable from any thread, and repeatedly."""


@dataclass(frozen=True, slots=True)
class SampledOnDevice:
    """The PendingOutput of a step for which a device may still sample tokens.

    `known` has the tokens that the host sampled. `sampling` has the indexes, in the step, of the
    requests for which the device samples, and `pending` one token for each of them. `prompt` maps
    requests to the log-probabilities of prompt tokens.
    """

    step: StepInput
    known: Sampled
    sampling: np.ndarray
    pending: PendingTokens
    prompt: dict[int, LogprobRows]

    def wait(self) -> StepOutput:
        parts = *self.known.parts, (self.sampling, self.pending.wait())
        return Sampled(parts).output(self.step, self.prompt)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
