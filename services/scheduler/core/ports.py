"""Ports of the engine: a pool of blocks, workers, and consumers of a step's output.

The operations of the pool are in `services/common/pool/operations.py`.
"""

from asyncio import Future
from collections.abc import Sequence
from typing import Protocol

from services.common.errors import Unavailable
from services.common.pool.ids import RequestKey
from services.common.pool.operations import Operation, Outcome
from services.scheduler.core.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    PreemptionCause,
    SchedulerOutput,
)
from services.scheduler.core.request import Request


class PoolLost(Unavailable):
    """The pool's generation is over: no block table is valid any more."""

    reason = "POOL_LOST"

    def __init__(self, message: str, *, suspects: Sequence[RequestKey] = ()) -> None:
        """`suspects`: the requests of the transaction that the pool refused or answered wrongly."""
        super().__init__(message)
        self.suspects = suspects


class WorkersLost(Unavailable):
    """The workers' generation is over: the keys and values that they stored are lost."""

    reason = "WORKERS_LOST"


class KVPool(Protocol):
    """The memory of one replica."""

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        """Executes operations in order, up to the first that does not fit; exactly once.

        Raises PoolLost when the generation is over.
        """


class Executor(Protocol):
    """All workers of one replica."""

    async def submit(
        self, plan: SchedulerOutput, traceparent: str = ""
    ) -> Future[ModelRunnerOutput]:
        """Sends a step to every rank. The future that it returns has the step's output when the
        step is done; the caller may cancel it.

        Steps run in the order of the calls. The call and the future raise WorkersLost when the
        generation is over.
        """


class Replica(Protocol):
    """The pool and the workers: one generation covers both, and is lost with either."""

    @property
    def workers_were_ended(self) -> bool:
        """Whether a worker of the last generation was told to stop, or was ended by its supervisor:
        then no step is the cause of the loss.
        """

    async def open(self) -> object:
        """Begins a new generation with an empty pool and empty workers, as soon as both are
        reachable. Waits without a limit.
        """


class Readiness(Protocol):
    """Shows whether a step can run. Never blocks."""

    def ready(self) -> None:
        """Pool and workers are reachable."""

    def not_ready(self, reason: str) -> None:
        """Pool or workers are not reachable; `reason` is a sentence that names which."""


class Delivery(Protocol):
    """Sends tokens and ends back to the gateways."""

    def deliver(self, update: EngineCoreOutputs) -> None:
        """Passes on a step's new tokens and finished requests. Never blocks."""

    def deliver_ends(self, requests: Sequence[Request]) -> None:
        """Passes on requests that ended between steps. Never blocks."""


class StepObserver(Protocol):
    """Observes the engine, for traces and metrics. Changes nothing, never blocks."""

    def arrived(self, requests: Sequence[Request]) -> None:
        """Requests were queued."""

    def begin(self) -> str:
        """A step is about to be planned; returns its trace context, "" when it is not traced."""

    def planned(self, plan: SchedulerOutput) -> None:
        """The step is decided and about to be sent."""

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        """The step's tokens have arrived, and are about to be delivered."""

    def ended(self, requests: Sequence[Request]) -> None:
        """Requests were aborted between steps, and their ends are about to be delivered."""

    def paused(self) -> None:
        """No step is planned until `resumed`. May be called again."""

    def resumed(self) -> None:
        """Steps are planned again. May be called again."""

    def preempted(self, requests: Sequence[Request], cause: PreemptionCause) -> None:
        """Running requests were sent back to the queue between steps."""

    def lost(self, preempted: Sequence[Request], lost: PoolLost | WorkersLost) -> None:
        """Pool or workers are lost; the outputs of steps in flight are discarded."""

    def recovered(self) -> None:
        """Pool and workers are there again, and empty."""

    def stopped(self) -> None:
        """The engine ends; the outputs of steps in flight are discarded."""
