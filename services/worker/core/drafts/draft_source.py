"""The interface of a source of drafts, and sources that use a Proposer or suffix trees. One call
proposes drafts for all requests of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.backends.arrays import Int32Array
from services.worker.backends.suffix_decoding import SuffixDecoding
from services.worker.core.batch.input_batch import InputBatch
from services.worker.core.step import NewRequest, StepInput


@dataclass(slots=True)  # not frozen, see StepInput
class WantedDrafts:
    """Asks for up to `most` drafts for a request. `index` is the request's index in the step, and
    `row` its row in the batch. `forced` has the tokens, at most `most`, that the request's grammar
    forces next. They are the first drafts.
    """

    index: int
    row: int
    most: int
    forced: list[int]

    def possible(self, proposed: Sequence[int]) -> Sequence[int]:
        """Returns `proposed` if it begins with the forced tokens, otherwise the forced tokens."""
        forced = self.forced
        begins_so = not forced or list(proposed[: len(forced)]) == forced
        return proposed if begins_so else forced


class DraftSource:
    """Proposes drafts, equal ones on all ranks. Its methods for events do nothing by default."""

    def enter(self, requests: Sequence[NewRequest]) -> None:
        """Called when these requests have been added to rows of the batch."""

    def propose(
        self, step: StepInput, batch: InputBatch, wanted: Sequence[WantedDrafts]
    ) -> Sequence[Sequence[int]]:
        """Returns up to `most` drafts for each entry of `wanted`, in its order.

        Called once for each step that computes tokens, even if `wanted` is empty. `step` does not
        contain drafts yet, so all its tokens are known. For requests in `wanted`, it computes their
        last known token. Entries of `batch.token_ids` after the known tokens may be overwritten.
        """
        raise NotImplementedError

    def sampled(self, rows: Int32Array, batch: InputBatch) -> None:
        """Called after a step of these rows, when the sampled tokens are in the batch."""

    def verified(self, rows: Int32Array, batch: InputBatch) -> None:
        """Called after the drafts of these rows were verified. The batch then has the accepted
        drafts and one more token, which the next step computes.
        """

    def forget(self, rows: Int32Array) -> None:
        """Called when the requests in these rows have left the batch."""

    def clear(self) -> None:
        """Called when all requests have left the batch."""


class Proposer(Protocol):
    """Proposes drafts: tokens that are likely to follow a request's tokens. Drafts change how many
    steps an output takes, but not its tokens.

    Requests are identified by their row in the batch. All ranks of a model must propose the same
    drafts.
    """

    def propose(self, row: int, token_ids: Int32Array, most: int) -> Sequence[int]:
        """Returns up to `most` drafts, where `most` is at least 1. `token_ids`: all known tokens of
        the request. A later call for the row passes these tokens again, followed by new ones.
        """

    def forget(self, row: int) -> None:
        """Called when the request in this row has left the batch, even if it never had drafts."""

    def clear(self) -> None:
        """Called when all requests have left the batch."""


class ProposerSource(DraftSource):
    """A DraftSource that calls a Proposer once for each request."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def propose(
        self, step: StepInput, batch: InputBatch, wanted: Sequence[WantedDrafts]
    ) -> list[Sequence[int]]:
        proposed = []
        for want in wanted:
            known = batch.token_ids[want.row, : batch.num_tokens[want.row]]
            found = self._proposer.propose(want.row, known, want.most)
            proposed.append(want.possible(found))
        return proposed

    def forget(self, rows: Int32Array) -> None:
        for row in rows.tolist():
            self._proposer.forget(row)

    def clear(self) -> None:
        self._proposer.clear()


class SuffixSource(DraftSource):
    """A DraftSource that uses suffix trees over responses (see SuffixDecoding). A response consists
    of the tokens sampled since its request was added to the batch, so that tokens before a
    preemption are not counted again. When the batch is cleared, all responses are dropped, so that
    all ranks have the same trees.
    """

    def __init__(self, trees: SuffixDecoding) -> None:
        self._trees = trees

    def enter(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            self._trees.enter(request.row, request.cache_key, len(request.token_ids))

    def propose(
        self, step: StepInput, batch: InputBatch, wanted: Sequence[WantedDrafts]
    ) -> list[Sequence[int]]:
        proposed = []
        for want in wanted:
            found = self._trees.propose(want.row, batch.token_ids, batch.num_tokens, want.most)
            proposed.append(want.possible(found))
        return proposed

    def sampled(self, rows: Int32Array, batch: InputBatch) -> None:
        self._trees.take_in(rows, batch.token_ids, batch.num_tokens)

    def forget(self, rows: Int32Array) -> None:
        for row in rows.tolist():
            self._trees.leave(row)

    def clear(self) -> None:
        self._trees.clear()
