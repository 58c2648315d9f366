"""Builds the interfaces for gateways and routers of other projects: the gRPC service
vllm.grpc.engine, and KV events (which blocks the pool caches and evicts). Imports and builds only
interfaces that the settings enable.
"""

import logging
import secrets
from importlib.util import find_spec
from typing import TYPE_CHECKING

from services.common.errors import InvalidArgument
from services.common.rpc.server import GrpcServer
from services.common.tls.credentials import Tls
from services.scheduler.adapters.pool.kv_events.log import KVEventLog
from services.scheduler.adapters.pool.kv_events.recorder import KVEventRecorder
from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.parts import Parts
from services.scheduler.settings import SchedulerSettings

if TYPE_CHECKING:
    from services.scheduler.adapters.pool.kv_events.zmq_publisher import ZmqEventPublisher

logger = logging.getLogger(__name__)

VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"


class Ecosystem:
    """The interfaces for other projects. Must be created before the pool is opened, so that
    `recorder` receives every change of the pool's prefix index. `recorder` is None if the settings
    enable no interface.
    """

    def __init__(self, settings: SchedulerSettings, tls: Tls | None = None) -> None:
        """`tls` secures vllm.grpc.engine, too. Raises InvalidArgument if a required package is not
        installed, or if a setting lacks another setting that it requires.
        """
        self._settings = settings
        self._tls = tls
        if settings.vllm_grpc_address is not None:
            _require("vllm_grpc_address", "smg_grpc_proto")
        if settings.kv_events_endpoint is not None:
            _require("kv_events_endpoint", "zmq", "msgspec")
        elif settings.kv_events_replay_endpoint is not None:
            raise InvalidArgument(
                "--kv-events-replay-endpoint needs --kv-events-endpoint, which publishes the "
                "events",
                field="kv_events_replay_endpoint",
            )
        self._log = KVEventLog(settings.kv_events_buffer_steps)
        wanted = settings.vllm_grpc_address or settings.kv_events_endpoint
        self.recorder = KVEventRecorder(self._log) if wanted else None
        self._server: GrpcServer | None = None
        self._publisher: ZmqEventPublisher | None = None

    def publish_events(self, scheduler: Scheduler) -> None:
        """Begins to record the KV events of a scheduler's pool, and to publish them if the settings
        name an endpoint. Raises Unavailable if the endpoint cannot be opened.
        """
        config = scheduler.config
        if self.recorder is not None:
            self.recorder.watch(
                lambda: scheduler.queues.queued, config.all_groups, config.hash_block_size
            )
        settings = self._settings
        if settings.kv_events_endpoint is None:
            return
        from services.scheduler.adapters.pool.kv_events.zmq_publisher import (  # noqa: PLC0415
            EventEncoder,
            ZmqEventPublisher,
        )

        self._publisher = ZmqEventPublisher(
            self._log,
            EventEncoder(config.all_groups, as_arrays=settings.kv_events_encoding == "array"),
            endpoint=settings.kv_events_endpoint,
            replay_endpoint=settings.kv_events_replay_endpoint,
            topic=settings.kv_events_topic,
            max_lag=settings.kv_events_buffer_steps,
        )
        logger.info("publishing KV events at %s", settings.kv_events_endpoint)

    def serve_vllm_engine(self, parts: Parts, shape: ReplicaShape) -> None:
        """Creates a separate server for vllm.grpc.engine, if the settings enable it."""
        settings = self._settings
        if settings.vllm_grpc_address is None:
            return
        from smg_grpc_proto.generated import vllm_engine_pb2_grpc  # noqa: PLC0415

        from services.scheduler.adapters.vllm_grpc.event_stream import (  # noqa: PLC0415
            EventStream,
        )
        from services.scheduler.adapters.vllm_grpc.model_files import ModelFiles  # noqa: PLC0415
        from services.scheduler.adapters.vllm_grpc.replica_info import ReplicaInfo  # noqa: PLC0415
        from services.scheduler.adapters.vllm_grpc.requests import (  # noqa: PLC0415
            GenerateConverter,
        )
        from services.scheduler.adapters.vllm_grpc.servicer import (  # noqa: PLC0415
            VllmEngineServicer,
        )

        config = parts.engine.scheduler.config
        info = ReplicaInfo(shape, config, parts.engine, parts.statistics)
        self._server = GrpcServer(tls=self._tls)
        self._server.add(
            vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server,
            VllmEngineServicer(
                parts.engine,
                parts.sessions,
                parts.submitter,
                GenerateConverter(
                    parts.opened, settings.vllm_grpc_client_stops, lambda: secrets.randbits(64)
                ),
                info,
                ModelFiles(settings.model),
                EventStream(self._log, shape.groups, info.engine_load),
            ),
            VLLM_ENGINE,
        )

    async def start(self) -> None:
        """Starts the vllm.grpc.engine server, if enabled. Raises Unavailable if it cannot bind."""
        if self._server is not None and self._settings.vllm_grpc_address is not None:
            address = await self._server.start(self._settings.vllm_grpc_address)
            logger.info("serving %s on %s", VLLM_ENGINE, address)

    async def run(self) -> None:
        """Replays KV events to subscribers that request them, until cancelled."""
        if self._publisher is not None:
            await self._publisher.serve_replay()

    async def set_ready(self, ready: bool) -> None:
        if self._server is not None:
            await self._server.set_ready(ready)

    async def drain(self, grace_seconds: float) -> None:
        """Refuses new calls of vllm.grpc.engine, and ends running calls after `grace_seconds`."""
        if self._server is not None:
            await self._server.drain(grace_seconds)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _require(setting: str, *packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise InvalidArgument(
            f"--{setting.replace('_', '-')} needs {' and '.join(missing)}: "
            "pip install 'stepwell[ecosystem]'",
            field=setting,
        )
