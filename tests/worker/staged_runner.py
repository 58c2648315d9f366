"""A model in pipeline stages. Ranks are threads of the test's process, and use gloo."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from services.worker.backends.attention import CPU
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.lockstep import Lockstep
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import StepInput, StepOutput
from services.worker.parallel.errors import GroupBroken
from services.worker.parallel.group import Group, Timeouts
from services.worker.parallel.membership import Membership
from tests.worker.rank_threads import TIMEOUTS, free_port, native_kernels
from tests.worker.runner_driver import build_runner


class StagedRunner:
    """Runs steps like a model runner, several at once. `options` are passed to build_runner."""

    def __init__(
        self,
        directory: Path,
        num_stages: int,
        *,
        ranks_per_stage: int = 1,
        timeouts: Timeouts = TIMEOUTS,
        **options: Any,
    ) -> None:
        size, port = num_stages * ranks_per_stage, free_port()
        self.broken: list[Future[GroupBroken]] = [Future() for _ in range(size)]
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]

        def join(rank: int) -> tuple[Group, ModelRunner]:
            own = Membership(rank, size, "127.0.0.1", port, num_stages)
            group = Group(own, timeouts, self.broken[rank].set_result, lambda: None)
            ranks = group.ranks_on(CPU, native_kernels())
            lockstep = Lockstep(ranks, 1, group.watch.explain, rank)
            return group, build_runner(
                directory, ranks=ranks, lockstep=lockstep, group=group, **options
            )

        joining = [thread.submit(join, rank) for rank, thread in enumerate(self._threads)]
        self.groups, self.runners = zip(*(joined.result() for joined in joining), strict=True)

    def __enter__(self) -> "StagedRunner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for thread in self._threads:
            thread.shutdown()
        for group in self.groups:
            group.close()

    @property
    def limits(self) -> BatchLimits:
        return self.runners[0].limits

    def reset(self) -> None:
        for reset in [
            thread.submit(runner.reset)
            for thread, runner in zip(self._threads, self.runners, strict=True)
        ]:
            reset.result()

    def submit_each(self, step: StepInput) -> list[Future[StepOutput]]:
        return [self.submit_to(rank, step) for rank in range(len(self._threads))]

    def submit_to(self, rank: int, step: StepInput) -> Future[StepOutput]:
        return self._threads[rank].submit(self.runners[rank].execute, step)

    def submit(self, step: StepInput) -> Future[StepOutput]:
        """Queues a step on every rank. Returns the output of the last stage, which samples."""
        answers = self.submit_each(step)

        def check_and_answer() -> StepOutput:
            outputs = [answer.result() for answer in answers]
            per_stage = len(outputs) // self.groups[0].membership.pipeline_parallel_size
            assert not any(len(output.token_ids) for output in outputs[:-per_stage])
            return outputs[-1]

        answer: Future[StepOutput] = Future()
        answers[-1].add_done_callback(lambda _: _resolve(answer, check_and_answer))
        return answer

    def execute(self, step: StepInput) -> StepOutput:
        return self.submit(step).result()


def _resolve(answer: "Future[StepOutput]", make: Any) -> None:
    try:
        answer.set_result(make())
    except BaseException as error:
        answer.set_exception(error)
