"""Computes the vectors of prompts from hidden states, chunk by chunk.

For a mean, a float64 sum for each request is kept between chunks. States are added one by one in
the order of the tokens, so that the sum does not depend on chunk boundaries. When a preempted
request is admitted again, its sum starts from zero.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from services.common.request.pooling import Pooler, PoolingParams, PoolingTask, PoolingType
from services.worker.backends.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from services.worker.core.batch.layout import StepTokens
from services.worker.core.errors import InvalidStep
from services.worker.core.step import StepInput, StepOutput, no_ints
from services.worker.models.pooling_config import Activation, PoolingConfig

_SMALLEST_NORM = 1e-12
"""The smallest norm by which a vector is divided, as in torch and sentence-transformers."""


@dataclass(frozen=True, slots=True)
class VectorEnd:
    """The last operations on a vector: truncation, normalization and the activation function."""

    pooler: Pooler
    config: PoolingConfig

    def finish(self, vector: Float64Array, params: PoolingParams) -> Float32Array:
        """Returns the vector that the client receives."""
        vector = vector[: params.dimensions]
        activation = self.config.activation
        if params.num_first_text_tokens:
            activation = self.config.pair_activation or activation
        if params.use_activation is not None:
            forced = self.config.forced_activation
            activation = forced if params.use_activation else Activation.NONE
        match activation:
            case Activation.NORMALIZE:
                vector = vector / max(float(np.sqrt(vector @ vector)), _SMALLEST_NORM)
            case Activation.SIGMOID:
                vector = np.exp(-np.logaddexp(0, -vector))
            case Activation.SOFTMAX:
                vector = np.exp(vector - np.logaddexp.reduce(vector))
        return vector.astype(np.float32)


def vector_end(config: PoolingConfig, hidden_size: int, *, takes_whole_prompts: bool) -> VectorEnd:
    """Returns the last operations on the vectors of a model. The default pooling type is LAST, or
    CLS for models that process whole prompts, as in vLLM.
    """
    default = PoolingType.CLS if takes_whole_prompts else PoolingType.LAST
    pooler = Pooler(
        config.task,
        config.pooling_type or default,
        config.num_labels or hidden_size,
        may_shorten=config.may_shorten,
        matryoshka_dimensions=config.matryoshka_dimensions,
        takes_whole_prompts=takes_whole_prompts,
    )
    return VectorEnd(pooler, config)


def pooled_output(
    step: StepInput, vectors: dict[int, Float32Array], num_requests: int
) -> StepOutput:
    """Returns the output of a step that pools prompts. `vectors` maps indexes of requests to
    vectors. Requests whose vectors contain NaN are reported in `nan_requests`, without vectors.
    """
    broken = [index for index, vector in vectors.items() if np.isnan(vector).any()]
    return StepOutput(
        step.generation,
        step.step,
        num_tokens=np.zeros(num_requests, np.int32),
        token_ids=no_ints(),
        nan_requests=np.array(sorted(broken), np.int32),
        pooled={index: vectors[index] for index in sorted(vectors.keys() - set(broken))},
    )


@dataclass(slots=True)
class PromptPooler:
    """Pools the prompts of a batch. `class_scores` maps hidden states [n, hidden_size] to class
    scores, float32 [n, num_labels].
    """

    end: VectorEnd
    class_scores: Callable[[torch.Tensor], torch.Tensor]
    _params: dict[int, PoolingParams] = field(default_factory=dict)
    _kept: dict[int, Float64Array] = field(default_factory=dict)
    """For each row of the batch, the sum of its hidden states so far, or its first hidden state."""

    def clear(self) -> None:
        self._params.clear()
        self._kept.clear()

    def check(self, step: StepInput) -> None:
        """Raises InvalidStep if a new request has computed tokens from the prefix cache, but
        pooling needs the hidden states of all tokens.
        """
        if self.end.pooler.reads_prefix_cache or not step.new_requests:
            return
        entering = [new.row for new in step.new_requests]
        cached = step.num_computed_tokens[np.isin(step.rows, entering)]
        if cached.any():
            entered = f"the first {int(cached.max())} tokens of a prompt are not computed"
            problem = f"{entered}, but pooling needs the hidden states of all its tokens"
            raise InvalidStep.in_field(step.step, "num_computed_tokens", problem)

    def update(self, step: StepInput) -> None:
        for row in step.removed_rows.tolist():
            self._params.pop(row, None)
            self._kept.pop(row, None)
        for new in step.new_requests:
            self._params[new.row] = new.pooling or PoolingParams()
            self._kept.pop(new.row, None)

    def pool(
        self, step: StepInput, tokens: StepTokens, num_tokens: Int32Array, hidden: torch.Tensor
    ) -> StepOutput:
        """Returns the vectors of requests whose prompts are complete after this step.

        `num_tokens` has the number of tokens of each request. `hidden` [n, hidden_size] has the
        hidden states of the step's tokens. Both are in the order of `tokens`.
        """
        ended = np.flatnonzero(tokens.seq_lens == num_tokens)
        states = self._states(tokens, ended, hidden)
        vectors = {
            int(tokens.order[index]): self.end.finish(state, self._params[int(tokens.rows[index])])
            for index, state in zip(ended.tolist(), states, strict=True)
        }
        return pooled_output(step, vectors, len(step.rows))

    def _states(self, tokens: StepTokens, ended: Int64Array, hidden: torch.Tensor) -> Float64Array:
        kind, pooler = self.end.pooler.pooling_type, self.end.pooler
        if kind is not PoolingType.LAST:
            self._keep(tokens, hidden, kind)
        if kind is PoolingType.LAST:
            last = (tokens.first_tokens + tokens.num_scheduled_tokens - 1)[ended]
            states = hidden[torch.from_numpy(last.astype(np.int64)).to(hidden.device)]
            if pooler.task is PoolingTask.CLASSIFY and len(ended):
                states = self.class_scores(states)
            return states.float().numpy(force=True).astype(np.float64)
        kept = [self._kept[int(row)] for row in tokens.rows[ended]]
        divisors = tokens.seq_lens[ended] if kind is PoolingType.MEAN else np.ones(len(ended))
        width = hidden.shape[1]
        return np.array(kept, np.float64).reshape(-1, width) / divisors[:, None]

    def _keep(self, tokens: StepTokens, hidden: torch.Tensor, kind: PoolingType) -> None:
        states = hidden.float().numpy(force=True).astype(np.float64)
        for index, row in enumerate(tokens.rows.tolist()):
            first, count = int(tokens.first_tokens[index]), int(tokens.num_scheduled_tokens[index])
            is_first = tokens.num_computed_tokens[index] == 0
            if kind is PoolingType.CLS:
                if is_first:
                    self._kept[row] = states[first]
                continue
            terms = states[first : first + count]
            if not is_first:
                terms = np.concatenate([self._kept[row][None], terms])
            self._kept[row] = np.add.reduce(terms, axis=0)
