"""Recovers from losses of pool or workers, and searches for a request whose steps always fail."""

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
"""Seconds before the second of several recoveries in a row. Doubles with each further one."""
LAST_BACKOFF_SECONDS = 5.0


class Losses:
    """Counts losses. Losses are in a row if no step succeeded between them."""

    def __init__(self) -> None:
        self.num_of_pool = 0
        self.num_of_workers = 0
        self._num_in_a_row = 0

    @property
    def is_in_a_row(self) -> bool:
        """Whether no progress was made since the last recovery."""
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
        """Records a successful recovery. The next loss counts as one more in a row."""
        self._num_in_a_row += 1

    def made_progress(self) -> None:
        """Records progress, such as a successful step. The next loss is the first in a row."""
        self._num_in_a_row = 0


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Recovery:
    """Counts losses of pool and workers, and reopens both. During a fault search, which finds a
    request whose steps always fail, allows only the selected requests to be admitted. `lock` is the
    lock of the engine loop. It is held while changes are applied during the recovery. `wake` is the
    loop's event, which is set when there are changes.
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
        """Whether the fault search selects other requests than those that may be admitted now."""
        return self._search.trial() != self.scheduler.queues.admitted_only

    def plan_of(self, keys: Collection[RequestKey]) -> SchedulerOutput:
        """A stand-in for the step whose transaction, with the requests of `keys`, failed."""
        requests = [one for one in self.scheduler.requests if one.key in set(keys)] if keys else []
        computed = [request.num_computed_tokens for request in requests]
        return SchedulerOutput(-1, requests, [1] * len(requests), computed)

    def steps_failed(self, plans: Sequence[SchedulerOutput]) -> None:
        """Makes the requests of lost steps suspects. Ends a request whose steps always fail, if one
        was found. Does nothing if a signal or a supervisor ended the workers.
        """
        if self.replica.workers_were_ended or not any(plan.requests for plan in plans):
            return
        culprit = self._search.steps_failed(plans)
        if culprit is not None:
            logger.error("a request is given up: its steps always fail", extra=culprit.log_fields)
            self.losses.made_progress()
            self.changes.end({culprit: FinishReason.STEP_FAILED})

    def step_done(self, plan: SchedulerOutput) -> None:
        """Records a successful step after a loss. If no suspects are left, later losses no longer
        count as in a row with earlier ones.
        """
        if self._search.is_active:
            self._search.step_done(plan)
        else:
            self.losses.made_progress()

    def begin_trial(self) -> None:
        """Allows only the requests of the fault search to be admitted. No request may run."""
        if (trial := self._search.trial()) != self.scheduler.queues.admitted_only:
            self.scheduler.admit_only(trial)

    def change_trial(self) -> None:
        """Preempts all requests, then allows only the requests that the fault search selects."""
        preempted = self.scheduler.preempt_all()
        self.observer.preempted(preempted, PreemptionCause.FAULT_SEARCH)
        self.begin_trial()

    async def reopen(self) -> None:
        """Reopens pool and workers after a delay. Meanwhile requests are added and ended."""

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
