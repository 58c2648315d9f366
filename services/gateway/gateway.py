"""The gateway, put together: what `__main__` runs and tests start on free ports."""

import asyncio
import contextlib
import random
import secrets
import socket
import time
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from stepwell.gateway.v1 import gateway_pb2_grpc

from services.common.errors import StepwellError, Unavailable
from services.common.server import GrpcServer
from services.common.telemetry import Tracing
from services.common.tokenizer_files import tokenizer_fingerprint
from services.gateway.adapters.auth import ApiKeys
from services.gateway.adapters.file_limit import connections_within_limit
from services.gateway.adapters.fleet import Fleet, FleetTimes
from services.gateway.adapters.generation_config import read_sampling_defaults
from services.gateway.adapters.grpc_door import GrpcDoor
from services.gateway.adapters.hf_tokenizer import HfTokenizer
from services.gateway.adapters.http.app import HttpApi
from services.gateway.adapters.http.body_budget import BodyBudget
from services.gateway.adapters.http.connection_limits import ConnectionLimits
from services.gateway.adapters.http.hosts import HostCheck, hosts_for
from services.gateway.adapters.http.parse import BodyLimits
from services.gateway.adapters.http.request_ids import HEADER as REQUEST_ID_HEADER
from services.gateway.adapters.http.request_ids import RequestIds
from services.gateway.adapters.http.server import HttpServer
from services.gateway.adapters.inference_servicer import GENERATE, REQUEST_TYPES, InferenceServicer
from services.gateway.adapters.metrics import Metrics
from services.gateway.adapters.observation import Observer
from services.gateway.core.gate import Gate
from services.gateway.core.inference import Inference
from services.gateway.settings import GatewaySettings

SERVICE_NAME = "stepwell.gateway.v1.Inference"
# How long the last words to clients may take, once nothing runs any more.
_GOODBYE_SECONDS = 1.0
# Calls besides those that generate, such as health checks.
_OTHER_RPCS = 256
_MAX_HEADER_BYTES = 64 * 1024
# A gRPC connection without a call is closed after this time.
_GRPC_IDLE_MILLISECONDS = 300_000


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a gateway listens."""

    http: str
    grpc: str


class Gateway:
    """One gateway process's worth of objects."""

    def __init__(self, settings: GatewaySettings, tokenizer: HfTokenizer, tracing: Tracing) -> None:
        """Raises FailedPrecondition for a generation_config.json that is wrong."""
        self._settings = settings
        name = settings.model_name
        self.fleet = Fleet(
            settings.schedulers,
            f"{socket.gethostname()}-{secrets.token_hex(4)}",
            times=FleetTimes(
                resubmit_timeout_seconds=settings.resubmit_timeout_seconds,
                migrate_after_seconds=settings.migrate_after_seconds,
                session_timeout_seconds=settings.session_timeout_seconds,
            ),
            rng=random.Random(secrets.randbits(64)),
            tokenizer_fingerprint=tokenizer_fingerprint(settings.model),
        )
        inference = Inference(
            name,
            tokenizer,
            self.fleet,
            defaults=read_sampling_defaults(settings.generation_config, settings.model),
            max_choices=settings.max_choices_per_request,
            max_items=settings.max_items_per_request,
            max_logprobs=settings.max_logprobs_per_request,
            draw_seed=lambda: secrets.randbits(64),
            unix_nanos=time.time_ns,
        )
        metrics = Metrics(name)
        observer = Observer(name, tracing, metrics)
        keys = ApiKeys(settings.api_keys)
        self.gate = Gate(settings.max_concurrent_requests)
        api = HttpApi(
            inference,
            self.fleet,
            self.gate,
            observer,
            metrics,
            keys,
            body_limits=BodyLimits(
                settings.max_body_bytes,
                settings.max_items_per_request,
                BodyBudget(settings.max_buffered_body_bytes, settings.body_timeout_seconds),
            ),
        )
        max_connections = connections_within_limit(settings.max_connections)
        connection_limits = ConnectionLimits(
            max_connections=max_connections,
            max_header_bytes=_MAX_HEADER_BYTES,
            max_body_bytes=settings.max_body_bytes,
            header_timeout_seconds=settings.receive_timeout_seconds,
            body_timeout_seconds=settings.body_timeout_seconds,
            keep_alive_seconds=settings.http_keep_alive_seconds,
            reader_timeout_seconds=settings.reader_timeout_seconds,
        )
        self._http = HttpServer(
            _guarded(api.app, settings), connection_limits, lambda: metrics.reader_cut("http")
        )
        servicer = InferenceServicer(
            inference,
            self.fleet,
            self.gate,
            observer,
            metrics,
            reader_timeout_seconds=settings.reader_timeout_seconds,
        )
        door = GrpcDoor(
            keys,
            REQUEST_TYPES,
            checks={GENERATE: servicer.check_room},
            max_items=settings.max_items_per_request,
            message_timeout_seconds=settings.receive_timeout_seconds,
        )
        self._grpc = GrpcServer(
            max_concurrent_rpcs=settings.max_concurrent_requests + _OTHER_RPCS,
            options=_public_grpc_options(settings, max_connections),
            interceptors=(door,),
        )
        self._grpc.add(gateway_pb2_grpc.add_InferenceServicer_to_server, servicer, SERVICE_NAME)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Addresses:
        """Listens, and begins to connect to the schedulers.

        Raises Unavailable, and listens nowhere, when an address cannot be bound.
        """
        try:
            http_address = await self._http.start(self._settings.http_address)
            grpc_address = await self._grpc.start(self._settings.address)
        except StepwellError:
            await asyncio.gather(self._grpc.drain(0), self._http.stop(0))
            raise
        self._tasks = [
            asyncio.create_task(self.fleet.run()),
            asyncio.create_task(self._follow_readiness()),
        ]
        return Addresses(http_address, grpc_address)

    async def drain(self) -> None:
        """Takes nothing new, lets what runs finish within the drain time, then ends it all.

        Meanwhile the servers answer: health says no, new requests are refused as unavailable.
        """
        self.gate.close()
        await self._grpc.set_ready(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_seconds):
                await self.gate.empty()
        self.fleet.give_up(Unavailable("the server is shutting down", retry_after_seconds=1.0))
        await asyncio.gather(self._grpc.drain(_GOODBYE_SECONDS), self._http.stop(_GOODBYE_SECONDS))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then drains. A defect in the background ends it, too."""
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        failed = [task for task in self._tasks if task.done()]
        await self.drain()
        for task in failed:
            task.result()

    async def _follow_readiness(self) -> None:
        """Health over gRPC says SERVING while a replica is ready."""
        while True:
            self.fleet.changed.clear()
            await self._grpc.set_ready(self.fleet.num_ready > 0 and self.gate.is_open)
            await self.fleet.changed.wait()


def _guarded(app: ASGIApp, settings: GatewaySettings) -> ASGIApp:
    """The application behind the checks of where a request comes from, with names for requests."""
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "Retry-After"),
        )
    return RequestIds(HostCheck(app, hosts_for(settings.http_address, settings.allowed_hosts)))


def _public_grpc_options(settings: GatewaySettings, max_connections: int) -> dict[str, int]:
    """Channel arguments of a port that anybody may connect to."""
    return {
        "grpc.max_receive_message_length": settings.max_message_bytes,
        "grpc.max_allowed_incoming_connections": max_connections,
        # No connection needs more streams than there are places.
        "grpc.max_concurrent_streams": settings.max_concurrent_requests,
        "grpc.max_connection_idle_ms": _GRPC_IDLE_MILLISECONDS,
        # From connecting to the first frame, and to the settings in it.
        "grpc.server_handshake_timeout_ms": int(1000 * settings.receive_timeout_seconds),
        "grpc.http2.settings_timeout": int(1000 * settings.receive_timeout_seconds),
    }
