"""Completes the drafts of a step, which the scheduler plans without knowing them.

The scheduler plans a step while the one before it runs. It counts that step's drafts as accepted,
and leaves the next ones to the worker: their ids are -1. Once the step begins, the worker knows
which drafts were accepted, and goes on from its own tokens.
"""

from collections.abc import Callable, Sequence
from itertools import chain, islice

import numpy as np

from services.worker.core.draft_source import DraftSource, WantedDrafts
from services.worker.core.input_batch import InputBatch
from services.worker.core.layout import StepTokens
from services.worker.core.step import StepInput, no_ints
from services.worker.core.step_check import PROPOSED_HERE
from services.worker.speculation.draft_length import DraftLength


class Drafter:
    """Proposes the drafts of steps, from a source, for the requests of a batch: of each as many as
    the scheduler has room for, or fewer while few of them stand.
    """

    def __init__(self, source: DraftSource, most: int) -> None:
        """`most`: drafts of a request in a step."""
        self.source = source
        self._most = most
        self._lengths: dict[int, DraftLength] = {}

    def update(self, step: StepInput) -> None:
        """Takes in which requests leave and enter."""
        self.source.forget(step.removed_rows)
        for row in step.removed_rows.tolist():
            self._lengths.pop(row, None)
        self.source.enter(step.new_requests)

    def clear(self) -> None:
        """All requests have left."""
        self.source.clear()
        self._lengths.clear()

    def sampled(self, tokens: StepTokens, batch: InputBatch) -> None:
        """Takes in what a step sampled, and which of its drafts stood: all tokens that were sampled
        but the last.
        """
        every = tokens.layouts[0].rows
        self.source.sampled(every, batch)
        if tokens.num_draft_tokens is None:
            return
        drafted = np.flatnonzero(tokens.num_draft_tokens)
        rows, num_drafts = every[drafted], tokens.num_draft_tokens[drafted]
        num_accepted = batch.num_tokens[rows] - tokens.seq_lens[drafted] + num_drafts - 1
        for row, count, accepted in zip(
            rows.tolist(), num_drafts.tolist(), num_accepted.tolist(), strict=True
        ):
            if (length := self._lengths.get(row)) is not None:
                length.verified(count, accepted)
        self.source.verified(rows, batch)

    def complete(
        self, step: StepInput, batch: InputBatch, forced: Callable[[int], Sequence[int]]
    ) -> StepInput:
        """The step as the batch, to which its difference was applied, can run it: computed tokens
        are those that are, and drafts of id -1 are proposals, or left out where there are none.
        `forced`: by row, tokens about which a grammar leaves no choice.
        """
        known, drafts = _without_drafts(step, batch), _drafts_of(step)
        wanted: list[WantedDrafts] = []
        for index, own in enumerate(drafts):
            if PROPOSED_HERE in own:
                drafts[index] = ()
                row = int(step.rows[index])
                if most := min(self._length(row).next(), len(own)):
                    wanted.append(WantedDrafts(index, most, list(forced(row))[:most]))
        proposed = self.source.propose(known, batch, wanted)
        for want, found in zip(wanted, proposed, strict=True):
            drafts[want.index] = found
        if not any(drafts):
            return known
        counts = np.array([len(own) for own in drafts], np.int32)
        completed = known.copy()
        completed.num_scheduled_tokens = known.num_scheduled_tokens + counts
        completed.num_draft_tokens = counts
        completed.draft_token_ids = np.array(list(chain.from_iterable(drafts)), np.int32)
        return completed

    def _length(self, row: int) -> DraftLength:
        length = self._lengths.get(row)
        if length is None:
            length = self._lengths[row] = DraftLength(self._most)
        return length


def _drafts_of(step: StepInput) -> list[Sequence[int]]:
    """The drafts of each request; empty if the step has none."""
    drafts = iter(step.draft_token_ids.tolist())
    return [list(islice(drafts, count)) for count in step.num_draft_tokens.tolist()]


def _without_drafts(step: StepInput, batch: InputBatch) -> StepInput:
    """The step of known tokens alone. Computed tokens are those that are, without drafts of the
    step before that were rejected.
    """
    has_drafts = len(step.num_draft_tokens) > 0
    num_scheduled = step.num_scheduled_tokens
    if has_drafts:
        num_scheduled = num_scheduled - step.num_draft_tokens
    num_known = batch.num_tokens.take(step.rows)
    num_computed = np.minimum(step.num_computed_tokens, num_known - num_scheduled)
    if not (has_drafts or np.count_nonzero(num_computed != step.num_computed_tokens)):
        return step
    known = step.copy()
    known.num_scheduled_tokens, known.num_computed_tokens = num_scheduled, num_computed
    known.num_draft_tokens = known.draft_token_ids = no_ints()
    return known
