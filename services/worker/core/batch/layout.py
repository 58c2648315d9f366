"""The tokens of a step, in the order that attention needs, and the logits from which to sample."""

from dataclasses import dataclass

import numpy as np

from services.worker.backends.arrays import Int32Array, Int64Array
from services.worker.backends.attention import StepLayout
from services.worker.core.batch.input_batch import InputBatch
from services.worker.core.step import StepInput

_BEHIND_DECODES = np.int32(2**31 - 1)
"""The sort key of requests with several tokens, which come after all requests with one token."""
_FEW_REQUESTS = 64


def _rising(keys: Int32Array) -> Int64Array:
    """Returns the indexes that sort `keys` in ascending order. The sort is stable.

    Short lists are sorted by Python, because NumPy's sort releases the interpreter's lock. A
    waiting event loop would then delay the step.
    """
    if not 1 < len(keys) <= _FEW_REQUESTS:
        return keys.argsort(kind="stable")
    return np.array(sorted(range(len(keys)), key=keys.tolist().__getitem__), np.int64)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Token ids and positions of a step, int64 [num_tokens], and the requests to which they belong.

    In all other arrays, entry i is for the i-th request in the order that attention needs. `order`
    has the requests' indexes in the step, and `rows` their rows in the batch. These two are int64,
    with which NumPy indexes several times faster than with int32. `num_draft_tokens` is None if the
    step has no drafts. `layouts` has one StepLayout for each KV-cache group, with the group's block
    tables and block size.
    """

    token_ids: Int64Array
    positions: Int64Array
    order: Int64Array
    rows: Int64Array
    num_scheduled_tokens: Int32Array
    num_draft_tokens: Int32Array | None
    layouts: tuple[StepLayout, ...]

    @property
    def first_tokens(self) -> Int32Array:
        """The index of each request's first token among the step's tokens."""
        return self.layouts[0].query_starts[:-1]

    @property
    def seq_lens(self) -> Int32Array:
        """The number of tokens of each request after the step, including drafts."""
        return self.layouts[0].seq_lens

    @property
    def num_computed_tokens(self) -> Int32Array:
        """The number of tokens of each request that were computed before the step."""
        return self.seq_lens - self.num_scheduled_tokens

    def sampling(self, num_tokens: Int32Array) -> "SamplingRequests":
        """Returns the requests for which the step samples: those whose last known token it
        computes.

        `num_tokens` has the number of known tokens of each request.
        """
        drafts, seq_lens = self.num_draft_tokens, self.seq_lens
        known = seq_lens if drafts is None else seq_lens - drafts
        requests = (known == num_tokens).nonzero()[0]
        ends = self.layouts[0].query_starts[1:][requests].astype(np.int64)
        if drafts is None:
            is_all = len(requests) == len(seq_lens)
            firsts = requests if is_all else np.arange(len(requests))
            return SamplingRequests(requests, ends - 1, firsts)
        counts = drafts[requests] + 1
        firsts = np.cumsum(counts) - counts
        indices = np.repeat(ends - counts - firsts, counts) + np.arange(counts.sum())
        return SamplingRequests(requests, indices, firsts)


@dataclass(frozen=True, slots=True)
class SamplingRequests:
    """The requests of a step for which tokens are sampled, by index in the order of StepTokens.

    `logits_indices` are ascending indexes of the step's tokens whose logits are needed: each
    request's last known token and its drafts. `firsts` has, for each request, the index in
    `logits_indices` of the request's first entry.
    """

    requests: Int64Array
    logits_indices: Int64Array
    firsts: Int64Array


def lay_out(step: StepInput, batch: InputBatch) -> StepTokens:
    """Orders a step's requests: those with one token first, in ascending order of length, then
    those with several tokens in the step's order.
    """
    counts, drafts = step.num_scheduled_tokens, step.num_draft_tokens
    seq_lens = step.num_computed_tokens + counts
    num_decodes = counts.tolist().count(1)
    if num_decodes == len(counts):
        order = _rising(seq_lens)
        starts = batch.counting[: len(counts) + 1]
    else:
        order = _rising(np.where(counts == 1, seq_lens, _BEHIND_DECODES))
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts[order], out=starts[1:])
    layout_rows, seq_lens = step.rows[order], seq_lens[order]
    layouts = tuple(
        StepLayout(num_decodes, starts, seq_lens, layout_rows, tables, block_size)
        for tables, block_size in batch.groups
    )
    rows, positions = layout_rows.astype(np.int64), layouts[0].positions
    token_rows = rows if layouts[0].only_decodes else layouts[0].token_rows
    return StepTokens(
        token_ids=batch.tokens_at(token_rows, positions),
        positions=positions,
        order=order,
        rows=rows,
        num_scheduled_tokens=counts[order],
        num_draft_tokens=drafts[order] if len(drafts) and drafts.any() else None,
        layouts=layouts,
    )
