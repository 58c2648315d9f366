"""Operators' calls to one scheduler."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.errors import DeadlineExceeded, Unavailable
from services.common.replica.messages import pause_mode_to_proto
from services.common.replica.pause_mode import PauseMode
from services.common.request.adapter import Adapter
from services.common.request.messages import adapter_to_proto
from services.common.rpc.status import from_peer

T = TypeVar("T")

_TIMEOUT_SECONDS = 10.0
_ADAPTER_TIMEOUT_SECONDS = 60.0


class SchedulerAdmin:
    """Implements the core's ReplicaAdmin over gRPC."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self._stub = scheduler_pb2_grpc.SchedulerStub(channel)
        self._admin = scheduler_pb2_grpc.SchedulerAdminStub(channel)

    async def pause(self, mode: PauseMode, timeout_seconds: float) -> None:
        request = scheduler_pb2.PauseRequest(mode=pause_mode_to_proto(mode))
        await self._answer(self._admin.Pause(request, timeout=timeout_seconds))

    async def resume(self) -> None:
        request = scheduler_pb2.ResumeRequest()
        await self._answer(self._admin.Resume(request, timeout=_TIMEOUT_SECONDS))

    async def is_paused(self) -> bool:
        request = scheduler_pb2.GetStatsRequest()
        stats = await self._answer(self._stub.GetStats(request, timeout=_TIMEOUT_SECONDS))
        return bool(stats.paused)

    async def reset_prefix_cache(
        self, *, preempt_running: bool, reset_connector: bool = False
    ) -> None:
        request = scheduler_pb2.ResetPrefixCacheRequest(
            preempt_running=preempt_running, reset_connector=reset_connector
        )
        await self._answer(self._admin.ResetPrefixCache(request, timeout=_TIMEOUT_SECONDS))

    async def drain(self) -> int:
        request = scheduler_pb2.DrainRequest()
        answer = await self._answer(self._admin.Drain(request, timeout=_TIMEOUT_SECONDS))
        return int(answer.num_unfinished)

    async def undrain(self) -> None:
        request = scheduler_pb2.UndrainRequest()
        await self._answer(self._admin.Undrain(request, timeout=_TIMEOUT_SECONDS))

    async def load_adapter(self, adapter: Adapter) -> None:
        request = scheduler_pb2.LoadAdapterRequest(adapter=adapter_to_proto(adapter))
        call = self._admin.LoadAdapter(request, timeout=_ADAPTER_TIMEOUT_SECONDS)
        await self._answer(call)

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The link has closed the channel, which cancels its calls.
            raise Unavailable("the replica was removed before it replied") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(
                    "the scheduler has not completed the operation within the time limit"
                ) from error
            raise from_peer("the scheduler", error) from error
