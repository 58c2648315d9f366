"""The observer of a replica's engine, for traces, metrics and recorded steps."""

from collections.abc import Sequence

from services.scheduler.adapters.telemetry.activity import WatchedSteps
from services.scheduler.adapters.telemetry.request_metrics import RequestMetrics
from services.scheduler.adapters.telemetry.speculation_metrics import SpeculationMetrics
from services.scheduler.adapters.telemetry.step_tracer import StepTracer
from services.scheduler.core.output import EngineCoreOutputs, PreemptionCause, SchedulerOutput
from services.scheduler.core.ports import PoolLost, WorkersLost
from services.scheduler.core.request import Request


class EngineObserver:
    """A `StepObserver` that forwards each call to traces, metrics and recorded steps."""

    def __init__(
        self,
        tracer: StepTracer,
        metrics: RequestMetrics,
        speculation: SpeculationMetrics,
        watched: WatchedSteps,
    ) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self._speculation = speculation
        self._watched = watched

    def arrived(self, requests: Sequence[Request]) -> None:
        self._metrics.arrived(requests)
        self._tracer.arrived(requests)

    def begin(self) -> str:
        if self._watched.is_on:
            self._watched.begin()
        return self._tracer.begin()

    def planned(self, plan: SchedulerOutput) -> None:
        if plan.new:
            self._metrics.admitted(plan.new)
        self._tracer.planned(plan)
        if self._watched.is_on:
            self._watched.planned(plan)

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        self._metrics.done(plan, update)
        if update.num_draft_tokens:
            self._speculation.done(update)
        self._tracer.done(plan, update)
        if self._watched.is_on:
            self._watched.done(plan)

    def ended(self, requests: Sequence[Request]) -> None:
        self._metrics.ended(requests)
        self._tracer.ended(requests)

    def paused(self) -> None:
        self._tracer.paused()

    def resumed(self) -> None:
        self._tracer.resumed()

    def preempted(self, requests: Sequence[Request], cause: PreemptionCause) -> None:
        self._tracer.preempted(requests, cause)

    def lost(self, preempted: Sequence[Request], lost: PoolLost | WorkersLost) -> None:
        self._watched.lost()
        self._tracer.lost(preempted, lost)

    def recovered(self) -> None:
        self._tracer.recovered()

    def stopped(self) -> None:
        self._tracer.stopped()
