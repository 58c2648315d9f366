"""The composition root of the gateway process: `python -m services.gateway`."""

import gc
import signal

if __name__ == "__main__":
    gc.disable()  # until run_service has called gc.freeze on the imported objects
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the event loop handles SIGINT

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.metrics import Meter

from services.common.errors import StepwellError, Unavailable
from services.common.process.lifecycle import run_service
from services.common.telemetry.metrics import serving_metrics
from services.common.telemetry.otlp_metrics import service_meter
from services.common.telemetry.tracing import Tracing, service_tracing
from services.common.tls.credentials import Tls
from services.common.tls.settings import TlsFields, tls_of
from services.gateway.adapters.process_limits import connections_within_limit, give_memory_back
from services.gateway.adapters.tokenizer.chat_template_options import ChatTemplateOptions
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.models.further_models import further_models
from services.gateway.options.option import Option
from services.gateway.parts import Parts
from services.gateway.servers import admin_server, grpc_server, http_server
from services.gateway.settings import GatewaySettings

SERVICE = "gateway"
PUBLIC_TLS = TlsFields(
    purpose="public",
    cert="tls_cert_file",
    key="tls_key_file",
    ca="tls_client_ca_file",
    is_ca_needed=False,
)
"""The names of the settings for TLS with clients."""
_NEW_OBJECTS_BEFORE_COLLECTION = 2_000
"""Threshold 0 of gc.set_threshold: this number of new objects triggers a minor collection."""
_LAST_ANSWERS_SECONDS = 1.0
"""Time limit in seconds for sending the last answers after `drain_seconds` have passed."""
_SCRAPE_SECONDS = 10.0
"""Time limit in seconds for collecting the metrics of all replicas. It includes the wait for
replicas that do not respond.
"""

logger = logging.getLogger(__name__)


def main() -> None:
    # The gateway builds no model. Without this entry, transformers would import an installed torch,
    # which costs seconds and memory.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # transformers imports numpy, which would start one thread for each processor.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    run_service(SERVICE, GatewaySettings, serve)


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains the gateway."""
    give_memory_back()
    with (
        service_tracing(SERVICE, settings) as tracing,
        service_meter(SERVICE, settings) as meter,
        tls_of(settings) as internal_tls,
        tls_of(settings, PUBLIC_TLS) as tls,
    ):
        further = [(one, tokenizer_of(one)) for one in further_models(settings)]
        tokenizer = tokenizer_of(settings)
        gateway = Gateway(settings, tokenizer, tracing, tls, internal_tls, meter, further)
        addresses = await gateway.start()
        # A full collection over all objects would block the event loop. Objects loaded so far live
        # until the process ends, so they are frozen. Requests form no reference cycles, so they
        # need no full collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS_BEFORE_COLLECTION)
        logger.info(
            "serving %s: HTTP on %s, gRPC on %s",
            ", ".join(parts.settings.model_name for parts in gateway.models),
            addresses.http,
            addresses.grpc,
        )
        if not gateway.parts.options.access.needs_key:
            logger.info(
                "no API key is required: every client that reaches these addresses is served"
            )
        if addresses.admin is not None:
            logger.info("operators' calls are served on %s", addresses.admin)
        await gateway.serve_until(stop)


def tokenizer_of(settings: GatewaySettings) -> HfTokenizer:
    """Loads the tokenizer of a model, with the settings of its chat template."""
    chat_template = ChatTemplateOptions(
        settings.chat_template,
        settings.chat_template_variables,
        settings.chat_template_content_format,
    )
    return load_tokenizer(settings.model, chat_template)


@dataclass(frozen=True, slots=True)
class Addresses:
    http: str
    grpc: str
    admin: str | None
    """The address for operators' calls, or None if they are not served."""
    metrics: str | None
    """The separate address of Prometheus' metrics, or None if clients read them at /metrics."""


class Gateway:
    """The servers, connections to schedulers, and background tasks of a gateway process."""

    def __init__(
        self,
        settings: GatewaySettings,
        tokenizer: HfTokenizer,
        tracing: Tracing,
        tls: Tls | None = None,
        internal_tls: Tls | None = None,
        meter: Meter | None = None,
        further: Sequence[tuple[GatewaySettings, HfTokenizer]] = (),
    ) -> None:
        """Passes the arguments to Parts. `further` are the settings and tokenizers of further
        models. Raises SettingError if settings conflict.
        """
        settings.require_admin_key()
        settings.require_tool_call_parser()
        self._settings = settings
        labels = {"model_name": settings.model_name} if further else None
        self.parts = Parts(settings, tokenizer, tracing, tls, internal_tls, meter, labels=labels)
        self.models = [self.parts]
        """The parts of each model, the first model's first."""
        for one, own_tokenizer in further:
            labels = {"model_name": one.model_name}
            parts = Parts(
                one, own_tokenizer, self.parts.tracing, tls, internal_tls, meter,
                labels=labels, is_first=False,
            )  # fmt: skip
            self.models.append(parts)
            for option, of_first in zip(parts.options, self.parts.options, strict=True):
                option.join(of_first)
        for parts in self.models:
            parts.join([other for other in self.models if other is not parts])
        self.fleet = self.parts.fleet
        self.membership = self.parts.membership
        self.gate = self.parts.gate
        max_connections = connections_within_limit(settings.max_connections)
        self._http = http_server(self.models, max_connections)
        self._admin = admin_server(self.models)
        self._grpc = grpc_server(self.models, max_connections)
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self._metrics = contextlib.ExitStack()

    async def start(self) -> Addresses:
        """Listens on all addresses, and starts connecting to the schedulers.

        Raises Unavailable if an address cannot be bound. Raises SettingError if Redis refuses the
        password, or if the file with clients' API keys cannot be read. After an error, no address
        is open.
        """
        for parts in self.models:
            await parts.require_usable()
        try:
            http_address = await self._http.start(self._settings.http_address)
            grpc_address = await self._grpc.start(
                self._settings.address, self._settings.health_address, self._settings.health_file
            )
            admin_address = await self._start_admin()
            for option in self._options():
                await option.start()
            metrics_address = self._metrics.enter_context(
                serving_metrics(self._render_metrics, self._settings.metrics_address)
            )
        except StepwellError:
            await self._stop_servers(0)
            await self._grpc.drain(0)
            await self._stop_options(None)
            raise
        self._tasks = [
            *(asyncio.create_task(self._follow_readiness(parts)) for parts in self.models),
            *(task for parts in self.models for task in parts.start_tasks()),
        ]
        return Addresses(http_address, grpc_address, admin_address, metrics_address)

    def _render_metrics(self, exemplars: bool) -> bytes:
        """Returns the metrics of the gateway and its replicas. Blocks until the event loop has
        collected them, so it must be called in another thread.
        """
        collecting = self.parts.fleet_metrics.collect(exemplars=exemplars)
        return asyncio.run_coroutine_threadsafe(collecting, self._loop).result(_SCRAPE_SECONDS)

    async def _start_admin(self) -> str | None:
        if self._admin is None or self._settings.admin_address is None:
            return None
        return await self._admin.start(self._settings.admin_address)

    async def _stop_servers(self, grace_seconds: float) -> None:
        http = [server for server in (self._http, self._admin) if server is not None]
        await asyncio.gather(
            self._grpc.end_calls(grace_seconds), *(server.stop(grace_seconds) for server in http)
        )

    async def _stop_options(self, second_stop: asyncio.Event | None) -> None:
        for option in self._options():
            await option.stop(second_stop)

    def _options(self) -> Iterator[Option]:
        return (option for parts in self.models for option in parts.options)

    async def drain(self, stop: asyncio.Event | None = None) -> None:
        """Waits at most `drain_seconds` until all requests have ended, then aborts unfinished ones.

        When the drain begins, health reports that the gateway is not ready, and each connection
        closes when it has no request. If `stop` is given, requests of clients that do not yet know
        are accepted for `drain_delay_seconds`. Then new requests are refused as unavailable. The
        health service ends after the last request. Options, such as the viewer, may serve longer,
        until `stop` is set.
        """
        for parts in self.models:
            parts.gate.begin_drain()
        await self._grpc.set_ready(False)
        self._http.end_idle()
        if stop is not None:
            await asyncio.sleep(self._settings.drain_delay_seconds)
        for parts in self.models:
            parts.gate.close()
        shutting_down = Unavailable("the server is shutting down", retry_after_seconds=1.0)
        for option in self._options():
            option.begin_drain(shutting_down)
        self._grpc.begin_drain(self._settings.drain_seconds + _LAST_ANSWERS_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_seconds):
                for parts in self.models:
                    await parts.gate.empty()
        for option in self._options():
            await option.close(shutting_down)
        for parts in self.models:
            parts.fleet.give_up(shutting_down)
        await self._stop_servers(_LAST_ANSWERS_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._grpc.drain(0)
        await asyncio.to_thread(self._metrics.close)
        await self._stop_options(stop)

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set or a background task fails, then drains.
        Raises the task's error.
        """
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        failed = [task for task in self._tasks if task.done()]
        stop.clear()
        await self.drain(None if failed else stop)
        for task in failed:
            task.result()

    async def _follow_readiness(self, parts: Parts) -> None:
        """Follows the replicas of a model. Sets gRPC health to SERVING while a replica of any model
        is ready and the gateway accepts requests.
        """
        while True:
            parts.membership.changed.clear()
            num_ready = sum(one.membership.num_ready for one in self.models)
            await self._grpc.set_ready(num_ready > 0 and self.gate.is_open)
            await parts.membership.changed.wait()


if __name__ == "__main__":
    main()
