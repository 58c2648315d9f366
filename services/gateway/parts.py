"""Builds, from the settings, the parts of a gateway that serve one model."""

import asyncio
import random
import secrets
import socket
import time
from collections.abc import Mapping, Sequence

from opentelemetry.metrics import Meter, NoOpMeter

from services.common.request.tokenizer_files import tokenizer_fingerprint
from services.common.telemetry.exposition import Exposition
from services.common.telemetry.tracing import Tracing
from services.common.telemetry.tracing_metrics import TracingCollector
from services.common.tls.credentials import Tls
from services.common.tls.metrics import TlsCollector
from services.gateway.adapters.directory.follower import make_follower
from services.gateway.adapters.directory.metrics import IndexCollector
from services.gateway.adapters.discovery.discovery import Discovery
from services.gateway.adapters.grammars.judge import GrammarJudge
from services.gateway.adapters.http.clients.server_routes import ServerRoutes
from services.gateway.adapters.lora_files import lora_modules
from services.gateway.adapters.schedulers.scheduler_links import SchedulerLinks
from services.gateway.adapters.telemetry.fleet_metrics import FleetCollector, FleetMetrics
from services.gateway.adapters.telemetry.genai_metrics import GenAiMetrics
from services.gateway.adapters.telemetry.metrics import Metrics
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.adapters.telemetry.request_recorder import RecorderSettings, RequestRecorder
from services.gateway.adapters.tokenizer.generation_config import read_sampling_defaults
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer
from services.gateway.core.fleet.fleet import Fleet
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing import make_policy
from services.gateway.core.fleet.routing.policy import RoutingParts
from services.gateway.core.gate import Gate
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.gateway.core.request.inference import Inference
from services.gateway.core.text.parsing.output_form import OutputFormats
from services.gateway.options.listed import OPTIONS
from services.gateway.options.option import OptionParts, Options
from services.gateway.settings import GatewaySettings


class Parts:
    """The core of a gateway and its adapters. The class Gateway starts and stops them."""

    def __init__(
        self,
        settings: GatewaySettings,
        tokenizer: HfTokenizer,
        tracing: Tracing,
        tls: Tls | None = None,
        internal_tls: Tls | None = None,
        meter: Meter | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        is_first: bool = True,
    ) -> None:
        """`tls` is used with clients and operators, and `internal_tls` with the other services.
        `labels` are added to all metrics of the gateway. The metrics of the process belong to the
        first model.
        Raises FailedPrecondition if generation_config.json is invalid. Raises SettingError if a
        certificate is invalid, if settings conflict, or if the package for Redis is missing.
        """
        self.settings = settings
        self.tls = tls
        self.internal_tls = internal_tls
        gateway_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        loop = asyncio.get_running_loop()
        self.links = SchedulerLinks(gateway_id, settings.session_timeout_seconds, internal_tls)
        self.prefix_index = PrefixIndex()
        self.fleet = _make_fleet(settings, self.links, self.prefix_index)
        self.membership = self.fleet.membership
        self.discovery = Discovery(
            settings.known_schedulers,
            settings.redis_url,
            settings.model_name,
            self.fleet.set_addresses,
        )
        self.inference = _make_inference(settings, tokenizer, self.fleet)
        self.gate = Gate(settings.max_concurrent_requests)
        self.follower = make_follower(
            self.prefix_index, settings.redis_url, self._replicas, internal_tls
        )
        self.metrics = Metrics(settings.model_name)
        genai = GenAiMetrics(meter or NoOpMeter("stepwell"), settings.model_name)
        self.observer = Observer(self.metrics, genai, self.prefix_index)
        running: dict[int, RequestRecord] = {}
        parts = OptionParts(
            settings,
            self.inference,
            self.fleet,
            self.links,
            self.prefix_index,
            self.gate,
            running,
            lambda: self.fleet_metrics.collect(exemplars=False),
            self.observer,
            loop,
            gateway_id,
            is_first,
            settings.redis_url,
            internal_tls,
        )
        self.options = Options([option(settings, parts) for option in OPTIONS])
        for option in self.options:
            tracing = option.traced(tracing)
        self.tracing = tracing
        fleet_collector = FleetCollector(
            self.fleet, settings.model_name, settings.expected_replicas
        )
        own = self._own_metrics(fleet_collector, labels, has_process=is_first)
        self.fleet_metrics = FleetMetrics(own, fleet_collector, self.links)
        recording = RecorderSettings(
            settings.model_name,
            settings.trace_slow_seconds,
            settings.trace_slowest_per_minute,
            settings.access_log,
        )
        self.recorder = RequestRecorder(
            recording, tracing, self.metrics, self.links.keep_trace, running
        )
        self.server_routes = ServerRoutes(
            self.inference,
            self.fleet,
            self.links,
            self.gate,
            self.fleet_metrics,
            self.options.private_labels,
        )

    def _replicas(self) -> list[Replica]:
        return self.membership.replicas

    def join(self, others: "Sequence[Parts]") -> None:
        """Lists the other models of this gateway where all models are listed."""
        self.inference.others = [other.inference for other in others]
        self.server_routes.others = [other.server_routes for other in others]
        self.fleet_metrics.others = [other.fleet_metrics for other in others]

    async def require_usable(self) -> None:
        """Raises SettingError if a setting is wrong, such as the password of Redis."""
        await self.follower.require_usable()
        for option in self.options:
            await option.require_usable()

    def start_tasks(self) -> list[asyncio.Task[None]]:
        """Starts connecting to the schedulers, and the other background tasks."""
        running = (self.links, self.discovery, self.follower, *self.options)
        return [asyncio.create_task(one.run()) for one in running]

    def _own_metrics(
        self,
        fleet_collector: FleetCollector,
        labels: Mapping[str, str] | None,
        *,
        has_process: bool,
    ) -> Exposition:
        return Exposition(
            "gateway",
            (
                self.metrics.registry,
                fleet_collector,
                IndexCollector(self.prefix_index, self.follower.counts),
                self.discovery,
                *(collector for option in self.options for collector in option.collectors),
            ),
            [TlsCollector(self.tls, self.internal_tls), TracingCollector(self.tracing)],
            labels,
            has_process=has_process,
        )


def _make_fleet(
    settings: GatewaySettings, links: SchedulerLinks, prefix_index: PrefixIndex
) -> Fleet:
    loop, rng = asyncio.get_running_loop(), random.Random(secrets.randbits(64))
    routing = RoutingParts(rng, loop, prefix_index, settings.routing_max_load_delta)
    return Fleet(
        links,
        loop,
        make_policy(settings.routing_policy, routing),
        resubmit_timeout_seconds=settings.resubmit_timeout_seconds,
        migrate_after_seconds=settings.migrate_after_seconds,
        tokenizer_fingerprint=tokenizer_fingerprint(settings.model),
        nanos=time.perf_counter_ns,
        max_num_queued_tokens=settings.max_num_queued_tokens,
    )


def _make_inference(settings: GatewaySettings, tokenizer: HfTokenizer, fleet: Fleet) -> Inference:
    return Inference(
        settings.model_name,
        tokenizer,
        fleet,
        GrammarJudge(tokenizer.to_json),
        output_formats=OutputFormats(
            settings.reasoning_parser, settings.tool_call_parser, settings.enable_auto_tool_choice
        ),
        defaults=read_sampling_defaults(
            settings.generation_config, settings.model, settings.generation_overrides
        ),
        adapters=lora_modules(settings.model_name, settings.lora_modules),
        max_choices=settings.max_choices_per_request,
        max_items=settings.max_items_per_request,
        max_logprobs=settings.max_logprobs_per_request,
        stream_interval=settings.stream_interval,
        draw_seed=lambda: secrets.randbits(64),
        unix_nanos=time.time_ns,
    )
