"""Implements the RPC GetActivity: the present activity of a replica, for `stepwell top` and `/ui`.
Steps are recorded only while clients request them, and for `WATCHED_SECONDS` afterwards.
"""

import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.telemetry.trace_context import parse_traceparent
from services.scheduler.adapters.telemetry.statistics import WAIT_REASONS, Statistics, StepCounts
from services.scheduler.core.engine.engine_core import EngineCore
from services.scheduler.core.output import SchedulerOutput, WaitReason
from services.scheduler.core.request import Request, RequestStatus

WATCHED_SECONDS = 5.0
"""Seconds for which steps are recorded after a client's last request for them."""
MAX_STEPS = 256
MAX_REQUESTS = 256
"""Limit on the numbers of running requests and of waiting requests in a response."""
MAX_REQUESTS_OF_STEP = 64
MAX_PROGRAMS = 64

MAX_CELLS = 65_536
"""Limit on the cells (groups of blocks) in a map of the pool, as in the kvpool service."""
_BLOCKS_TIMEOUT_SECONDS = 1.0

_STATES: dict[RequestStatus, "scheduler_pb2.RequestState.ValueType"] = {
    status: scheduler_pb2.RequestState.Value(f"REQUEST_STATE_{status.name}")
    for status in RequestStatus
    if status is not RequestStatus.FINISHED
}


class WatchedSteps:
    """Records the latest steps, while a client requests them."""

    def __init__(self) -> None:
        self.is_on = False
        self._watched_until = 0.0
        self._begun_nanos = 0
        self._open: dict[int, scheduler_pb2.StepActivity] = {}
        self._done: deque[scheduler_pb2.StepActivity] = deque(maxlen=MAX_STEPS)

    def after(self, step: int) -> list[scheduler_pb2.StepActivity]:
        """The recorded steps after number `step`. Continues to record for `WATCHED_SECONDS`."""
        self._watched_until, self.is_on = time.monotonic() + WATCHED_SECONDS, True
        if not self._done or self._done[-1].step < step:
            step = 0  # the client's number is from an earlier scheduler process
        return [done for done in self._done if done.step > step or not step]

    def begin(self) -> None:
        """Called before a step is planned. Stops recording if no client requests steps any more."""
        if time.monotonic() <= self._watched_until:
            self._begun_nanos = time.time_ns()
        else:
            self.is_on = False
            self._open.clear()
            self._done.clear()

    def planned(self, plan: SchedulerOutput) -> None:
        if plan.requests:
            self._open[plan.step] = step_to_proto(plan, self._begun_nanos)

    def done(self, plan: SchedulerOutput) -> None:
        """Records that the tokens of a step have arrived."""
        step = self._open.pop(plan.step, None)
        if step is not None:
            step.done_unix_nanos = time.time_ns()
            self._done.append(step)

    def lost(self) -> None:
        """Removes the steps in flight, whose outputs are discarded."""
        self._open.clear()


class Activity:
    """Implements GetActivity. The response may include the pool's map of blocks."""

    def __init__(
        self,
        engine: EngineCore,
        statistics: Statistics,
        counts: StepCounts,
        steps: WatchedSteps,
        pool_channel: grpc.aio.Channel,
        pool_id: str,
    ) -> None:
        self._engine = engine
        self._statistics = statistics
        self._counts = counts
        self._steps = steps
        self._pool = kvpool_pb2_grpc.KVPoolStub(pool_channel)
        self._pool_id = pool_id

    async def message(
        self, request: scheduler_pb2.GetActivityRequest
    ) -> scheduler_pb2.GetActivityResponse:
        blocks = await self._blocks(request.max_cells) if request.max_cells else None
        reason = self._counts.wait_reasons.current
        return scheduler_pb2.GetActivityResponse(
            stats=self._statistics.message(),
            requests=requests_to_proto(self._engine, reason),
            steps=self._steps.after(request.after_step),
            blocks=blocks,
            programs=programs_to_proto(self._engine),
        )

    async def _blocks(self, max_cells: int) -> common_pb2.BlockMap | None:
        """The pool's map of blocks. None if the pool does not reply or does not exist."""
        request = kvpool_pb2.GetBlocksRequest(pool_id=self._pool_id, max_cells=max_cells)
        try:
            answer = await self._pool.GetBlocks(request, timeout=_BLOCKS_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return None
        return answer.blocks


def step_to_proto(plan: SchedulerOutput, begun_unix_nanos: int) -> scheduler_pb2.StepActivity:
    """Converts a step's plan. A request with one token besides its drafts counts as decoding."""
    num_decode = sum(
        tokens
        for request, tokens in zip(plan.requests, plan.num_scheduled_tokens, strict=True)
        if tokens - len(plan.draft_token_ids.get(request, ())) == 1
    )
    reason = plan.wait_reason
    return scheduler_pb2.StepActivity(
        step=plan.step,
        begun_unix_nanos=begun_unix_nanos,
        num_requests=len(plan.requests),
        num_prefill_tokens=plan.num_tokens - num_decode,
        num_decode_tokens=num_decode,
        keys=[request.key for request in plan.requests[:MAX_REQUESTS_OF_STEP]],
        num_tokens=plan.num_scheduled_tokens[:MAX_REQUESTS_OF_STEP],
        num_preemptions=len(plan.preemptions),
        wait_reason=scheduler_pb2.WAIT_REASON_UNSPECIFIED
        if reason is None
        else WAIT_REASONS.to_proto(reason),
    )


def requests_to_proto(
    engine: EngineCore, reason: WaitReason | None
) -> Iterator[scheduler_pb2.RequestActivity]:
    """Converts the first running and the first waiting requests. `reason` is the wait reason of all
    waiting requests that the last step did not skip.
    """
    scheduler = engine.scheduler
    for request in islice(scheduler.running, MAX_REQUESTS):
        yield _request_to_proto(request, None)
    waiting = chain(
        (
            (request, scheduler.queues.passed_over.get(request, reason))
            for request in scheduler.queues.queued
        ),
        ((request, WaitReason.HELD_BACK) for request in scheduler.queues.held_back),
    )
    for request, why in islice(waiting, MAX_REQUESTS):
        yield _request_to_proto(request, why)


def programs_to_proto(engine: EngineCore) -> Iterator[scheduler_pb2.PausedProgram]:
    retention = engine.scheduler.retention
    now = time.monotonic()
    for one in () if retention is None else retention.paused(MAX_PROGRAMS, now):
        yield scheduler_pb2.PausedProgram(
            program=one.program,
            tenant=one.tenant,
            tool=one.tool,
            paused_nanos=round(1e9 * one.seconds),
            num_turns=one.num_turns,
            num_tokens=one.num_tokens,
            num_blocks=one.num_blocks,
        )


def _request_to_proto(request: Request, reason: WaitReason | None) -> scheduler_pb2.RequestActivity:
    parent = parse_traceparent(request.traceparent)
    return scheduler_pb2.RequestActivity(
        key=request.key,
        request_id=request.request_id,
        state=_STATES[request.status],
        wait_reason=scheduler_pb2.WAIT_REASON_UNSPECIFIED
        if reason is None
        else WAIT_REASONS.to_proto(reason),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=min(request.num_computed_tokens, request.num_tokens),
        num_cached_tokens=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
        queued_unix_nanos=request.queued_unix_nanos,
        trace_id="" if parent is None else f"{parent.trace_id:032x}",
    )
