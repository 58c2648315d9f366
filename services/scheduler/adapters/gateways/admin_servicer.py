"""The gRPC service SchedulerAdmin, for operators."""

import logging
from dataclasses import dataclass

from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.errors import InvalidArgument
from services.common.replica.messages import pause_mode_from_proto
from services.common.request.messages import adapter_from_proto
from services.common.rpc.server import Context
from services.scheduler.adapters.gateways.readiness import ReplicaReadiness
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.gateways.submitter import RequestSubmitter
from services.scheduler.adapters.workers.adapter_loader import AdapterLoader
from services.scheduler.core.engine.engine_core import EngineCore

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SchedulerAdminServicer(scheduler_pb2_grpc.SchedulerAdminServicer):
    """Serves operators' calls. Logs each call, because it affects all clients."""

    engine: EngineCore
    submitter: RequestSubmitter
    sessions: Sessions
    readiness: ReplicaReadiness
    adapters: AdapterLoader

    async def Abort(
        self, request: scheduler_pb2.AbortRequest, context: Context
    ) -> scheduler_pb2.AbortResponse:
        found = self.sessions.find(request.request_ids)
        for one in found:
            logger.info("an operator aborts a request", extra=one.log_fields)
        self.engine.changes.abort(found)
        return scheduler_pb2.AbortResponse(num_aborted=len(found))

    async def Pause(
        self, request: scheduler_pb2.PauseRequest, context: Context
    ) -> scheduler_pb2.PauseResponse:
        mode = pause_mode_from_proto(request.mode)
        if mode is None:
            raise InvalidArgument(
                f"mode is {request.mode}, which is not a value of PauseMode", field="mode"
            )
        logger.info("an operator pauses the engine: %s", mode.value)
        await self.engine.pause(mode)
        return scheduler_pb2.PauseResponse()

    async def Resume(
        self, request: scheduler_pb2.ResumeRequest, context: Context
    ) -> scheduler_pb2.ResumeResponse:
        logger.info("an operator resumes the engine")
        await self.engine.resume()
        return scheduler_pb2.ResumeResponse()

    async def ResetPrefixCache(
        self, request: scheduler_pb2.ResetPrefixCacheRequest, context: Context
    ) -> scheduler_pb2.ResetPrefixCacheResponse:
        logger.info("an operator resets the prefix cache")
        await self.engine.reset_prefix_cache(
            preempt_running=request.preempt_running, reset_connector=request.reset_connector
        )
        return scheduler_pb2.ResetPrefixCacheResponse()

    async def LoadAdapter(
        self, request: scheduler_pb2.LoadAdapterRequest, context: Context
    ) -> scheduler_pb2.LoadAdapterResponse:
        logger.info("an operator loads the adapter %s", request.adapter.name)
        await self.adapters.load(adapter_from_proto(request.adapter))
        return scheduler_pb2.LoadAdapterResponse()

    async def Drain(
        self, request: scheduler_pb2.DrainRequest, context: Context
    ) -> scheduler_pb2.DrainResponse:
        logger.info("an operator drains this replica")
        self._set_drained(True)
        return scheduler_pb2.DrainResponse(num_unfinished=len(self.engine.unfinished))

    async def Undrain(
        self, request: scheduler_pb2.UndrainRequest, context: Context
    ) -> scheduler_pb2.UndrainResponse:
        logger.info("an operator ends the drain of this replica")
        self._set_drained(False)
        return scheduler_pb2.UndrainResponse()

    def _set_drained(self, drained: bool) -> None:
        if drained:
            self.submitter.refuse_new()
        else:
            self.submitter.is_drained = False
        self.readiness.set_drained(drained)
