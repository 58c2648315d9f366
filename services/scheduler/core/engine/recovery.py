"""Reopens a lost pool or lost workers, and ends a request whose steps always cause the loss."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.common.errors import Unavailable
from services.common.pool.ids import RequestKey
from services.common.request.finish import FinishReason
from services.scheduler.core.engine.engine_lock import EngineLock
from services.scheduler.core.engine.fault_search import FaultSearch
from services.scheduler.core.engine.pending_changes import PendingChanges
from services.scheduler.core.output import PreemptionCause, SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.ports import PoolAndWorkers, StepObserver, WorkersLost

FIRST_BACKOFF_SECONDS = 0.1
"""Delay before the second recovery without progress. Each further recovery doubles it."""
LAST_BACKOFF_SECONDS = 5.0


class Losses:
    """Counts losses of the pool or the workers. Losses in a row have no progress between them."""

    def __init__(self) -> None:
        self.num_of_pool = 0
        self.num_of_workers = 0
        self._num_in_a_row = 0

    @property
    def is_in_a_row(self) -> bool:
        """Whether no progress was made since the last recovery (see `made_progress`)."""
        return self._num_in_a_row > 0

    @property
    def backoff_seconds(self) -> float:
        """Delay before the next recovery, in seconds."""
        if self._num_in_a_row == 0:
            return 0.0
        doublings = min(self._num_in_a_row - 1, 16)
        return min(FIRST_BACKOFF_SECONDS * (1 << doublings), LAST_BACKOFF_SECONDS)

    def note(self, lost: Unavailable) -> None:
        if isinstance(lost, WorkersLost):
            self.num_of_workers += 1
        else:
            self.num_of_pool += 1

    def recovered(self) -> None:
        self._num_in_a_row += 1

    def made_progress(self) -> None:
        """Records progress, such as a successful step. The next loss is the first in a row."""
        self._num_in_a_row = 0


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Recovery:
    """Reopens the pool and the workers after a loss of either, and counts the losses. Runs the
    fault search (see `FaultSearch`), which lets only some requests run at a time to find a request
    whose steps always fail. `lock` is the lock of the engine loop. `wake` is the event that is set
    when changes of requests are pending.
    """

    scheduler: Scheduler
    replica: PoolAndWorkers
    changes: PendingChanges
    observer: StepObserver
    lock: EngineLock
    wake: asyncio.Event
    losses: Losses = field(init=False, default_factory=Losses)
    _search: FaultSearch = field(init=False, default_factory=FaultSearch)

    @property
    def is_trial_due(self) -> bool:
        """Whether the fault search wants other requests to run than may run now."""
        return self._search.trial() != self.scheduler.queues.admitted_only

    def plan_of(self, keys: Collection[RequestKey]) -> SchedulerOutput:
        """A plan with the requests of `keys`, to pass to `steps_failed` if a transaction failed."""
        requests = [one for one in self.scheduler.requests if one.key in set(keys)] if keys else []
        computed = [request.num_computed_tokens for request in requests]
        return SchedulerOutput(-1, requests, [1] * len(requests), computed)

    def steps_failed(self, plans: Sequence[SchedulerOutput]) -> None:
        """Passes lost steps to the fault search, and ends the request that the search has found, if
        any. Does nothing if a signal or a supervisor ended the workers.
        """
        if self.replica.workers_were_ended or not any(plan.requests for plan in plans):
            return
        culprit = self._search.steps_failed(plans)
        if culprit is not None:
            logger.error(
                "request ended with an error: every step with it lost the workers or the kvpool",
                extra=culprit.log_fields,
            )
            self.losses.made_progress()
            self.changes.end({culprit: FinishReason.STEP_FAILED})

    def step_done(self, plan: SchedulerOutput) -> None:
        """Records a successful step. It counts as progress if the fault search has no suspects."""
        if self._search.is_active:
            self._search.step_done(plan)
        else:
            self.losses.made_progress()

    def begin_trial(self) -> None:
        """Restricts admission to the requests that the fault search selects. No request may run."""
        if (trial := self._search.trial()) != self.scheduler.queues.admitted_only:
            self.scheduler.admit_only(trial)

    def change_trial(self) -> None:
        """Preempts all requests, and restricts admission to requests that the search selects."""
        preempted = self.scheduler.preempt_all()
        self.observer.preempted(preempted, PreemptionCause.FAULT_SEARCH)
        self.begin_trial()

    async def reopen(self) -> None:
        """Reopens the pool and the workers after a delay. Applies changes of requests meanwhile."""

        async def open_again() -> None:
            await asyncio.sleep(self.losses.backoff_seconds)
            await self.replica.open()

        reopening = asyncio.create_task(open_again(), name="reopen")
        reopening.add_done_callback(lambda _: self.wake.set())
        try:
            while not reopening.done():
                self.wake.clear()
                async with self.lock:
                    self.changes.apply()
                await self.wake.wait()
            reopening.result()
        finally:
            reopening.cancel()
        self.losses.recovered()
