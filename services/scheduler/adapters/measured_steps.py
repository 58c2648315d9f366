"""An observer of the engine that measures requests, before another one."""

from collections.abc import Sequence

from services.scheduler.adapters.request_metrics import RequestMetrics
from services.scheduler.core.output import EngineCoreOutputs, PreemptionCause, SchedulerOutput
from services.scheduler.core.ports import PoolLost, StepObserver, WorkersLost
from services.scheduler.core.request import Request


class MeasuredSteps:
    """A `StepObserver` that passes every call on."""

    def __init__(self, observer: StepObserver, metrics: RequestMetrics) -> None:
        self._observer = observer
        self._metrics = metrics

    def arrived(self, requests: Sequence[Request]) -> None:
        self._metrics.arrived(requests)
        self._observer.arrived(requests)

    def begin(self) -> str:
        return self._observer.begin()

    def planned(self, plan: SchedulerOutput) -> None:
        self._metrics.planned(plan)
        self._observer.planned(plan)

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        self._metrics.done(plan, update)
        self._observer.done(plan, update)

    def ended(self, requests: Sequence[Request]) -> None:
        self._metrics.ended(requests)
        self._observer.ended(requests)

    def paused(self) -> None:
        self._observer.paused()

    def resumed(self) -> None:
        self._observer.resumed()

    def preempted(self, requests: Sequence[Request], cause: PreemptionCause) -> None:
        self._observer.preempted(requests, cause)

    def lost(self, preempted: Sequence[Request], lost: PoolLost | WorkersLost) -> None:
        self._observer.lost(preempted, lost)

    def recovered(self) -> None:
        self._observer.recovered()

    def stopped(self) -> None:
        self._observer.stopped()
