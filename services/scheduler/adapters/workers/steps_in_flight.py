"""The steps that were sent to the ranks and are not completed, each with a time limit."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from operator import mul

from stepwell.worker.v1 import worker_pb2

from services.common.process.watchdog.proc import watch_addresses
from services.scheduler.adapters.workers.alarm import Alarm
from services.scheduler.adapters.workers.answer_check import (
    LONGEST_NANOS,
    ExpectedAnswer,
    ModelFacts,
    RequestsWithLogprobs,
    WrongAnswer,
)
from services.scheduler.adapters.workers.converters import model_runner_output_from_proto
from services.scheduler.core.engine.deadlines import Deadlines
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.ports import WorkersLost
from services.scheduler.options.listed import TRANSFERS

_CONTEXT = 1024
"""On a CPU, a token's attention to about this many tokens takes as long as its other work."""
_LOGPROBS = 64
"""On a GPU, the log-probabilities of a prompt token take as long as 64 tokens or more."""


def _size(plan: SchedulerOutput, num_prompt_logprobs: int) -> int:
    """The size of a step for Deadlines. It grows with contexts and with log-probabilities of
    prompts, because they can make a step 20 times as long as another step of as many tokens.
    """
    contexts: int = sum(map(mul, plan.num_scheduled_tokens, plan.num_computed_tokens))
    return contexts + _CONTEXT * (plan.num_tokens + _LOGPROBS * num_prompt_logprobs)


class SentStep:
    """A step that was sent to all ranks. When every rank has replied, the last rank's response
    becomes the result of the future `output`. If a rank is lost or late, or if a response is wrong,
    `output` raises WorkersLost. The ranks of the last pipeline stage must sample equal tokens.
    """

    __slots__ = (
        *("_expected", "_generation", "_missing", "_other_nanos", "_response", "_slack_nanos"),
        *("_steps", "_tokens", "allowed_seconds", "number", "output", "size"),
    )

    def __init__(
        self,
        steps: "StepsInFlight",
        generation: int,
        number: int,
        size: int,
        allowed_seconds: float,
        expected: ExpectedAnswer,
    ) -> None:
        self.number = number
        self.size = size
        self._generation = generation
        self._expected = expected
        self.allowed_seconds = allowed_seconds
        self.output: asyncio.Future[ModelRunnerOutput] = steps.loop.create_future()
        self._steps = steps
        self._missing = set(steps.ranks)
        self._response: worker_pb2.ExecuteResponse | None = None
        self._other_nanos = 0
        """Sum of the compute times of all ranks but the last, in nanoseconds."""
        self._slack_nanos: int | None = None
        """The smallest `slack_nanos` of all ranks but the last."""
        self._tokens: tuple[bytes, bytes] | None = None
        """The tokens that the first rank of the last pipeline stage to reply has sampled."""

    def answered(self, rank: str, response: worker_pb2.ExecuteResponse) -> None:
        """Records a rank's response. Raises WrongAnswer if it does not match this step."""
        try:
            self._take(rank, response)
        except ValueError as error:
            raise WrongAnswer(f"its answer to step {self.number} is wrong: {error}") from error

    def _take(self, rank: str, response: worker_pb2.ExecuteResponse) -> None:
        answered = response.generation, response.step
        if answered != (self._generation, self.number):
            generation, step = answered
            raise WrongAnswer(f"it has the numbers of step {step} in generation {generation}")
        # Slack is below minus a day if the workers were idle for a day before this step.
        spent = response.queue_nanos + response.execute_nanos
        if max(spent, response.slack_nanos) > LONGEST_NANOS:
            raise WrongAnswer("queue_nanos, execute_nanos or slack_nanos is longer than a day")
        if len(self._steps.ranks) > 1:
            self._compare(rank, response)
        self._missing.discard(rank)
        if rank == self._steps.ranks[-1]:
            self._response = response
        else:
            self._other_nanos += response.execute_nanos
            self._note_slack(response)
        if response.ended_tier_loads:
            self._steps.transfers.note(rank, response)
        if not self._missing:
            self._steps.done(self)
            if self._response is not None and not self.output.done():  # done if cancelled
                self._resolve(self._response)

    def late_ranks(self) -> list[str]:
        return [address for address in self._steps.ranks if address in self._missing]

    def overdue(self) -> str:
        """Makes `output` raise WorkersLost, because the step's time limit has passed. Returns the
        error's message.
        """
        late = ", ".join(self.late_ranks())
        message = (
            f"the worker at {late} did not complete step {self.number} within "
            f"{self.allowed_seconds:.3g} s"
        )
        self.fail(message)
        return message

    def fail(self, message: str, reason: str | None = None) -> None:
        """Makes `output` raise WorkersLost, if the step is not done."""
        self._steps.forget(self)
        if not self.output.done():
            self.output.set_exception(WorkersLost(message, reason=reason))
            self.output.exception()  # asyncio logs exceptions that are not retrieved

    def _note_slack(self, response: worker_pb2.ExecuteResponse) -> None:
        if response.HasField("slack_nanos"):
            least = self._slack_nanos
            slack = response.slack_nanos
            self._slack_nanos = slack if least is None else min(least, slack)

    def _resolve(self, response: worker_pb2.ExecuteResponse) -> None:
        if self._slack_nanos is not None:
            response.slack_nanos = min(self._slack_nanos, response.slack_nanos)
        if (num_stages := self._steps.num_stages) > 1:
            whole, num_ranks = response.execute_nanos + self._other_nanos, len(self._steps.ranks)
            response.execute_nanos = whole * num_stages // num_ranks
        transfers = self._steps.transfers.take()
        num_speculative = self._steps.num_speculative_tokens
        self.output.set_result(
            model_runner_output_from_proto(response, transfers, num_speculative, self._expected)
        )

    def _compare(self, rank: str, response: worker_pb2.ExecuteResponse) -> None:
        """Raises WrongAnswer if the last stage's ranks disagree, or an earlier stage sampled."""
        ranks = self._steps.ranks
        tokens = response.num_tokens, response.token_ids
        if ranks.index(rank) < len(ranks) - len(ranks) // self._steps.num_stages:
            if response.token_ids:
                raise WrongAnswer(
                    "token_ids: must be empty, because this pipeline stage does not sample"
                )
        elif self._tokens is None:
            self._tokens = tokens
        elif self._tokens != tokens:
            raise WrongAnswer("token_ids: another rank has sampled other tokens")


class StepsInFlight:
    """The steps in flight, oldest first. Steps run one after another, so the time limit of a step
    begins when the previous step is completed. `num_stages` is the number of pipeline stages. A
    step's compute time is the sum over the stages. `num_speculative_tokens` is the largest number
    of drafts that the workers propose for a request.
    """

    def __init__(self, ranks: Iterable[str], deadlines: Deadlines) -> None:
        self.ranks = tuple(ranks)
        self.on_overdue: Callable[[str], None] = lambda _: None
        """Called with a message when the time limit of a step has passed."""
        self.num_stages = 1
        self.num_speculative_tokens = 0
        self.model = ModelFacts()
        self.transfers = TRANSFERS.messages(len(self.ranks))
        self._with_logprobs = RequestsWithLogprobs()
        self._deadlines = deadlines
        self._steps: deque[SentStep] = deque()
        self._alarm = Alarm(self._overdue, watch_addresses(self._late_ranks))
        self._began = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def add(
        self, generation: int, plan: SchedulerOutput, allowed_seconds: float | None = None
    ) -> SentStep:
        """Adds a step. By default its time limit follows from earlier steps of its size."""
        expected = ExpectedAnswer(plan, self.model, self._with_logprobs)
        size = _size(plan, expected.num_prompt_logprobs)
        if allowed_seconds is None:
            allowed_seconds = self._deadlines.seconds(size)
        if plan.kv_connector_metadata is not None:
            self.transfers.begin(plan.kv_connector_metadata)
        step = SentStep(self, generation, plan.step, size, allowed_seconds, expected)
        self._steps.append(step)
        if len(self._steps) == 1:
            self._begin_oldest(self.loop.time())
        return step

    def done(self, step: SentStep) -> None:
        """Removes a step to which every rank has replied, and records how long it took."""
        if self._steps and self._steps[0] is step:
            now = self.loop.time()
            self._deadlines.took(step.size, now - self._began - self._alarm.excused_seconds)
            self._steps.popleft()
            self._begin_oldest(now)
        else:
            self.forget(step)

    def forget(self, step: SentStep) -> None:
        """Removes a step. If it was the oldest step, the time limit of the next step begins."""
        if step not in self._steps:
            return
        was_oldest = self._steps[0] is step
        self._steps.remove(step)
        if was_oldest:
            self._begin_oldest(self.loop.time())

    def _begin_oldest(self, now: float) -> None:
        """Starts the time limit of the oldest step, if there is a step."""
        if self._steps:
            self._began = now
            self._alarm.set(self._steps[0].allowed_seconds)
        else:
            self._alarm.stop()

    def _late_ranks(self) -> list[str]:
        return self._steps[0].late_ranks() if self._steps else []

    def _overdue(self) -> None:
        self.on_overdue(self._steps[0].overdue())
