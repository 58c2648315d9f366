"""The interface through which a scheduler transfers keys and values between the KV cache and a KV
connector, such as host memory or another replica.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from services.common.pool.operations import BlockCopy, BlockTables
from services.scheduler.core.kv_transfer import KVTransferResults
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.admission import AdmissionPlan
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.request import Request

Answer = None | bool | list[int | bool]
"""The result of one call of a KV connector, in the form in which the step log records it.

`[tokens, is_async]` says how many tokens can be loaded, and whether they are loaded between steps.
None means that the number is not known yet. A Boolean says whether transfers still read blocks of
an ended request or, in another call, whether transfers will free blocks.
"""


class Transfers(Protocol):
    """The scheduler's side of a KV connector. The option `transfers` implements it."""

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is in progress. Only the output of a step reports its end."""

    @property
    def is_moving(self) -> bool:
        """Whether a transfer is in progress, or blocks will be freed with the output of a step."""

    # Called while a step is planned

    def begin_step(self) -> None:
        """Called before a step is planned."""

    async def plan(
        self, builder: StepBuilder, request: Request, traceparent: str
    ) -> AdmissionPlan | None:
        """Looks up the prefix of a waiting request in the pool and the connector. Returns None if
        the request may be admitted now, and sets `builder.prefixes.external` to the number of
        tokens to load within the step. Otherwise begins an asynchronous load or skips the request,
        and returns a plan that contains this decision.
        """

    def promote(self, request: Request) -> bool:
        """If a load of the request has ended: makes the request ready for admission, publishes the
        blocks that were loaded, and returns True. If no block was loaded, frees all blocks of the
        request. If no load has ended, returns False and changes nothing.
        """

    def admitted(
        self, request: Request, blocks: BlockTables, num_new_tokens: int, num_external_tokens: int
    ) -> None:
        """Records an admitted request. The planned step computes `num_new_tokens` and loads
        `num_external_tokens` of its tokens.
        """

    def defer_frees(self, victim: Request, in_flight: Iterable[SchedulerOutput]) -> bool:
        """Called when the pool lacks blocks for a running request. Returns True to wait for blocks
        that transfers or steps in flight will free, and False to preempt `victim`, the request that
        the policy selects.
        """

    def defer_copies(self, copies: Sequence[BlockCopy], step: int) -> bool:
        """Returns True if the blocks of `copies` are freed after the output of the step that makes
        the copies. Returns False if the caller must free them now.
        """

    def planned(self, plan: SchedulerOutput) -> None:
        """Called when a step is fully planned. Adds the step's transfers to the plan."""

    # Called when the blocks of a request are freed

    def preempted(self, request: Request) -> None:
        """Records that the blocks of a request are freed because it was preempted."""

    def ended(self, request: Request, in_flight: Sequence[SchedulerOutput]) -> None:
        """Frees an ended request's blocks as soon as no transfer or step in flight uses them."""

    # Called when the output of a step has arrived

    def take_failures(
        self,
        plan: SchedulerOutput,
        results: KVTransferResults,
        in_flight: Sequence[SchedulerOutput],
        waiting: Iterable[Request],
        running: Iterable[Request],
    ) -> set[Request]:
        """Passes the transfer results of a step to the connector. Frees the blocks that were kept
        until this step's output arrived. If a block of a request could not be loaded, resets the
        request's computed tokens to the start of the first such block.

        With the load-failure policy RECOMPUTE, returns the requests whose outputs of this step and
        of the steps in flight are invalid, because these steps were planned as if all loads had
        succeeded. With the policy FAIL, returns all requests with a block that was not loaded.
        """

    def finished(self, results: KVTransferResults, in_flight: Sequence[SchedulerOutput]) -> None:
        """Records which transfers have ended. Frees the blocks of ended requests as soon as no
        transfer uses them and no step in flight writes them.
        """

    # Called when the pool or the workers are lost, or the connector is reset

    def forget(self) -> None:
        """Resets the state, because the pool, the workers and all transfers are lost."""

    def reset_cache(self) -> None:
        """Removes everything that the connector has stored. No request may hold blocks."""

    # Called by the step log

    def record_answers(self) -> None:
        """Records the results of the connector's calls from now on. Planning depends on them."""

    def take_answers(self) -> list[Answer]:
        """Returns the results that were recorded since the last call, in the order of calls."""


class LoggedAnswers(Protocol):
    """Reads the results of a connector's calls from a step log, in order. Each method returns the
    next result, and raises an error if it is missing or is not of the method's type.
    """

    def match(self) -> tuple[int, bool] | None:
        """Returns how many tokens can be loaded, and whether they are loaded between steps."""

    def flag(self) -> bool:
        """Returns a Boolean result."""
