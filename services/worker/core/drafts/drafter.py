"""Proposes the drafts of a step, whose ids the scheduler does not know when it plans the step.

The scheduler plans a step while the previous step runs. It counts the previous step's drafts as
accepted, and sets the ids of new drafts to -1. When the step begins, the worker has verified the
previous drafts, and proposes new drafts after the tokens that are now known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from services.worker.backends.arrays import Int32Array
from services.worker.core.batch.input_batch import InputBatch
from services.worker.core.batch.layout import StepTokens
from services.worker.core.batch.step_difference import PROPOSED_HERE
from services.worker.core.drafts.draft_source import DraftSource, WantedDrafts
from services.worker.core.step import StepInput, no_ints

_MOST_EMPTY = 2
"""After this many steps in a row with only rejected drafts, a request gets fewer drafts."""
_FIRST_REST, _LONGEST_REST = 8, 64
"""For how many steps a request gets no drafts in its first and in its longest pause."""


class DraftLength:
    """The number of drafts of one request: 1 to `most`, or 0 during a pause.

    Rejected drafts waste computation. If all drafts of a step are accepted, the number is doubled.
    If all are rejected in _MOST_EMPTY steps in a row, it is halved, or, if it is 1 already, the
    request gets no drafts for some steps. Each such pause is twice as long as the previous one,
    because a text that has not repeated itself is likely to continue without repetition.
    """

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._num_empty = 0
        self._rest, self._next_rest = 0, _FIRST_REST

    def next(self) -> int:
        if self._rest:
            self._rest -= 1
            return 0
        return self._length

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Records how many drafts of a step were accepted. `num_drafts` is at least 1."""
        if num_accepted:
            self._num_empty, self._next_rest = 0, _FIRST_REST
            if num_accepted == num_drafts:
                self._length = min(self._most, 2 * self._length)
            return
        self._num_empty += 1
        if self._num_empty < _MOST_EMPTY:
            return
        self._num_empty = 0
        if self._length > 1:
            self._length //= 2
        else:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._rest, _LONGEST_REST)


_NO_DRAFTS = no_ints()


@dataclass(eq=False)
class Drafter:
    """Fills in the drafts of steps, which `source` proposes.

    A request gets as many drafts as the scheduler has planned, or fewer if few of its drafts were
    accepted.
    """

    source: DraftSource
    most: int
    """The maximum number of drafts of a request in a step."""
    _lengths: dict[int, DraftLength] = field(init=False, default_factory=dict)

    def update(self, step: StepInput) -> None:
        self.source.forget(step.removed_rows)
        for row in step.removed_rows.tolist():
            self._lengths.pop(row, None)
        self.source.enter(step.new_requests)

    def clear(self) -> None:
        self.source.clear()
        self._lengths.clear()

    def sampled(self, tokens: StepTokens, batch: InputBatch) -> None:
        """Records the tokens that a step sampled, and how many drafts were accepted: a request's
        sampled tokens are its accepted drafts and one more token.
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
        self,
        step: StepInput,
        num_computed_tokens: Int32Array,
        batch: InputBatch,
        forced: Callable[[int], Sequence[int]],
    ) -> StepInput:
        """Returns the step with actual token counts and draft ids. The step's changes must already
        be applied to the batch.

        `num_computed_tokens` has the numbers that `apply_step` returned. Drafts with id -1 are
        replaced by proposals, or removed if there is no proposal. `forced` returns the tokens that
        the grammar of a row's request forces next.
        """
        known = _without_drafts(step, num_computed_tokens)
        if not len(step.num_draft_tokens):
            self.source.propose(known, batch, ())
            return known
        drafts: list[Sequence[int]] = []
        wanted: list[WantedDrafts] = []
        token_ids, begin = step.draft_token_ids.tolist(), 0
        for row, count in zip(step.rows.tolist(), step.num_draft_tokens.tolist(), strict=True):
            own, begin = token_ids[begin : begin + count], begin + count
            if PROPOSED_HERE in own:
                own = ()
                if (length := self._lengths.get(row)) is None:
                    length = self._lengths[row] = DraftLength(self.most)
                if most := min(length.next(), count):
                    wanted.append(WantedDrafts(len(drafts), row, most, list(forced(row))[:most]))
            drafts.append(own)
        proposed = self.source.propose(known, batch, wanted)
        for want, found in zip(wanted, proposed, strict=True):
            drafts[want.index] = found
        return _with_drafts(known, drafts) if any(drafts) else known


def _without_drafts(step: StepInput, num_computed_tokens: Int32Array) -> StepInput:
    """Returns the step without its drafts, and with the given numbers of computed tokens."""
    has_drafts = len(step.num_draft_tokens) > 0
    if not (has_drafts or np.count_nonzero(num_computed_tokens != step.num_computed_tokens)):
        return step
    known = step.copy()
    known.num_computed_tokens = num_computed_tokens
    if has_drafts:
        known.num_scheduled_tokens = step.num_scheduled_tokens - step.num_draft_tokens
        known.num_draft_tokens = known.draft_token_ids = _NO_DRAFTS
    return known


def _with_drafts(known: StepInput, drafts: Sequence[Sequence[int]]) -> StepInput:
    counts = np.array([len(own) for own in drafts], np.int32)
    completed = known.copy()
    completed.num_scheduled_tokens = known.num_scheduled_tokens + counts
    completed.num_draft_tokens = counts
    completed.draft_token_ids = np.array(list(chain.from_iterable(drafts)), np.int32)
    return completed
