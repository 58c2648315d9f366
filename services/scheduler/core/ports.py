"""The interfaces of the engine (the loop that plans and sends steps) to the pool of KV blocks, the
workers, and the consumers of a step's output. A generation is the time from the opening of the pool
and the workers until one of them is lost. `services/common/pool/operations.py` defines the pool's
operations.
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
    """The pool has lost its blocks, for example because its process ended."""

    reason = "POOL_LOST"

    def __init__(self, message: str, *, suspects: Sequence[RequestKey] = ()) -> None:
        """`suspects` are the requests of a failed transaction, one of which may be the cause."""
        super().__init__(message)
        self.suspects = suspects


class WorkersLost(Unavailable):
    """The workers have lost their keys and values, for example because a process ended."""

    reason = "WORKERS_LOST"


class KVPool(Protocol):
    """The pool of KV blocks of one replica."""

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        """Executes the operations in order, exactly once. Stops at the first operation for which
        too few blocks are free. Raises PoolLost if the generation has ended.
        """


class Executor(Protocol):
    """All workers of one replica."""

    async def submit(
        self, plan: SchedulerOutput, traceparent: str = ""
    ) -> Future[ModelRunnerOutput]:
        """Sends a step to every rank. Steps run in the order of the calls. Returns a future of the
        step's output, which the caller may cancel. The call and the future raise WorkersLost if the
        generation has ended.
        """


class PoolAndWorkers(Protocol):
    """The pool and the workers of one replica, which are always opened together."""

    @property
    def workers_were_ended(self) -> bool:
        """Whether a signal or supervisor, and not a step, ended a worker of this generation."""

    async def open(self) -> object:
        """Begins a generation with empty pool and workers. Waits until all are reachable."""


class Readiness(Protocol):
    """Publishes whether steps can run. Never blocks."""

    def ready(self) -> None:
        """Called when the pool and the workers are reachable."""

    def not_ready(self, reason: str) -> None:
        """Called when the pool or the workers are not reachable. `reason` is a sentence."""


class Delivery(Protocol):
    """Sends new tokens and the ends of requests to the gateways."""

    def deliver(self, update: EngineCoreOutputs) -> None:
        """Sends a step's new tokens and finished requests. Never blocks."""

    def deliver_ends(self, requests: Sequence[Request]) -> None:
        """Sends the ends of requests that ended between steps. Never blocks."""


class StepObserver(Protocol):
    """Observes the engine, for traces and metrics. Must not block, or change requests or plans."""

    def arrived(self, requests: Sequence[Request]) -> None:
        """Called after requests were queued."""

    def begin(self) -> str:
        """Called before a step is planned. Returns its trace context, empty if it is not traced."""

    def planned(self, plan: SchedulerOutput) -> None:
        """Called after a step was planned, before it is sent to the workers."""

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        """Called after a step's output was applied, before its tokens are delivered."""

    def ended(self, requests: Sequence[Request]) -> None:
        """Called when requests have ended between steps, before their ends are delivered."""

    def paused(self) -> None:
        """Called when an operator has paused the engine. Repeated calls are allowed."""

    def resumed(self) -> None:
        """Called when an operator has ended the pause. Repeated calls are allowed."""

    def preempted(self, requests: Sequence[Request], cause: PreemptionCause) -> None:
        """Called when running requests were preempted between steps."""

    def lost(self, preempted: Sequence[Request], lost: PoolLost | WorkersLost) -> None:
        """Called when the pool or the workers are lost. Outputs in flight are discarded."""

    def recovered(self) -> None:
        """Called when an empty pool and empty workers are reachable after a loss."""

    def stopped(self) -> None:
        """Called when the engine stops. The outputs of steps in flight are discarded."""
