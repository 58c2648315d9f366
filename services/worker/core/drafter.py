"""Completes the drafts of a step, which the scheduler plans without knowing them.

The scheduler plans a step while the one before it runs. It counts that step's drafts as accepted,
and leaves the next ones to the worker: their ids are -1. Once the step begins, the worker knows
which drafts were accepted, and goes on from its own tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from services.worker.core.input_batch import InputBatch
from services.worker.core.step import Int32Array, StepInput, no_ints
from services.worker.core.step_check import PROPOSED_HERE
from services.worker.speculation.draft_length import DraftLength
from services.worker.speculation.proposer import Proposer


class Drafter:
    """Proposes the drafts of steps, with a proposer, for the requests of a batch: of each as many
    as the scheduler has room for, or fewer while few of them stand.
    """

    def __init__(self, proposer: Proposer, most: int) -> None:
        """`most`: drafts of a request in a step."""
        self._proposer = proposer
        self._most = most
        self._lengths: dict[int, DraftLength] = {}

    def forget(self, rows: Int32Array) -> None:
        """The requests in these rows have left."""
        for row in rows.tolist():
            self._proposer.forget(row)
            self._lengths.pop(row, None)

    def clear(self) -> None:
        """All requests have left."""
        self._proposer.clear()
        self._lengths.clear()

    def verified(self, rows: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """What became of the drafts of a step; the arrays are parallel."""
        for index in num_drafts.nonzero()[0].tolist():
            length = self._lengths.get(int(rows[index]))
            if length is not None:
                length.verified(int(num_drafts[index]), int(num_accepted[index]))

    def complete(
        self, step: StepInput, batch: InputBatch, forced: Callable[[int], Sequence[int]]
    ) -> StepInput:
        """The step as the batch, to which its difference was applied, can run it: computed tokens
        are those that are, and drafts of id -1 are proposals, or left out where there are none.
        `forced`: by row, tokens about which a grammar leaves no choice.
        """
        drafts = step.num_draft_tokens
        num_drafts = drafts if len(drafts) else np.zeros(len(step.rows), np.int32)
        num_known = batch.num_tokens[step.rows]
        ends = step.num_computed_tokens + step.num_scheduled_tokens - num_drafts
        num_rejected = np.maximum(ends - num_known, 0)
        if not len(drafts):
            if not num_rejected.any():
                return step
            return replace(step, num_computed_tokens=step.num_computed_tokens - num_rejected)
        given, first, proposals = step.draft_token_ids, 0, list[np.ndarray]()
        counts = np.zeros(len(step.rows), np.int32)
        for index, count in enumerate(num_drafts.tolist()):
            if count:
                own = given[first : first + count]
                first += count
                row = int(step.rows[index])
                proposals.append(self._of_request(row, own, batch, forced))
                counts[index] = len(proposals[-1])
        has_drafts = counts.any()
        return replace(
            step,
            num_scheduled_tokens=step.num_scheduled_tokens - num_drafts + counts,
            num_computed_tokens=step.num_computed_tokens - num_rejected,
            num_draft_tokens=counts if has_drafts else no_ints(),
            draft_token_ids=np.concatenate(proposals) if has_drafts else no_ints(),
        )

    def _of_request(
        self,
        row: int,
        given: Int32Array,
        batch: InputBatch,
        forced: Callable[[int], Sequence[int]],
    ) -> Int32Array:
        """The drafts of one request: those that are forced, or what is proposed if it begins so."""
        if PROPOSED_HERE not in given:
            return given
        length = self._lengths.get(row)
        if length is None:
            length = self._lengths[row] = DraftLength(self._most)
        if not (wanted := min(length.next(), len(given))):
            return no_ints()
        known = batch.token_ids[row, : batch.num_tokens[row]]
        first = list(forced(row))[:wanted]
        proposed = list(self._proposer.propose(row, known, wanted))
        is_possible = proposed[: len(first)] == first
        return np.array(proposed if is_possible else first, np.int32)
