"""Prompts that begin with embeddings in place of tokens."""

from dataclasses import dataclass

import numpy as np
import torch

from services.common.request.prompt_embeds import PromptEmbeds
from services.worker.backends.device import Device
from services.worker.core.batch.layout import StepTokens
from services.worker.core.errors import InvalidStep
from services.worker.core.step import StepInput
from services.worker.models.model import Model


@dataclass(frozen=True, slots=True)
class _Embeds:
    """The embeddings of tokens [begin, end) of a request, [end - begin, hidden_size]."""

    begin: int
    end: int
    matrix: torch.Tensor


class EmbeddedPrompts:
    """The embeddings of requests in the batch whose prompts begin with embeddings. If `model` is
    None, as in all pipeline stages except the first, embeddings are ignored.
    """

    def __init__(self, model: Model | None) -> None:
        self._model = model
        self._embeds: dict[int, _Embeds] = {}

    def clear(self) -> None:
        self._embeds.clear()

    def read(self, step: StepInput, device: Device) -> dict[int, _Embeds]:
        """Returns the embeddings of new requests, by row of the batch, in the model's data type on
        `device`.

        Raises InvalidArgument if embeddings have another width than the model, or if they are
        missing for placeholder tokens that are not computed yet.
        """
        found: dict[int, _Embeds] = {}
        if not step.new_requests or self._model is None:
            return found
        computed = dict(zip(step.rows.tolist(), step.num_computed_tokens.tolist(), strict=False))
        for request in step.new_requests:
            embeds, end = request.prompt_embeds, request.num_placeholders
            begin = end if embeds is None else end - embeds.num_tokens
            if not 0 <= begin <= computed.get(request.row, begin) or (
                end > request.num_prompt_tokens
            ):
                problem = (
                    f"the embeddings are for tokens {begin} to {end}, which are not all tokens of "
                    f"the embedded prompt in row {request.row} that are still to be computed"
                )
                raise InvalidStep.in_field(step.step, "new_requests.prompt_embeds", problem)
            if embeds is not None:
                matrix = _to_tensor(embeds, self._model, device)
                found[request.row] = _Embeds(begin, end, matrix)
        return found

    def replace(self, step: StepInput, entering: dict[int, _Embeds]) -> None:
        """Removes the embeddings of removed rows, and adds the embeddings of new requests."""
        for row in step.removed_rows.tolist():
            self._embeds.pop(row, None)
        self._embeds |= entering

    def of_step(self, tokens: StepTokens, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Input embeddings of a step [num_tokens, hidden_size], or None if all inputs are ids."""
        embedded: torch.Tensor | None = None
        if not self._embeds or self._model is None:
            return embedded
        columns = (tokens.rows, tokens.first_tokens, tokens.num_computed_tokens, tokens.seq_lens)
        for row, first, computed, end in zip(*(x.tolist() for x in columns), strict=True):
            given = self._embeds.get(row)
            if given is None or computed >= given.end:
                continue
            if embedded is None:
                embedded = self._model.embed(token_ids)
            count, begin = min(end, given.end) - computed, computed - given.begin
            embedded[first : first + count] = given.matrix[begin : begin + count]
        return embedded


def _to_tensor(embeds: PromptEmbeds, model: Model, device: Device) -> torch.Tensor:
    like = model.embed(torch.zeros(1, dtype=torch.int64, device=device.torch_device))
    embeds.check(like.shape[1])
    numbers = device.upload(np.frombuffer(embeds.data, np.uint8).copy())
    matrix = numbers.view(getattr(torch, embeds.dtype.name.lower()))
    return matrix.view(embeds.num_tokens, -1).to(like)
