"""The interface of transfers of keys and values to and from another tier or replica."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from services.common.pool.operations import BlockCopy, BlockTables
from services.scheduler.core.kv_transfer import KVTransferResults
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.admission import AdmissionPlan
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.request import Request

Answer = None | bool | list[int | bool]
"""The JSON form of a connector's answer.

`[tokens, is_async]` is the number of tokens that can be loaded, and None means that the number is
not known yet. True and False answer whether blocks of an ended request are still read, or whether
transfers will free blocks.
"""


class Transfers(Protocol):
    """The calls of a scheduler with a connector. Without a connector, nothing is called."""

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is in progress. Steps must continue then, because their outputs report
        the end of the transfer.
        """

    @property
    def is_moving(self) -> bool:
        """Whether a transfer is in progress, or blocks are to be freed at the end of a step."""

    # While a step is planned

    def begin_step(self) -> None:
        """Called before a step is planned."""

    async def plan(
        self, builder: StepBuilder, request: Request, traceparent: str
    ) -> AdmissionPlan | None:
        """Passes over (skips) a request, or begins its asynchronous load. Returns None if the
        request may be admitted now. In that case `prefixes.external` has the number of tokens to
        load within the step.
        """

    def promote(self, request: Request) -> bool:
        """Makes a request ready for admission after its load, and publishes the valid blocks. If no
        block is valid, frees all blocks of the request. Does nothing and returns False if no load
        of the request has ended.
        """

    def admitted(
        self, request: Request, blocks: BlockTables, num_new_tokens: int, num_external_tokens: int
    ) -> None:
        """Records an admitted request. The planned step computes `num_new_tokens` and loads
        `num_external_tokens` of its tokens.
        """

    def defer_frees(self, victim: Request, in_flight: Iterable[SchedulerOutput]) -> bool:
        """Whether transfers or steps in flight are about to free blocks, so that the preemption of
        `victim` would free nothing now.
        """

    def defer_copies(self, copies: Sequence[BlockCopy], step: int) -> bool:
        """Returns True if the blocks of copies are freed only after the output of the step that
        makes the copies. Returns False if the caller frees them now.
        """

    def planned(self, plan: SchedulerOutput) -> None:
        """Called when a step is fully planned. Adds the step's transfers to the plan."""

    # When the blocks of a request are freed

    def preempted(self, request: Request) -> None:
        """Records that the blocks of a request are freed because it was preempted."""

    def ended(self, request: Request, in_flight: Sequence[SchedulerOutput]) -> None:
        """Frees the blocks of an ended request as soon as no transfer and no step in flight uses
        them.
        """

    # When the output of a step has arrived

    def take_failures(
        self,
        plan: SchedulerOutput,
        results: KVTransferResults,
        in_flight: Sequence[SchedulerOutput],
        waiting: Iterable[Request],
        running: Iterable[Request],
    ) -> set[Request]:
        """Forwards the results of a step, and frees blocks that waited for its output. Resets the
        computed tokens of requests to the start of the first block whose load failed.

        The step and the steps in flight were planned as if all loads had succeeded. With the policy
        RECOMPUTE, returns the requests whose output of these steps is invalid. With the policy
        FAIL, returns all requests that have a block whose load failed.
        """

    def finished(self, results: KVTransferResults, in_flight: Sequence[SchedulerOutput]) -> None:
        """Records which transfers have ended. Frees the blocks of ended requests that no transfer
        uses any more. If steps in flight write the blocks, frees them after these steps.
        """

    # When pool or workers are lost, or the connector is reset

    def forget(self) -> None:
        """Resets the state, because pool and workers, and so all transfers, are lost."""

    def reset_cache(self) -> None:
        """Removes everything that the connector has stored. No request may hold blocks."""

    # For the step log

    def record_answers(self) -> None:
        """Records the connector's answers from now on, because scheduling depends on them."""

    def take_answers(self) -> list[Answer]:
        """Returns the answers since the last call, in the order of the calls of the connector."""


class LoggedAnswers(Protocol):
    """The answers of a connector in a step log, in the order of calls. Its methods raise an error
    if the next answer is missing or has another form.
    """

    def match(self) -> tuple[int, bool] | None:
        """How many tokens can be loaded, and whether they are loaded between steps."""

    def flag(self) -> bool:
        """Returns an answer that is true or false."""
