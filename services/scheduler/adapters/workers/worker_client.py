"""The gRPC client of the workers. Steps and responses use one stream to each worker (rank)."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import StepwellError, Unavailable
from services.common.process.watchdog.ended import was_ended
from services.common.process.watchdog.proc import listener_pid, watch_addresses
from services.common.process.watchdog.silence import Silence
from services.common.request.adapter import Adapter
from services.common.request.messages import (
    adapter_to_proto,
    pooler_from_proto,
    structured_outputs_to_proto,
)
from services.common.request.structured_outputs import StructuredOutputs
from services.common.rpc.local_call import for_each
from services.common.rpc.protocol import own_release, require_same_protocol
from services.common.rpc.status import from_peer
from services.scheduler.adapters.workers.answer_check import ModelFacts, WrongAnswer
from services.scheduler.adapters.workers.converters import (
    last_token_ids,
    num_stages,
    scheduler_output_to_proto,
)
from services.scheduler.adapters.workers.grammar_preparation import PreparedGrammars
from services.scheduler.adapters.workers.steps_in_flight import SentStep, StepsInFlight
from services.scheduler.core.engine.deadlines import IDLE_CHECK_SECONDS, Deadlines
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.ports import WorkersLost

_ExecuteCall = grpc.aio.StreamStreamCall[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]

DESCRIBE_TIMEOUT_SECONDS = 3.0
"""Time limit of a Describe call. It delays a recovery if a worker is unreachable."""
GRAMMAR_TIMEOUT_SECONDS = 10.0
ADAPTER_TIMEOUT_SECONDS = 60.0
PREPARING_CHECK_SECONDS = 1.0
"""Seconds between checks of an idle worker that compiles a grammar or loads an adapter."""
REASON_SECONDS = 1.0
"""Limit on the wait for the reason why a stream ended, after a write has failed."""
_SILENT_CHECKS = 2
_TOLD_TO_STOP = ("DRAINING", "RANK_STOPPED")
"""Error reasons with which a worker ends its stream after a signal to it or to another rank."""
STEP_FLOOR_SECONDS = 2.0
"""The shortest time limit of a step, because a step may take this long on a busy machine."""


class Rank:
    """One worker and its stream of steps. If the stream ends, the steps without a response raise
    WorkersLost. Probes (Describe calls) check an idle worker periodically, and more often while it
    compiles a grammar or loads an adapter. Two probes in a row without a reply end the stream,
    because a single one may be due to a stall of this process. A probe during which the worker had
    no CPU does not count.
    """

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.on_lost: Callable[[str], None] = lambda _: None
        """Called with a message if the stream ends unexpectedly, or if the idle worker hangs."""
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        self._read = watch_addresses(lambda: (address,))
        self._call: _ExecuteCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._has_answered = False
        """Whether a response has arrived since the last probe."""
        self._unanswered: deque[SentStep] = deque()
        self._why_lost = f"the stream of steps to the worker at {address} has ended"
        self._num_preparing = 0
        """Number of running calls that compile grammars or load adapters."""
        self._prepares = asyncio.Event()
        self._pid = 0
        self._was_told_to_stop = False

    @property
    def was_ended(self) -> bool:
        """Whether a signal or the worker's supervisor has stopped the worker since `open`."""
        return self._was_told_to_stop or was_ended(self.address, self._pid)

    async def describe(self) -> worker_pb2.DescribeResponse:
        """The worker's description. Raises StepwellError if it is unreachable or not loaded."""
        name = f"the worker at {self.address}"
        try:
            response: worker_pb2.DescribeResponse = await self._stub.Describe(
                worker_pb2.DescribeRequest(release=own_release()), timeout=DESCRIBE_TIMEOUT_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise from_peer(name, error) from error
        require_same_protocol(name, response.release, "scheduler")
        return response

    async def prepare_grammar(self, wanted: StructuredOutputs) -> None:
        """Makes the worker compile a grammar. Raises InvalidArgument if it refuses the grammar."""
        message = structured_outputs_to_proto(wanted)
        request = worker_pb2.PrepareGrammarRequest(structured_outputs=message)
        await self._prepared(self._stub.PrepareGrammar(request, timeout=GRAMMAR_TIMEOUT_SECONDS))

    async def load_adapter(self, adapter: Adapter, kept: Sequence[bytes]) -> None:
        """Loads an adapter, and unloads adapters that are not in `kept`. Raises StepwellError."""
        request = worker_pb2.LoadAdapterRequest(
            adapter=adapter_to_proto(adapter), kept_digests=kept
        )
        await self._prepared(self._stub.LoadAdapter(request, timeout=ADAPTER_TIMEOUT_SECONDS))

    async def _prepared(self, call: Awaitable[object]) -> None:
        self._num_preparing += 1
        self._prepares.set()
        try:
            await call
        except grpc.aio.AioRpcError as error:
            raise from_peer(f"the worker at {self.address}", error) from error
        finally:
            self._num_preparing -= 1
            if not self._num_preparing:
                self._prepares.clear()

    def open(self) -> None:
        """Begins a new stream, with which the worker begins with an empty batch."""
        self.close()
        self._pid, self._was_told_to_stop = listener_pid(self.address), False
        self._call = self._stub.Execute()
        reading = self._read_answers(self._call)
        self._reader = asyncio.create_task(reading, name=f"read {self.address}")
        self._watch = asyncio.create_task(self._watch_idle(), name=f"watch {self.address}")

    def require_open(self) -> None:
        """Raises WorkersLost if the stream has ended since `open`."""
        if self._call is None:
            raise WorkersLost(self._why_lost)

    def close(self, why: str = "") -> None:
        """Ends the stream. Steps in flight raise WorkersLost with the message `why`, if given."""
        for task in (self._reader, self._watch):
            if task is not None:
                task.cancel()
        self._reader = self._watch = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
        self._why_lost = (
            why or f"the scheduler closed the stream of steps to the worker at {self.address}"
        )
        self._fail(self._why_lost)

    async def submit(self, request: worker_pb2.ExecuteRequest, step: SentStep) -> None:
        """Sends a step. Raises WorkersLost if the stream has ended."""
        if self._call is None:
            raise WorkersLost(self._why_lost)
        self._unanswered.append(step)
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            if self._reader is not None:  # the task ends with the stream and sets the reason
                await asyncio.wait({self._reader}, timeout=REASON_SECONDS)
            raise WorkersLost(self._why_lost) from error

    async def _read_answers(self, call: _ExecuteCall) -> None:
        why, reason = "the worker ended the stream of steps", None
        try:
            await for_each(call, self._take)
        except grpc.aio.AioRpcError as error:
            failure = from_peer("it", error)
            why, reason = failure.message, failure.error_reason
            self._was_told_to_stop = reason in _TOLD_TO_STOP
        except WrongAnswer as error:
            why = str(error)
            call.cancel()
        self._call = None
        message = self._why_lost = f"the worker at {self.address} was lost: {why}"
        self._fail(message, reason)
        self.on_lost(message)

    def _take(self, response: worker_pb2.ExecuteResponse) -> None:
        """Records the response to the oldest step. Raises WrongAnswer if it has another number."""
        self._has_answered = True
        if not self._unanswered:
            raise WrongAnswer(
                f"it answered step {response.step}, but had answered all steps that were sent to it"
            )
        self._unanswered[0].answered(self.address, response)
        self._unanswered.popleft()

    async def _watch_idle(self) -> None:
        num_silent = 0
        while num_silent < _SILENT_CHECKS:
            self._has_answered = False
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_CHECK_SECONDS - PREPARING_CHECK_SECONDS):
                    await self._prepares.wait()
            await asyncio.sleep(PREPARING_CHECK_SECONDS)
            asked = asyncio.get_running_loop().time()
            if self._is_at_work or await self._answers() or self._is_at_work:
                num_silent = 0
            elif not self._was_starved_since(asked):
                num_silent += 1
        self._watch = None
        message = f"the worker at {self.address} was lost: it does not answer while it is idle"
        self.close(message)
        self.on_lost(message)

    def _was_starved_since(self, asked: float) -> bool:
        """Whether the worker had no CPU for most of the time since `asked`."""
        now = asyncio.get_running_loop().time()
        return Silence(asked).look(self._read(now)) < (now - asked) / 2

    @property
    def _is_at_work(self) -> bool:
        return bool(self._unanswered) or self._has_answered

    async def _answers(self) -> bool:
        try:
            await self.describe()
        except Unavailable:
            return False
        except StepwellError:
            return True
        return True

    def _fail(self, message: str, reason: str | None = None) -> None:
        while self._unanswered:
            self._unanswered.popleft().fail(message, reason)


class WorkerGroup:
    """An `Executor` over all ranks."""

    def __init__(
        self, ranks: Sequence[Rank], step_timeout_seconds: float, owner: common_pb2.Owner
    ) -> None:
        self.on_lost: Callable[[WorkersLost], None] = lambda _: None
        """Called when a worker is lost, even if no step is in flight."""
        self._ranks = ranks
        for rank in ranks:
            rank.on_lost = self._rank_lost
        self._owner = owner
        self._is_open = False
        self._deadlines = Deadlines(STEP_FLOOR_SECONDS, step_timeout_seconds)
        self._steps = StepsInFlight([rank.address for rank in ranks], self._deadlines)
        self._steps.on_overdue = self._end_write
        self._is_sending = False
        self._grammars = PreparedGrammars()
        self._incarnations: list[str] = []
        self._generation = 0

    async def describe(self) -> list[worker_pb2.DescribeResponse]:
        """The descriptions of all ranks, in order. Raises StepwellError."""
        ranks = list(await asyncio.gather(*(rank.describe() for rank in self._ranks)))
        self._steps.num_stages = num_stages(ranks[0])
        self._steps.num_speculative_tokens = ranks[0].num_speculative_tokens
        self._steps.model = ModelFacts(ranks[0].vocab_size, pooler_from_proto(ranks[0].pooler))
        incarnations = [rank.incarnation for rank in ranks]
        if incarnations != self._incarnations:
            # In a new process, the first step of each size may take long, to compile or allocate.
            self._deadlines.forget()
            self._grammars.forget()
            self._incarnations = incarnations
        return ranks

    async def open(self, generation: int) -> None:
        """Opens a new stream to every rank for a new generation (number of the pool's opening).
        Returns when every rank has run an empty step, or raises WorkersLost. The empty step detects
        a worker that hangs in a step but still replies to Describe. It also ends an earlier step
        that only some ranks have received. These ranks wait for the other ranks, until these report
        the empty step to them.
        """
        self._generation = generation
        self._is_open = False
        for rank in self._ranks:
            rank.open()
        self._steps.transfers.forget()
        plan = SchedulerOutput(0)
        request = scheduler_output_to_proto(plan, generation, "")
        request.owner.CopyFrom(self._owner)
        await (await self._send(request, plan, self._deadlines.ceiling_seconds))
        for rank in self._ranks:  # a rank may be lost while other ranks have not replied
            rank.require_open()
        self._is_open = True

    @property
    def were_ended(self) -> bool:
        """Whether a signal or a supervisor has stopped a rank since `open`."""
        return any(rank.was_ended for rank in self._ranks)

    def has_grammar(self, wanted: StructuredOutputs) -> bool:
        return self._grammars.has(wanted)

    async def prepare_grammar(self, wanted: StructuredOutputs) -> None:
        """Makes every rank compile a grammar. Waits for all ranks. Raises StepwellError."""
        incarnations = self._incarnations
        await _gather_calls(rank.prepare_grammar(wanted) for rank in self._ranks)
        if incarnations is self._incarnations:
            self._grammars.add(wanted)

    async def load_adapter(self, adapter: Adapter, kept: Sequence[bytes]) -> None:
        """Makes every rank load an adapter. Waits for all ranks. Raises StepwellError."""
        await _gather_calls(rank.load_adapter(adapter, kept) for rank in self._ranks)

    def close(self, why: str = "") -> None:
        for rank in self._ranks:
            rank.close(why)

    def _end_write(self, why: str) -> None:
        """Ends the streams if a step is being sent, because the write would wait for as long as a
        worker does not read. A write of the first step, which may wait for the connection, would
        never return. It ends with the attempt to connect.
        """
        if self._is_sending and self._is_open:
            self.close(why)

    def _rank_lost(self, message: str) -> None:
        if self._is_open:
            self._end_write(message)
            self._is_open = False
            self.on_lost(WorkersLost(message))

    async def submit(
        self, plan: SchedulerOutput, traceparent: str = ""
    ) -> asyncio.Future[ModelRunnerOutput]:
        request = scheduler_output_to_proto(plan, self._generation, traceparent)
        if plan.kv_connector_metadata is not None:
            self._steps.transfers.add(request, plan.kv_connector_metadata)
        if self._steps.num_stages > 1:
            request.last_token_ids = last_token_ids(plan)
        return await self._send(request, plan)

    async def _send(
        self,
        request: worker_pb2.ExecuteRequest,
        plan: SchedulerOutput,
        allowed_seconds: float | None = None,
    ) -> asyncio.Future[ModelRunnerOutput]:
        step = self._steps.add(self._generation, plan, allowed_seconds)
        request.timeout_millis = math.ceil(1000 * step.allowed_seconds)
        self._is_sending = True
        try:
            for rank in self._ranks:
                await rank.submit(request, step)
        except WorkersLost as error:
            step.fail(error.message)
            raise
        finally:
            self._is_sending = False
        return step.output


async def _gather_calls(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all calls, and then raises the first failure."""
    for done in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(done, BaseException):
            raise done
