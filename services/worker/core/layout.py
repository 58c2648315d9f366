"""The tokens of a step in the order that attention wants."""

from dataclasses import dataclass

import numpy as np

from services.worker.attention.interface import Int32Array, Int64Array, StepLayout
from services.worker.core.batch import PersistentBatch
from services.worker.core.step import StepInput


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Token ids and positions, int64 [num_tokens], and where their keys and values lie.

    `first_tokens` int32: where each request begins among the tokens, in the step's order.
    `layouts`: one for each KV-cache group; they differ in blocks alone.
    """

    token_ids: Int64Array
    positions: Int64Array
    first_tokens: Int32Array
    layouts: tuple[StepLayout, ...]


def lay_out(step: StepInput, batch: PersistentBatch) -> StepTokens:
    """Puts requests with one token first, by length, and looks up every token's cache slot."""
    counts, computed = step.num_scheduled_tokens, step.num_computed_tokens
    is_decode = counts == 1
    order = np.lexsort((np.where(is_decode, computed, 0), ~is_decode))
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts[order], out=starts[1:])
    first_tokens = np.empty_like(counts)
    first_tokens[order] = starts[:-1]

    block_size = batch.limits.block_size
    slots = np.repeat(step.slots[order], counts[order])
    offsets = np.repeat(computed[order] - starts[:-1], counts[order])
    positions = offsets.astype(np.int64) + np.arange(len(slots))
    seq_lens = (computed + counts)[order]
    width = -(-int(seq_lens.max()) // block_size)
    num_decodes, rows = int(is_decode.sum()), step.slots[order]
    columns, in_block = positions // block_size, positions % block_size
    return StepTokens(
        token_ids=batch.token_ids[slots, positions].astype(np.int64),
        positions=positions,
        first_tokens=first_tokens,
        layouts=tuple(
            StepLayout(
                num_decodes=num_decodes,
                query_starts=starts,
                seq_lens=seq_lens,
                block_tables=tables[rows, :width],
                slot_mapping=tables[slots, columns].astype(np.int64) * block_size + in_block,
            )
            for tables in batch.block_tables
        ),
    )
