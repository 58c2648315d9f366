"""The tokens of a step, in the order that attention needs."""

from dataclasses import dataclass

import numpy as np

from services.worker.backends.attention import Int32Array, Int64Array, StepLayout
from services.worker.core.input_batch import InputBatch
from services.worker.core.step import StepInput


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Token ids and positions, int64 [num_tokens], and the layouts of their keys and values.

    `order`: indexes of the step's requests in the order of the layout. `first_tokens` int32: the
    index of each request's first token, in the step's order. `layouts`: one for each KV-cache
    group; they differ in their tables.
    """

    token_ids: Int64Array
    positions: Int64Array
    order: Int64Array
    first_tokens: Int32Array
    layouts: tuple[StepLayout, ...]


def lay_out(step: StepInput, batch: InputBatch) -> StepTokens:
    """Orders requests: those with one token by length, then the others in the step's order."""
    counts = step.num_scheduled_tokens
    seq_lens = step.num_computed_tokens + counts
    is_decode = counts == 1
    num_decodes = int(np.count_nonzero(is_decode))
    if num_decodes == len(counts):
        order = seq_lens.argsort(kind="stable")
        starts = np.arange(len(counts) + 1, dtype=np.int32)
    else:
        order = np.lexsort((np.where(is_decode, seq_lens, 0), ~is_decode))
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts[order], out=starts[1:])
    rows, seq_lens = step.rows[order], seq_lens[order]
    layouts = tuple(
        StepLayout(num_decodes, starts, seq_lens, rows, tables, batch.limits.block_size)
        for tables in batch.block_tables
    )
    positions = layouts[0].positions
    first_tokens = np.empty(len(counts), np.int32)
    first_tokens[order] = starts[:-1]
    return StepTokens(
        token_ids=batch.token_ids[layouts[0].token_rows, positions].astype(np.int64),
        positions=positions,
        order=order,
        first_tokens=first_tokens,
        layouts=layouts,
    )
