"""Runs steps that take the time that a profile predicts."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import StepInput, StepOutput
from services.worker.core.step_times import StepTimes
from services.worker.core.worker import StepRunner
from services.worker.models.model import Model, ModelInput
from services.worker.options.simulated.cache import SimulatedStep
from services.worker.options.simulated.device import SimulatedDevice
from services.worker.options.simulated.faults import Faults


@dataclass(frozen=True, slots=True)
class TimedModel:
    """A Model that queues the time of each run on the simulated device.

    With `sends`, the model is a pipeline stage before the last one, and `forward` returns when the
    run's time is over. Otherwise `forward` returns at once. `faults` are injected in each run.
    """

    model: Model
    times: StepTimes
    device: SimulatedDevice
    receives: bool = False
    sends: bool = False
    faults: Faults | None = None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed(token_ids)

    def forward(self, given: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(given.attention, SimulatedStep):
            raise AssertionError("the simulated device has a cache of its own")
        layout = given.attention.layouts[0]
        counts = np.diff(layout.query_starts)
        if self.receives:
            self.device.received()
        if self.faults is not None:
            self.faults.at_step()
        self.device.queue(self.times.seconds(counts, layout.seq_lens - counts))
        output = self.model.forward(given)
        if self.sends:
            self.device.wait_until(self.device.ends)
        return output

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)


@dataclass(frozen=True, slots=True)
class TimedOutput:
    """The PendingOutput of a step. The output is known, but `wait` waits for the step's end."""

    output: StepOutput
    device: SimulatedDevice
    ends: float
    """The time at which the step's work ends, by the device's clock."""

    def wait(self) -> StepOutput:
        self.device.wait_until(self.ends)
        return self.output


@dataclass(frozen=True, slots=True)
class TimedRunner:
    """A StepRunner over a TimedModel. The next step can begin while the device still works."""

    runner: StepRunner
    device: SimulatedDevice

    @property
    def limits(self) -> BatchLimits:
        return self.runner.limits

    def reset(self) -> None:
        self.runner.reset()

    def begin(self, step: StepInput) -> StepOutput | PendingOutput:
        """Runs a step. The first step after the scheduler has opened the KV pool again (a new
        generation) waits for all earlier work, so that a hanging device is detected before new
        requests are sent to it.
        """
        if not step.step:
            self.device.wait_until(self.device.ends)
        began = self.device.clock()
        self.device.begin_step()
        output = self.runner.begin(step)
        if not (isinstance(output, StepOutput) and len(step.rows)):
            return output
        waited = round(1e9 * (self.device.starts - began))
        return TimedOutput(replace(output, waited_nanos=waited), self.device, self.device.ends)

    def execute(self, step: StepInput) -> StepOutput:
        output = self.begin(step)
        return output if isinstance(output, StepOutput) else output.wait()
