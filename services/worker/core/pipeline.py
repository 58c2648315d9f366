"""Pipeline parallelism: a pipeline stage is a range of the model's layers.

All stages are sent the same steps, in order. A stage runs a step after it has received the hidden
states of the previous stage, which can then run the next step. As many steps are in flight as there
are stages. Only the last stage samples. The scheduler plans a request's next step when it has the
sampled token, and sends the token with this step. This is how vLLM works. The term is from GPipe
(Huang et al.).

With hidden states, a stage sends a header: generation, number, digest and token count of their
step. The generation is a number that increases when the scheduler opens the KV pool and its streams
again. When streams end, a stage may have received a step that another stage has not received.
Therefore a stage drops hidden states of an older generation. If hidden states are of a newer
generation, it aborts its own step, because the scheduler sends every new generation to all stages.
It refuses a step that the previous stage was not sent.
"""

import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.common.errors import Aborted
from services.worker.core.errors import InvalidStep
from services.worker.core.step import StepInput
from services.worker.models.model import Model, ModelInput

_HEADER_LENGTH = 4


class Link(Protocol):
    """Connects successive pipeline stages. Tensors arrive in the order in which they were sent."""

    def send(self, tensor: torch.Tensor) -> None:
        """Begins to send a tensor to the next stage. The caller must not change it afterwards."""

    def receive(self, tensor: torch.Tensor) -> None:
        """Waits for the next tensor from the previous stage and copies it into `tensor`."""


@dataclass(frozen=True, slots=True)
class _Header:
    generation: int
    step: int
    digest: int
    num_tokens: int


class PipelineStage:
    """Stage `index` of `num_stages`. `hidden_size` and `dtype` describe the hidden states."""

    def __init__(
        self, index: int, num_stages: int, link: Link, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.waited_nanos = 0
        """The time that the current step has waited for the previous stage, in nanoseconds."""
        self._link = link
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._step: StepInput | None = None
        self._received: _Header | None = None
        """A received header of a newer generation, whose hidden states were not received yet."""

    def begin(self, step: StepInput) -> None:
        self._step = step
        self.waited_nanos = 0

    def skip(self) -> None:
        """Exchanges the header of a step without tokens, which has no hidden states."""
        if not self.is_first:
            self._receive(0)
        if not self.is_last:
            self._send_header(0)

    def receive(self, num_tokens: int) -> torch.Tensor:
        """Returns the hidden states [num_tokens, hidden_size] that the previous stage computed in
        this step, when they arrive. Raises Aborted if a newer generation has begun, and InvalidStep
        if the previous stage was sent another step.
        """
        began = time.perf_counter_ns()
        hidden = self._receive(num_tokens)
        self.waited_nanos = time.perf_counter_ns() - began
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Begins to send the hidden states [num_tokens, hidden_size] of the current step."""
        self._send_header(len(hidden))
        self._link.send(hidden.contiguous())

    def _receive(self, num_tokens: int) -> torch.Tensor:
        step = self._current
        while True:
            header = self._received or self._receive_header()
            if header.generation > step.generation:
                self._received = header
                raise Aborted(
                    f"step {step.step} belongs to generation {step.generation}, which has ended"
                )
            self._received = None
            hidden = torch.empty((header.num_tokens, self._hidden_size), dtype=self._dtype)
            if header.num_tokens:
                self._link.receive(hidden)
            if header.generation == step.generation:
                break
        if header != _Header(step.generation, step.step, step.digest, num_tokens):
            raise InvalidStep(
                f"step {step.step}: the scheduler sent a different step to the previous pipeline "
                f"stage: step {header.step} with {header.num_tokens} tokens, not {num_tokens}"
            )
        return hidden

    def _receive_header(self) -> _Header:
        header = torch.empty(_HEADER_LENGTH, dtype=torch.int64)
        self._link.receive(header)
        return _Header(*header.tolist())

    def _send_header(self, num_tokens: int) -> None:
        step = self._current
        numbers = [step.generation, step.step, step.digest, num_tokens]
        self._link.send(torch.tensor(numbers))

    @property
    def _current(self) -> StepInput:
        if self._step is None:
            raise AssertionError("no step has begun")
        return self._step


@dataclass(eq=False)
class StagedModel:
    """A Model with the layers of one pipeline stage. It receives hidden states from the previous
    stage and sends its own to the next stage. Only the first stage needs `embed`, and only the last
    stage needs `compute_logits`.
    """

    model: Model
    stage: PipelineStage

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed(token_ids)

    def forward(self, given: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.stage.is_first:
            given = replace(given, embedded=self.stage.receive(len(given.token_ids)))
        hidden, logits = self.model.forward(given)
        if not self.stage.is_last:
            self.stage.send(hidden)
        return hidden, logits

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)
