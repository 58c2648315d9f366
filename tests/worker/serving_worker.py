"""A worker that serves a real model from the test's process."""

from stepwell.worker.v1 import worker_pb2_grpc

from services.common.rpc.server import GrpcServer
from services.common.telemetry.tracing import configure_tracing
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.servicer import WorkerServicer
from services.worker.core.worker import Worker
from services.worker.service import GRPC_SERVICE


class ServingWorker:
    """A worker of one rank with a loaded model. It can be started again after `stop`."""

    def __init__(self, loaded: Worker) -> None:
        self._loaded = loaded
        self._compute = ComputeThread()
        self._servicer = WorkerServicer(
            self._compute, configure_tracing("worker", "", 1.0), WorkerMetrics()
        )
        self._server = GrpcServer()
        self._server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._servicer, GRPC_SERVICE)

    async def start(self) -> str:
        address = await self._server.start("127.0.0.1:0")
        self._servicer.open(self._loaded)
        await self._server.set_ready(True)
        return address

    async def stop(self) -> None:
        self._servicer.close()
        await self._server.drain(0)
        self._compute.close()
