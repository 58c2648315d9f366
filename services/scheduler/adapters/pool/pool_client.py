"""The gRPC client of the pool. Executes each transaction exactly once, in order."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc
from grpc_status import rpc_status
from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.errors import (
    InternalError,
    InvalidArgument,
    NotFound,
    StepwellError,
    Unavailable,
)
from services.common.pool.messages import kv_cache_group_to_proto
from services.common.pool.operations import Operation, Outcome
from services.common.pool.operations_proto import operation_to_proto, outcome_from_proto
from services.common.process.watchdog.proc import watch_addresses
from services.common.rpc.forwarding_channel import UndecodableAnswer
from services.common.rpc.protocol import own_release, require_same_protocol
from services.common.rpc.status import from_peer
from services.scheduler.adapters.pool.kv_events.recorder import KVEventRecorder
from services.scheduler.adapters.pool.outcome_check import OutcomeCheck, requests_of
from services.scheduler.adapters.workers.alarm import Alarm
from services.scheduler.adapters.workers.answer_check import WrongAnswer
from services.scheduler.core import ports
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine.deadlines import IDLE_CHECK_SECONDS, Deadlines

logger = logging.getLogger(__name__)

_TransactCall = grpc.aio.StreamStreamCall[kvpool_pb2.TransactRequest, kvpool_pb2.TransactResponse]

RETRY_SECONDS = 0.05
TRANSACTION_FLOOR_SECONDS = 2.0
"""The shortest time limit of a transaction, because it may take this long on a busy machine."""


class PoolClient:
    """A `ports.KVPool` over a gRPC channel. If the stream breaks, opens a new stream and sends the
    transaction again with the same sequence number, until the result arrives or the time limit has
    passed. `Deadlines` computes the time limit, which is at most `timeout_seconds`.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        pool_id: str,
        timeout_seconds: float,
        owner: common_pb2.Owner | None = None,
        recorder: KVEventRecorder | None = None,
        address: str = "",
    ) -> None:
        """`recorder` is called with the changes of the pool's prefix index. Without a recorder, the
        pool does not report them. `address` serves to find the pool's process on this machine.
        """
        self.on_lost: Callable[[ports.PoolLost], None] = lambda _: None
        """Called when the pool is lost outside a transaction."""
        self._stub = kvpool_pb2_grpc.KVPoolStub(channel)
        self._pool_id = pool_id
        self._owner = owner
        self._recorder = recorder
        self._turns = asyncio.Lock()
        self._probe: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._timeout_seconds = timeout_seconds
        self._generation = 0
        self._sequence = 0
        self._check = OutcomeCheck(1, ())
        self._call: _TransactCall | None = None
        self._deadlines = Deadlines(TRANSACTION_FLOOR_SECONDS, timeout_seconds)
        self._allowed_seconds = timeout_seconds
        self._is_late = False
        self._alarm = Alarm(self._give_up, watch_addresses(lambda: (address,)))
        self._waiting: asyncio.Task[object] | None = None
        """The task that waits for the stream's next message, or None."""
        self._lost: ports.PoolLost | None = None
        """Why a transaction has failed since the pool was last opened, or None."""

    async def open(self, config: SchedulerConfig, seen_generation: int = 0) -> int:
        """Opens the pool, which empties it and begins a new generation (the time until it is opened
        again). Returns the generation's number, which exceeds `seen_generation` and all earlier
        numbers. Raises StepwellError.
        """
        self.close()
        try:
            response = await self._stub.OpenPool(
                kvpool_pb2.OpenPoolRequest(
                    pool_id=self._pool_id,
                    num_blocks=config.num_blocks,
                    groups=map(kv_cache_group_to_proto, config.all_groups),
                    enable_prefix_caching=config.enable_prefix_caching,
                    fingerprint=config.fingerprint,
                    drop_last_hit_block=config.drop_last_hit_block,
                    prefix_match_unit=config.prefix_match_unit,
                    prefix_cache_retention_interval=config.prefix_cache_retention_interval,
                    max_model_len=config.max_model_len,
                    max_in_flight_tokens=config.max_in_flight_tokens,
                    owner=self._owner,
                    seen_generation=max(seen_generation, self._generation),
                    report_events=self._recorder is not None,
                    release=own_release(),
                ),
                timeout=self._timeout_seconds,
            )
        except grpc.aio.AioRpcError as error:
            raise from_peer("the kvpool", error) from error
        require_same_protocol("the kvpool", response.release, "scheduler")
        if response.generation <= max(seen_generation, self._generation):
            raise ports.PoolLost(
                f"the kvpool began generation {response.generation}, which is not above the last "
                "one"
            )
        self._generation, self._sequence, self._lost = response.generation, 0, None
        self._check = OutcomeCheck(config.num_blocks, config.all_groups)
        if self._recorder is not None:
            self._recorder.opened()
        num_free_blocks = (await self.transact(())).num_free_blocks
        if num_free_blocks != (num_usable := config.num_blocks - 1):
            raise ports.PoolLost(
                f"the kvpool was opened with {num_free_blocks} free blocks, not {num_usable}"
            )
        self._watch = asyncio.create_task(self._watch_idle_pool(), name="watch the pool")
        return self._generation

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        """Runs a transaction after the transactions of earlier calls. Raises PoolLost if it fails,
        or if an earlier transaction has failed since the pool was last opened. Transactions after a
        failed one are not sent, because the pool would refuse them.
        """
        async with self._turns:
            if self._lost is not None:
                raise ports.PoolLost(self._lost.message)
            try:
                return await self._transact(operations, traceparent)
            except ports.PoolLost as lost:
                self._lost = lost
                raise

    async def _transact(self, operations: Sequence[Operation], traceparent: str) -> Outcome:
        self._sequence += 1
        request = kvpool_pb2.TransactRequest(
            pool_id=self._pool_id,
            generation=self._generation,
            sequence=self._sequence,
            operations=list(map(operation_to_proto, operations)),
            traceparent=traceparent,
        )
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._allowed_seconds = self._deadlines.seconds(len(operations))
        self._is_late = False
        self._alarm.set(self._allowed_seconds)
        try:
            response = await self._send(request, operations)
        finally:
            self._alarm.stop()
        elapsed = loop.time() - began - self._alarm.excused_seconds
        self._deadlines.took(len(operations), elapsed)
        outcome = self._checked(operations, response)
        if self._recorder is not None:
            self._recorder.transacted(operations, response)
        return outcome

    def _checked(
        self, operations: Sequence[Operation], response: kvpool_pb2.TransactResponse
    ) -> Outcome:
        """The outcome of the last transaction. Raises PoolLost if the response is wrong."""
        answered = response.generation, response.sequence
        try:
            if answered != (self._generation, self._sequence):
                generation, sequence = answered
                raise WrongAnswer(
                    f"it is the answer to transaction {sequence} of generation {generation}"
                )
            outcome = outcome_from_proto(response)
            self._check.check(operations, outcome, response.events)
        except ValueError as error:
            raise self._wrong(operations, str(error)) from error
        return outcome

    def _wrong(self, operations: Sequence[Operation], problem: str) -> ports.PoolLost:
        """Ends the stream, and returns the error for a wrong response to the last transaction."""
        self._end_call()
        return ports.PoolLost(
            f"the kvpool was lost: its answer to transaction {self._sequence} is wrong: {problem}",
            suspects=requests_of(operations),
        )

    def close(self) -> None:
        for task in (self._probe, self._watch):
            if task is not None:
                task.cancel()
        self._probe = self._watch = None
        self._end_call()

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _call_ended(self, call: object) -> None:
        """Checks whether the pool still runs, because its stream has ended between transactions."""
        if call is self._call and not self._turns.locked():
            self._call = None
            self._probe = asyncio.create_task(self._probe_pool(), name="probe the pool")

    async def _watch_idle_pool(self) -> None:
        """Probes an idle pool periodically, because only a call can detect that it hangs."""
        is_there = True
        while is_there:
            last = self._sequence
            await asyncio.sleep(IDLE_CHECK_SECONDS)
            if self._sequence == last:
                is_there = await self._probe_pool()

    async def _probe_pool(self) -> bool:
        """Whether the pool replies. If not, calls `on_lost`."""
        try:
            await self.transact(())
        except ports.PoolLost as lost:
            self.on_lost(lost)
            return False
        return True

    def _give_up(self) -> None:
        """Ends the stream, and cancels the task that waits for it. To end the stream is not enough:
        a write never returns if its stream was cancelled before the headers were sent, for example
        while the connection is established.
        """
        self._is_late = True
        self._end_call()
        if self._waiting is not None:
            self._waiting.cancel()

    async def _send(
        self, request: kvpool_pb2.TransactRequest, operations: Sequence[Operation]
    ) -> kvpool_pb2.TransactResponse:
        logged = ""
        while True:
            try:
                return await self._try(request)
            except UndecodableAnswer as rpc_error:
                raise self._wrong(operations, rpc_error.details() or "") from rpc_error
            except grpc.aio.AioRpcError as rpc_error:
                error = from_peer("the kvpool", rpc_error)
                self._end_call()
                is_broken = isinstance(error, Unavailable) or _broke_under_a_write(rpc_error)
                if not (self._is_late or is_broken):
                    is_about_them = isinstance(error, InvalidArgument | InternalError)
                    has_restarted = isinstance(error, NotFound)
                    raise ports.PoolLost(
                        "the kvpool has restarted without its blocks"
                        if has_restarted
                        else f"the kvpool refused a transaction: {error.message}",
                        suspects=requests_of(operations) if is_about_them else (),
                    ) from rpc_error
                if not self._is_late and error.message != logged:
                    logged = error.message
                    logger.warning(
                        "transaction %d is sent again to the kvpool: %s", request.sequence, logged
                    )
                await self._pause_before_retry(error)

    async def _pause_before_retry(self, error: StepwellError) -> None:
        """Waits before a retry. Raises PoolLost if the time limit passes before the retry."""
        if not self._is_late:
            await asyncio.sleep(RETRY_SECONDS)
        if self._is_late:
            raise ports.PoolLost(
                f"the kvpool did not answer a transaction within {self._allowed_seconds:.3g} s"
            ) from error

    async def _try(self, request: kvpool_pb2.TransactRequest) -> kvpool_pb2.TransactResponse:
        call = self._call
        if call is None:
            call = self._call = self._stub.Transact()
            call.add_done_callback(self._call_ended)
        task = self._waiting = asyncio.current_task()
        try:
            await call.write(request)
            response = await call.read()
        except asyncio.InvalidStateError:  # the stream ended before the write
            response = grpc.aio.EOF
        except asyncio.CancelledError:  # cancelled by `_give_up` or by the caller
            if not self._is_late or task is None or task.uncancel():
                self._end_call()  # the next use of a cancelled stream would raise CancelledError
                raise
            response = grpc.aio.EOF
        finally:
            self._waiting = None
        if isinstance(response, kvpool_pb2.TransactResponse):
            return response
        raise await _why_ended(call)


async def _why_ended(call: _TransactCall) -> grpc.aio.AioRpcError:
    """The error of an ended stream. A draining pool ends it with OK, which becomes UNAVAILABLE."""
    code = await call.code()
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE if code is grpc.StatusCode.OK else code,
        await call.initial_metadata(),
        await call.trailing_metadata(),
        details=await call.details(),
    )


def _broke_under_a_write(rpc_error: grpc.aio.AioRpcError) -> bool:
    """Whether the stream broke during a write. Then gRPC, not the pool, sets INTERNAL."""
    return rpc_error.code() is grpc.StatusCode.INTERNAL and rpc_status.from_call(rpc_error) is None
