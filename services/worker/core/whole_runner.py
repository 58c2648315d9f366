"""Runs steps of whole prompts, without a KV cache. Each prompt is computed separately."""

import numpy as np
import torch

from services.common.request.pooling import PoolingParams, PoolingTask, PoolingType
from services.worker.backends.arrays import Float32Array, Float64Array
from services.worker.core.batch.input_batch import BatchLimits, InputBatch
from services.worker.core.batch.step_difference import apply_step
from services.worker.core.errors import InvalidStep
from services.worker.core.pooler import VectorEnd, pooled_output
from services.worker.core.step import StepInput, StepOutput
from services.worker.models.whole_model import WholeModel


class WholeRunner:
    """A StepRunner for a model that processes whole prompts. Block tables are checked as for other
    models, although nothing is stored in their blocks. Not thread-safe.
    """

    def __init__(self, model: WholeModel, end: VectorEnd, limits: BatchLimits) -> None:
        self._model = model
        self._end = end
        self.limits = limits
        self._batch = InputBatch(limits)
        self._params: dict[int, PoolingParams] = {}
        self._generation: int | None = None

    def reset(self) -> None:
        self._batch.clear()
        self._params.clear()

    def execute(self, step: StepInput) -> StepOutput:
        return self.begin(step)

    def begin(self, step: StepInput) -> StepOutput:
        """Runs a step. Raises InvalidStep for an invalid step, which leaves the batch unchanged,
        and for a step that computes only a part of a prompt.
        """
        if step.generation != self._generation:
            self.reset()
            self._generation = step.generation
        apply_step(self._batch, step)
        for row in step.removed_rows.tolist():
            self._params.pop(row, None)
        for new in step.new_requests:
            self._params[new.row] = new.pooling or PoolingParams()
        whole = self._batch.num_tokens[step.rows]
        if step.num_computed_tokens.any() or (step.num_scheduled_tokens != whole).any():
            problem = "a prompt is not computed whole"
            raise InvalidStep.in_field(step.step, "num_scheduled_tokens", problem)
        vectors = {index: self._vector(int(row)) for index, row in enumerate(step.rows)}
        return pooled_output(step, vectors, len(step.rows))

    def _vector(self, row: int) -> Float32Array:
        params = self._params[row]
        token_ids = self._batch.token_ids[row, : self._batch.num_tokens[row]].astype(np.int64)
        states = self._model.states(torch.from_numpy(token_ids), params.num_first_text_tokens)
        wide: Float64Array = states.numpy(force=True).astype(np.float64)
        kind = self._end.pooler.pooling_type
        if self._end.pooler.task is PoolingTask.EMBED and kind is PoolingType.MEAN:
            wide = np.add.reduce(wide, axis=0, keepdims=True) / len(wide)
        return self._end.finish(wide[-1 if kind is PoolingType.LAST else 0], params)
