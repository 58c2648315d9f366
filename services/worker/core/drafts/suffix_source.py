"""Drafts from suffix trees: tokens that followed the same context in this or earlier responses."""

from collections.abc import Sequence

from services.worker.backends.suffix_decoding import SuffixDecoding
from services.worker.core.batch.input_batch import InputBatch
from services.worker.core.drafts.draft_source import DraftSource, WantedDrafts
from services.worker.core.step import Int32Array, NewRequest, StepInput


class SuffixSource(DraftSource):
    """A DraftSource. A response consists of the tokens sampled here since its request entered the
    batch. So tokens are not counted twice when a preempted request enters the batch again. All
    responses are forgotten when the batch is cleared, so that all ranks have the same trees.
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
