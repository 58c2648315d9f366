"""Where the drafts of a step come from: one answer for all requests of the step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.core.batch.input_batch import InputBatch
from services.worker.core.step import Int32Array, NewRequest, StepInput
from services.worker.speculation.proposer import Proposer


@dataclass(slots=True)  # see StepInput
class WantedDrafts:
    """Drafts that are wanted of one request, by its index in the step and its row of the batch: up
    to `most`. A grammar leaves no choice about the `forced` ones, which come first; there are no
    more of them than `most`.
    """

    index: int
    row: int
    most: int
    forced: list[int]

    def possible(self, proposed: Sequence[int]) -> Sequence[int]:
        """What is proposed, or only the forced drafts if it does not begin so."""
        forced = self.forced
        begins_so = not forced or list(proposed[: len(forced)]) == forced
        return proposed if begins_so else forced


class DraftSource(Protocol):
    """Proposes drafts, the same on every rank of a model."""

    def enter(self, requests: Sequence[NewRequest]) -> None:
        """These requests have entered the batch, in rows that are free."""

    def propose(
        self, step: StepInput, batch: InputBatch, wanted: Sequence[WantedDrafts]
    ) -> Sequence[Sequence[int]]:
        """Up to `most` drafts of each request of which some are wanted, in their order.

        Called once for each step that computes tokens, also if no drafts are wanted. `step` is the
        step without its drafts: all its tokens are known, and of those requests it computes the
        last known one. Entries of `batch.token_ids` behind the known tokens may be overwritten.
        """

    def sampled(self, rows: Int32Array, batch: InputBatch) -> None:
        """A step of these rows has ended, and the tokens that it sampled of some are known."""

    def verified(self, rows: Int32Array, batch: InputBatch) -> None:
        """The drafts of these rows were verified. Those that stood are known tokens now, and so is
        one more, which is not computed.
        """

    def forget(self, rows: Int32Array) -> None:
        """The requests in these rows have left."""

    def clear(self) -> None:
        """All requests have left."""


class ProposerSource:
    """A DraftSource that asks a Proposer for each request by itself."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def enter(self, requests: Sequence[NewRequest]) -> None:
        """A request is known from its first proposal on."""

    def propose(
        self,
        step: StepInput,  # noqa: ARG002 - all tokens are in the batch
        batch: InputBatch,
        wanted: Sequence[WantedDrafts],
    ) -> list[Sequence[int]]:
        return [self._of_request(batch, want) for want in wanted]

    def _of_request(self, batch: InputBatch, want: WantedDrafts) -> Sequence[int]:
        known = batch.token_ids[want.row, : batch.num_tokens[want.row]]
        return want.possible(self._proposer.propose(want.row, known, want.most))

    def sampled(self, rows: Int32Array, batch: InputBatch) -> None:
        """A proposer is given all tokens when it is asked."""

    def verified(self, rows: Int32Array, batch: InputBatch) -> None:
        """Nothing depends on what became of drafts."""

    def forget(self, rows: Int32Array) -> None:
        for row in rows.tolist():
            self._proposer.forget(row)

    def clear(self) -> None:
        self._proposer.clear()
