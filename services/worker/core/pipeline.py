"""A pipeline stage: some layers of the model, between the stages that compute those before and
behind.

Every stage is sent the same steps, in order, and runs each when it has the hidden states of the
stage before. Meanwhile that one runs the next step. As many steps are in flight as there are
stages. Only the last stage samples, and the scheduler sends the token on with the next step of its
request: until it has the token it plans no such step. This is vLLM's pipeline parallelism; GPipe
(Huang et al.) has the name.

Hidden states follow a header: generation, number, digest and tokens of their step. When streams
end, one stage may have received a step that another did not. A stage drops hidden states of an
older generation than its step, and gives its step up for those of a newer one, which the scheduler
sends to all stages as soon as it has begun. It refuses a step that the stage before was not sent.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from services.common.errors import Aborted
from services.worker.backends.attention import LayerAttention
from services.worker.backends.lora import LoraRows
from services.worker.core.errors import InvalidStep
from services.worker.core.step import StepInput
from services.worker.models.model import Model

_HEADER_LENGTH = 4


class Link(Protocol):
    """The way from stage to stage. Tensors arrive in the order in which they were sent."""

    def send(self, tensor: torch.Tensor) -> None:
        """Begins to send a tensor to the stage behind. It must not be changed any more."""

    def receive(self, tensor: torch.Tensor) -> None:
        """Waits for the next tensor of the stage before, and fills `tensor` with it."""


@dataclass(frozen=True, slots=True)
class _Header:
    """Generation, number and digest of a step, and the tokens whose hidden states follow."""

    generation: int
    step: int
    digest: int
    num_tokens: int


class PipelineStage:
    """The stage `index` of `num_stages`, on this rank. `hidden_size` and `dtype`: of its hidden
    states.
    """

    def __init__(
        self, index: int, num_stages: int, link: Link, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.waited_nanos = 0
        """Time for which the current step waited for the stage before."""
        self._link = link
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._step: StepInput | None = None
        self._received: _Header | None = None
        """A header whose hidden states have not been received."""

    def begin(self, step: StepInput) -> None:
        """Notes the step whose hidden states come and go next."""
        self._step = step
        self.waited_nanos = 0

    def skip(self) -> None:
        """Runs a step without tokens: the stages learn of its generation from each other."""
        if not self.is_first:
            self._receive(0)
        if not self.is_last:
            self._send_header(0)

    def receive(self, num_tokens: int) -> torch.Tensor:
        """The hidden states [num_tokens, hidden_size] that the stage before computed in this step.
        Raises Aborted if a newer generation has begun, and InvalidStep if that is no such step.
        """
        began = time.perf_counter_ns()
        hidden = self._receive(num_tokens)
        self.waited_nanos = time.perf_counter_ns() - began
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Begins to send hidden states [num_tokens, hidden_size] of this step."""
        self._send_header(len(hidden))
        self._link.send(hidden.contiguous())

    def _receive(self, num_tokens: int) -> torch.Tensor:
        step = self._current
        while True:
            header = self._received or self._receive_header()
            if header.generation > step.generation:
                self._received = header
                raise Aborted(f"step {step.step} is of a generation that is over")
            self._received = None
            hidden = torch.empty((header.num_tokens, self._hidden_size), dtype=self._dtype)
            if header.num_tokens:
                self._link.receive(hidden)
            if header.generation == step.generation:
                break
        if header != _Header(step.generation, step.step, step.digest, num_tokens):
            raise InvalidStep(
                f"step {step.step}: the stage before was sent another step: {header.num_tokens} "
                f"tokens of step {header.step}, not {num_tokens}"
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


class StagedModel:
    """See Model: the layers of one stage, whose hidden states come from the stage before and go to
    the one behind.
    """

    def __init__(self, model: Model, stage: PipelineStage) -> None:
        self._model = model
        self._stage = stage

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See Model; for the first stage."""
        return self._model.embed(token_ids)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: LayerAttention,
        embedded: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
        lora: LoraRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See Model."""
        if not self._stage.is_first:
            embedded = self._stage.receive(len(token_ids))
        hidden, logits = self._model.forward(
            token_ids, positions, attention, embedded, wanted, lora
        )
        if not self._stage.is_last:
            self._stage.send(hidden)
        return hidden, logits

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model; for the last stage."""
        return self._model.compute_logits(hidden)
