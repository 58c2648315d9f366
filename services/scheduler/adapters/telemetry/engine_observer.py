"""Observes a replica's engine for traces, metrics and recorded steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.adapters.telemetry.activity import WatchedSteps
from services.scheduler.adapters.telemetry.engine_metrics import SpeculationMetrics
from services.scheduler.adapters.telemetry.request_metrics import RequestMetrics
from services.scheduler.adapters.telemetry.step_tracer import StepTracer
from services.scheduler.core.output import EngineCoreOutputs, PreemptionCause, SchedulerOutput
from services.scheduler.core.ports import PoolLost, WorkersLost
from services.scheduler.core.request import Request


@dataclass(eq=False)
class EngineObserver:
    """A `StepObserver` that forwards each call to traces, metrics and recorded steps."""

    tracer: StepTracer
    metrics: RequestMetrics
    speculation: SpeculationMetrics
    watched: WatchedSteps

    def arrived(self, requests: Sequence[Request]) -> None:
        self.metrics.arrived(requests)
        self.tracer.arrived(requests)

    def begin(self) -> str:
        if self.watched.is_on:
            self.watched.begin()
        return self.tracer.begin()

    def planned(self, plan: SchedulerOutput) -> None:
        if plan.new:
            self.metrics.admitted(plan.new)
        self.tracer.planned(plan)
        if self.watched.is_on:
            self.watched.planned(plan)

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        self.metrics.done(plan, update)
        if update.num_draft_tokens:
            self.speculation.done(update)
        self.tracer.done(plan, update)
        if self.watched.is_on:
            self.watched.done(plan)

    def ended(self, requests: Sequence[Request]) -> None:
        self.metrics.ended(requests)
        self.tracer.ended(requests)

    def paused(self) -> None:
        self.tracer.paused()

    def resumed(self) -> None:
        self.tracer.resumed()

    def preempted(self, requests: Sequence[Request], cause: PreemptionCause) -> None:
        self.tracer.preempted(requests, cause)

    def lost(self, preempted: Sequence[Request], lost: PoolLost | WorkersLost) -> None:
        self.watched.lost()
        self.tracer.lost(preempted, lost)

    def recovered(self) -> None:
        self.tracer.recovered()

    def stopped(self) -> None:
        self.tracer.stopped()
