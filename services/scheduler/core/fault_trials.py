"""Trials in the search for a request whose steps always fail: only some requests are admitted."""

from collections.abc import Sequence

from services.scheduler.core.fault_search import FaultSearch
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler


class FaultTrials:
    """Has a scheduler admit only the requests that the search wants to run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._search = FaultSearch()
        self._admitted: Sequence[Request] | None = None

    @property
    def is_searching(self) -> bool:
        """Whether there are suspects."""
        return self._search.is_active

    @property
    def holds_back(self) -> bool:
        """Whether requests are held back for a trial."""
        return bool(self._admitted)

    @property
    def is_change_due(self) -> bool:
        """Whether other requests are to run than those that the scheduler admits."""
        if not self._search.is_active and self._admitted is None:
            return False
        return self._search.trial() != self._admitted

    def change(self) -> None:
        """Has the scheduler admit the requests that the search wants to run. None may run."""
        trial = self._search.trial()
        if trial != self._admitted:
            self._admitted = trial
            self._scheduler.admit_only(trial)

    def step_done(self, plan: SchedulerOutput) -> None:
        """Clears the suspects that got past their failed step."""
        self._search.step_done(plan)

    def steps_failed(self, plans: Sequence[SchedulerOutput]) -> Request | None:
        """Suspects the requests of steps that were lost with the workers; returns the request that
        is to be ended, if one is found.
        """
        return self._search.steps_failed(plans)
