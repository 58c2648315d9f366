"""The tokens and log-probabilities that a step samples, collected by request."""

import numpy as np

from services.worker.core.step import RequestLogprobs, StepInput, StepOutput, no_ints
from services.worker.sampling.logprobs import LogprobRows
from services.worker.sampling.sampler import SamplerOutput


class Sampled:
    """Collects sampled tokens and log-probabilities by request."""

    def __init__(self) -> None:
        self._indexes: list[np.ndarray] = []
        self._token_ids: list[np.ndarray] = []
        self._logprobs: dict[int, list[LogprobRows]] = {}
        self._nan_requests: list[int] = []
        self._refused_tokens: dict[int, int] = {}

    def add(self, indexes: np.ndarray, output: SamplerOutput) -> None:
        """Adds one token of each request in `indexes`; rows of `output` are in that order."""
        if len(output.refused_rows):
            for index in indexes[output.refused_rows].tolist():
                self._refused_tokens[index] = sum(int((of == index).sum()) for of in self._indexes)
        self._indexes.append(indexes)
        self._token_ids.append(output.token_ids)
        for row, rows in output.logprobs.items():
            self._logprobs.setdefault(int(indexes[row]), []).append(rows)
        if len(output.nan_rows):
            self._nan_requests.extend(indexes[output.nan_rows].tolist())

    def output(self, step: StepInput, prompt: dict[int, LogprobRows]) -> StepOutput:
        """The output of the step, in the order of its requests."""
        num_tokens = np.zeros(len(step.rows), np.int32)
        token_ids = no_ints()
        for indexes in self._indexes:
            num_tokens[indexes] += 1
        if self._indexes:
            by_request = _joined(self._indexes).argsort(kind="stable")
            token_ids = _joined(self._token_ids)[by_request]
        return StepOutput(
            step.generation,
            step.step,
            num_tokens=num_tokens,
            token_ids=token_ids,
            logprobs=self._request_logprobs(prompt) if self._logprobs or prompt else {},
            nan_requests=np.array(sorted(self._nan_requests), np.int32)
            if self._nan_requests
            else no_ints(),
            refused_tokens=dict(sorted(self._refused_tokens.items())),
            num_draft_tokens=step.num_draft_tokens,
        )

    def _request_logprobs(self, prompt: dict[int, LogprobRows]) -> dict[int, RequestLogprobs]:
        return {
            index: RequestLogprobs(
                LogprobRows.joined(self._logprobs[index]) if index in self._logprobs else None,
                prompt.get(index),
            )
            for index in sorted(self._logprobs.keys() | prompt.keys())
        }


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
