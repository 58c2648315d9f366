"""What a step samples, collected by request."""

import numpy as np

from services.worker.core.step import Int32Array, RequestLogprobs, StepInput, StepOutput
from services.worker.sampling.sampler import LogprobRows


class Sampled:
    """Collects what is sampled in a step, by request."""

    def __init__(self, num_requests: int) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(num_requests)]
        self._logprobs: dict[int, list[LogprobRows]] = {}
        self._nan_requests: list[int] = []

    def add(
        self,
        indexes: np.ndarray,
        token_ids: Int32Array,
        logprobs: dict[int, LogprobRows],
        nan_rows: Int32Array,
    ) -> None:
        """One more token of each of the requests `indexes`."""
        for index, token_id in zip(indexes.tolist(), token_ids.tolist(), strict=True):
            self.token_ids[index].append(token_id)
        for row, rows in logprobs.items():
            self._logprobs.setdefault(int(indexes[row]), []).append(rows)
        self._nan_requests.extend(indexes[nan_rows].tolist())

    def output(self, step: StepInput, prompt: dict[int, LogprobRows]) -> StepOutput:
        """Everything, in the step's order."""
        logprobs = {
            index: RequestLogprobs(
                joined(self._logprobs[index]) if index in self._logprobs else None,
                prompt.get(index),
            )
            for index in sorted(self._logprobs.keys() | prompt.keys())
        }
        tokens = [token_id for token_ids in self.token_ids for token_id in token_ids]
        return StepOutput(
            step.generation,
            step.step,
            num_tokens=np.array([len(token_ids) for token_ids in self.token_ids], np.int32),
            token_ids=np.array(tokens, np.int32),
            logprobs=logprobs,
            nan_requests=np.array(sorted(self._nan_requests), np.int32),
        )


def joined(parts: list[LogprobRows]) -> LogprobRows:
    """Rows of consecutive positions, one after the other; at least one part."""
    if len(parts) == 1:
        return parts[0]
    return LogprobRows(
        parts[0].width,
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )
