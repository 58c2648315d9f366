"""What the model made of a step's tokens, and whose they are."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.attention.interface import Int32Array, Int64Array
from services.worker.device import Device


@dataclass(frozen=True, slots=True)
class StepRows:
    """The requests of a step, in the layout's order.

    `order`: which of the step's requests each is. `ends`: tokens that each has once the step is
    done, drafts included. `num_draft_tokens` None: there are none.
    """

    order: Int64Array
    slots: Int32Array
    first_tokens: Int32Array
    ends: Int32Array
    num_scheduled_tokens: Int32Array
    num_draft_tokens: Int32Array | None


class Computed:
    """What the model made of a step's `num_tokens`. `logits_of` gives logits of some of them, or,
    for None, of all.
    """

    def __init__(
        self,
        device: Device,
        num_tokens: int,
        logits_of: Callable[[torch.Tensor | None], torch.Tensor],
    ) -> None:
        self._device = device
        self._num_tokens = num_tokens
        self._logits_of = logits_of

    def logits(self, rows: np.ndarray) -> torch.Tensor:
        """Logits, float32 [len(rows), vocab_size], of some tokens, each once, in their order."""
        is_all = len(rows) == self._num_tokens
        return self._logits_of(None if is_all else self._device.upload(rows))
