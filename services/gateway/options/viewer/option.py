"""The option that shows the replicas' activity and the traces of requests."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from typing import Self

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from starlette.types import ASGIApp

from services.common.redis.connection import RedisConnection
from services.common.rpc.server import GrpcServer
from services.common.telemetry.tracing import Tracing, configure_tracing
from services.gateway.adapters.http.exchange.route import Route
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.caller import Caller
from services.gateway.core.request.generation import Usage
from services.gateway.options.option import Option, OptionParts, Options, RouteParts
from services.gateway.options.viewer.activity.feed import ActivityFeed
from services.gateway.options.viewer.activity.history import HistoryKeeper
from services.gateway.options.viewer.activity.routes import ActivityRoutes
from services.gateway.options.viewer.core.history import History
from services.gateway.options.viewer.core.trace_store import TraceStore
from services.gateway.options.viewer.overview.fleet_watch import FleetWatch
from services.gateway.options.viewer.overview.redis_probe import RedisProbe
from services.gateway.options.viewer.overview.routes import OverviewRoutes
from services.gateway.options.viewer.pages import UiPages, UiRole
from services.gateway.options.viewer.settings import ViewerSettings
from services.gateway.options.viewer.traces.keeping import StoreExporter, TraceServicer
from services.gateway.options.viewer.traces.routes import TraceRoutes
from services.gateway.options.viewer.traces.running import RunningTraces
from services.gateway.options.viewer.traces.sampler import AtMostPerMinute

OTLP_SERVICE_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"
_MAX_STORED_BYTES = 16 * 2**20
"""Limit on the total bytes of the stored spans. One trace for each 32 KiB of it can be stored."""
_MAX_EXPORTS = 64
"""Limit on the number of concurrent calls by which other services export spans to the gateway."""
_LAST_EXPORTS_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Viewer(Option):
    """Serves /activity, /traces and /ui. Stores traces if the setting trace_address is given."""

    def __init__(self, settings: ViewerSettings, parts: OptionParts) -> None:
        self._settings = settings
        self._parts = parts
        fleet, links = parts.engine, parts.links
        self._history = History()
        self._keeper = HistoryKeeper(
            self._history, fleet.membership, links, lambda: fleet.num_waiting
        )
        self._feed = ActivityFeed(fleet.membership, links, parts.prefix_index)
        self._watch = FleetWatch(socket.gethostname(), parts.collect_metrics)
        self._watch.links.append(links)
        self._redis = (
            None if parts.redis_url is None else RedisProbe(RedisConnection(parts.redis_url))
        )
        self._is_served = False
        self._running = RunningTraces(parts.running, links, parts.inference.model_name)
        self.store: TraceStore | None = None
        """The stored traces. It is None if traces are not stored."""
        self.address: str | None = None
        """The bound address that receives the spans of other services."""
        self._server: GrpcServer | None = None
        parts.observer.listeners.append(self)
        if settings.trace_address is not None:
            self.store = TraceStore(_MAX_STORED_BYTES // 2**15, _MAX_STORED_BYTES)

    def routes(self, parts: RouteParts, options: Options) -> Sequence[Route]:  # noqa: ARG002
        return self._routes(options, sees_all=False) if self._settings.ui else ()

    def operator_routes(self, options: Options) -> Sequence[Route]:
        return self._routes(options, sees_all=True)

    def wrap(self, app: ASGIApp, *, for_operators: bool) -> ASGIApp:
        if for_operators:
            return UiPages(app, UiRole.OPERATOR)
        return UiPages(app, UiRole.CLIENT) if self._settings.ui else app

    def traced(self, tracing: Tracing) -> Tracing:
        """Adds the trace store to the receivers of the gateway's spans. The limit on traces per
        minute applies only if no OpenTelemetry collector is configured.
        """
        if self.store is None:
            return tracing
        exporter = StoreExporter(self.store)
        if tracing.processor is not None:
            tracing.processor.add_span_processor(SimpleSpanProcessor(exporter))
            return tracing
        ratio = tracing.sample_ratio
        sampler = AtMostPerMinute(
            TraceIdRatioBased(ratio), self._settings.trace_store_max_per_minute
        )
        return configure_tracing("gateway", "", ratio, exporter=exporter, root_sampler=sampler)

    # Methods of the observer's interface Listener.

    def answered(self, record: RequestRecord, usage: Usage) -> None:
        first = None if record.first_token is None else record.first_token - record.timeline.began
        self._history.answered(
            time.time(),
            record.seconds,
            None if first is None else first / 1e9,
            usage.num_generated_tokens,
            failed=record.is_failure,
        )

    def refused(self, caller: Caller, reason: str) -> None:  # noqa: ARG002
        self._history.refused(time.time(), reason)

    def join(self, first: Self) -> None:
        """Shows the traces, alerts and processes of all models."""
        self.store = first.store
        self._watch, self._redis = first._watch, first._redis
        self._watch.links.append(self._parts.links)

    async def start(self) -> None:
        """Starts the OTLP server, which receives the spans of the other services."""
        if self.store is None or self._settings.trace_address is None:
            return
        self._server = GrpcServer(max_concurrent_rpcs=_MAX_EXPORTS, tls=self._parts.internal_tls)
        register = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        self._server.add(register, TraceServicer(self.store), OTLP_SERVICE_NAME)
        self.address = await self._server.start(self._settings.trace_address)
        await self._server.set_ready(True)
        logger.info(
            "the gateway keeps traces, and receives spans of other services at %s", self.address
        )

    async def run(self) -> None:
        """Takes samples, if any server shows them."""
        if not self._is_served:
            await super().run()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keeper.run())
                if self._parts.is_first:
                    tasks.create_task(self._watch.run())
        finally:
            if self._redis is not None and self._parts.is_first:
                await self._redis.close()

    async def stop(self, second_stop: asyncio.Event | None) -> None:
        """Stops the OTLP server after at most `trace_linger_seconds`, so that it can receive the
        spans of services that stop later than the gateway.
        """
        if self._server is None:
            return
        if second_stop is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.trace_linger_seconds):
                    await second_stop.wait()
        await self._server.drain(_LAST_EXPORTS_SECONDS)

    def _routes(self, options: Options, *, sees_all: bool) -> Sequence[Route]:
        """Returns the routes /activity and /traces. If `sees_all` is true, they show the data of
        all callers, and otherwise only the data of the request's own caller.
        """
        self._is_served = True
        parts = self._parts
        uses = {name: without for one in options for name, without in one.redis_uses.items()}
        overview = OverviewRoutes(self._watch, self._redis, uses, sees_all=sees_all)
        activity = ActivityRoutes(
            self._feed, self._history, parts.inference, parts.engine, parts.gate, sees_all=sees_all
        )
        traces = TraceRoutes(self.store, self._running, sees_all=sees_all)
        return (*activity.routes(), *overview.routes(), *traces.routes())
