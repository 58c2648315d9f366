"""The gateway, `python -m services.gateway`: its composition root."""

import asyncio
import contextlib
import gc
import logging
import os
import random
import secrets
import socket
import sys
import time
from dataclasses import dataclass

from stepwell.gateway.v1 import gateway_pb2_grpc

from services.common.errors import StepwellError, Unavailable
from services.common.lifecycle import run_service
from services.common.server import GrpcServer
from services.common.telemetry import Tracing, service_tracing
from services.common.tokenizer_files import tokenizer_fingerprint
from services.gateway.adapters.auth import ApiKeys
from services.gateway.adapters.directory.follower import make_follower
from services.gateway.adapters.directory.metrics import IndexCollector
from services.gateway.adapters.generation_config import read_sampling_defaults
from services.gateway.adapters.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.adapters.http.app import guarded, make_app
from services.gateway.adapters.http.body_budget import BodyBudget
from services.gateway.adapters.http.connections import Connections
from services.gateway.adapters.http.early_refusals import EarlyRefusals
from services.gateway.adapters.http.generation_routes import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    GenerationRoutes,
)
from services.gateway.adapters.http.hosts import hosts_for
from services.gateway.adapters.http.parse import BodyReader
from services.gateway.adapters.http.server import HttpServer
from services.gateway.adapters.http.server_routes import ServerRoutes
from services.gateway.adapters.http.tokenizer_routes import TokenizerRoutes
from services.gateway.adapters.inference_servicer import GENERATE, REQUEST_TYPES, InferenceServicer
from services.gateway.adapters.metrics import Metrics
from services.gateway.adapters.observation import Observer
from services.gateway.adapters.process_limits import connections_within_limit, give_memory_back
from services.gateway.adapters.request_interceptor import RequestInterceptor
from services.gateway.adapters.scheduler_link import SchedulerLink
from services.gateway.core.fleet import Fleet
from services.gateway.core.gate import Gate
from services.gateway.core.inference import Inference
from services.gateway.core.prefix_index import PrefixIndex
from services.gateway.core.routing import make_policy
from services.gateway.core.routing.policy import RoutingParts
from services.gateway.settings import GatewaySettings

SERVICE = "gateway"
SERVICE_NAME = "stepwell.gateway.v1.Inference"
# How long the last answers may take to be sent, once no request runs any more.
_LAST_ANSWERS_SECONDS = 1.0
# Calls besides those that generate, such as health checks.
_OTHER_RPCS = 256
# A gRPC connection without a call is closed after this time.
_GRPC_IDLE_MILLISECONDS = 300_000

logger = logging.getLogger(__name__)


def main() -> None:
    """Serves until SIGTERM."""
    # No model is built here: this keeps transformers from importing an installed torch, which
    # takes seconds and memory.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # numpy comes with it, and would start a thread for every processor.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    run_service(SERVICE, GatewaySettings, serve)


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains."""
    give_memory_back()
    with service_tracing(SERVICE, settings) as tracing:
        gateway = Gateway(settings, load_tokenizer(settings.model), tracing)
        # What was loaded stays: a full collection that walks through it would hold up the event
        # loop.
        gc.collect()
        gc.freeze()
        addresses = await gateway.start()
        logger.info(
            "serving %s: HTTP on %s, gRPC on %s",
            settings.model_name,
            addresses.http,
            addresses.grpc,
        )
        await gateway.serve_until(stop)


@dataclass(frozen=True, slots=True)
class Addresses:
    http: str
    grpc: str


class Gateway:
    """All that a gateway process is made of."""

    def __init__(self, settings: GatewaySettings, tokenizer: HfTokenizer, tracing: Tracing) -> None:
        """Raises FailedPrecondition for a generation_config.json that is wrong."""
        self._settings = settings
        gateway_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._links = {
            address: SchedulerLink(address, gateway_id, settings.session_timeout_seconds)
            for address in settings.schedulers
        }
        self.prefix_index = PrefixIndex()
        parts = RoutingParts(
            random.Random(secrets.randbits(64)),
            asyncio.get_running_loop(),
            self.prefix_index,
            settings.routing_max_load_delta,
        )
        self.fleet = Fleet(
            self._links,
            asyncio.get_running_loop(),
            make_policy(settings.routing_policy, parts),
            resubmit_timeout_seconds=settings.resubmit_timeout_seconds,
            migrate_after_seconds=settings.migrate_after_seconds,
            tokenizer_fingerprint=tokenizer_fingerprint(settings.model),
        )
        self.membership = self.fleet.membership
        self._inference = Inference(
            settings.model_name,
            tokenizer,
            self.fleet,
            defaults=read_sampling_defaults(settings.generation_config, settings.model),
            max_choices=settings.max_choices_per_request,
            max_items=settings.max_items_per_request,
            max_logprobs=settings.max_logprobs_per_request,
            draw_seed=lambda: secrets.randbits(64),
            unix_nanos=time.time_ns,
        )
        self.gate = Gate(settings.max_concurrent_requests)
        self._follower = make_follower(
            self.prefix_index, settings.redis_url, lambda: self.membership.replicas
        )
        self._metrics = Metrics(settings.model_name)
        self._metrics.register(IndexCollector(self.prefix_index, self._follower.counts))
        self._observer = Observer(settings.model_name, tracing, self._metrics, self.prefix_index)
        self._keys = ApiKeys(settings.api_keys)
        max_connections = connections_within_limit(settings.max_connections)
        self._http = self._http_server(max_connections)
        self._grpc = self._grpc_server(max_connections)
        self._tasks: list[asyncio.Task[None]] = []

    def _http_server(self, max_connections: int) -> HttpServer:
        settings = self._settings
        inference, fleet, gate = self._inference, self.fleet, self.gate
        budget = BodyBudget(settings.max_buffered_body_bytes, settings.body_timeout_seconds)
        bodies = BodyReader(settings.max_body_bytes, settings.max_items_per_request, budget)
        app = make_app(
            GenerationRoutes(inference, gate, self._observer, bodies),
            TokenizerRoutes(inference, self.membership, gate, bodies),
            ServerRoutes(inference, fleet, self._links, gate, self._metrics),
            self._keys,
        )
        generating = (COMPLETIONS, CHAT_COMPLETIONS)
        early = EarlyRefusals(app, generating, self._keys, gate, inference, self._observer)
        names = hosts_for(settings.http_address, settings.allowed_hosts)
        outer = guarded(early, names, settings.allowed_origins)
        connections = Connections(
            settings, max_connections, lambda: self._metrics.reader_timed_out("http")
        )
        return HttpServer(outer, connections)

    def _grpc_server(self, max_connections: int) -> GrpcServer:
        settings = self._settings
        servicer = InferenceServicer(
            self._inference,
            self.membership,
            self.gate,
            self._observer,
            self._metrics,
            reader_timeout_seconds=settings.reader_timeout_seconds,
        )
        interceptor = RequestInterceptor(
            self._keys,
            REQUEST_TYPES,
            checks={GENERATE: servicer.check_room},
            max_items=settings.max_items_per_request,
            message_timeout_seconds=settings.receive_timeout_seconds,
        )
        server = GrpcServer(
            max_concurrent_rpcs=settings.max_concurrent_requests + _OTHER_RPCS,
            options={
                "grpc.max_receive_message_length": settings.max_message_bytes,
                "grpc.max_allowed_incoming_connections": max_connections,
                # A connection needs no more streams than there may be requests.
                "grpc.max_concurrent_streams": settings.max_concurrent_requests,
                "grpc.max_connection_idle_ms": _GRPC_IDLE_MILLISECONDS,
                # From connecting to the first frame, and to the settings in it.
                "grpc.server_handshake_timeout_ms": int(1000 * settings.receive_timeout_seconds),
                "grpc.http2.settings_timeout": int(1000 * settings.receive_timeout_seconds),
            },
            interceptors=(interceptor,),
        )
        server.add(gateway_pb2_grpc.add_InferenceServicer_to_server, servicer, SERVICE_NAME)
        return server

    async def start(self) -> Addresses:
        """Listens, and begins to connect to the schedulers.

        Raises Unavailable, and listens nowhere, when an address cannot be bound, and SettingError
        when Redis refuses the password.
        """
        await self._follower.require_usable()
        try:
            http_address = await self._http.start(self._settings.http_address)
            grpc_address = await self._grpc.start(self._settings.address)
        except StepwellError:
            await asyncio.gather(self._grpc.drain(0), self._http.stop(0))
            raise
        self._tasks = [
            asyncio.create_task(self._links[replica.address].run(replica))
            for replica in self.membership.replicas
        ]
        self._tasks.append(asyncio.create_task(self._follow_readiness()))
        self._tasks.append(asyncio.create_task(self._follower.run()))
        return Addresses(http_address, grpc_address)

    async def drain(self) -> None:
        """Lets requests finish within the drain time, then ends those that have not.

        Meanwhile the servers answer: health is not ready, new requests are refused as unavailable.
        """
        self.gate.close()
        await self._grpc.set_ready(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_seconds):
                await self.gate.empty()
        self.fleet.give_up(Unavailable("the server is shutting down", retry_after_seconds=1.0))
        await asyncio.gather(
            self._grpc.drain(_LAST_ANSWERS_SECONDS), self._http.stop(_LAST_ANSWERS_SECONDS)
        )
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
            self.membership.changed.clear()
            await self._grpc.set_ready(self.membership.num_ready > 0 and self.gate.is_open)
            await self.membership.changed.wait()


if __name__ == "__main__":
    main()
