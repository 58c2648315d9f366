"""Groups the tokens of a step by LoRA adapter."""

import numpy as np
import torch

from services.worker.backends.lora import LoraRows, PackedLora
from services.worker.core.batch.layout import StepTokens


def lora_rows(
    tokens: StepTokens, adapters: dict[int, PackedLora], device: torch.device
) -> LoraRows | None:
    """The step's tokens, grouped by the adapter of their request; None if no request uses an
    adapter. `adapters` maps rows of the batch to adapters.
    """
    numbers: dict[PackedLora, int] = {}
    of_requests = np.full(len(tokens.rows), -1, np.int32)
    for index, row in enumerate(tokens.rows.tolist()):
        if (adapter := adapters.get(row)) is not None:
            of_requests[index] = numbers.setdefault(adapter, len(numbers))
    if not numbers:
        return None
    of_tokens = np.repeat(of_requests, tokens.num_scheduled_tokens)
    order = of_tokens.argsort(kind="stable")
    starts = of_tokens[order].searchsorted(np.arange(len(numbers) + 1)).astype(np.int32)
    rows = order[starts[0] :].astype(np.int32)
    return LoraRows(tuple(numbers), rows, starts - starts[0], len(of_tokens), device)
