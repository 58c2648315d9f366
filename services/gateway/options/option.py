"""The interface through which an option, a removable part of the gateway, extends the handling of
requests and adds routes.
"""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.types import ASGIApp

from services.common.errors import StepwellError
from services.common.rpc.server import Context
from services.common.telemetry.metric_specs.spec import MetricSpec
from services.common.telemetry.tracing import Tracing
from services.common.tls.credentials import Tls
from services.gateway.adapters.access import Access
from services.gateway.adapters.grpc.call_records import CallRecords
from services.gateway.adapters.grpc.message_stream import AnswerStreams
from services.gateway.adapters.http.clients.generation_routes import GenerationRoutes
from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.exchange.route import RequestHeader, Route
from services.gateway.adapters.schedulers.scheduler_links import SchedulerLinks
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.client_settings import ClientSettings
from services.gateway.core.caller import Caller
from services.gateway.core.fleet.fleet import Fleet
from services.gateway.core.gate import Gate
from services.gateway.core.ports import Clock
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.inference import Inference


@dataclass(frozen=True, slots=True)
class OptionParts:
    """The parts of a gateway that its options use."""

    settings: ClientSettings
    inference: Inference
    engine: Fleet
    """An option may replace the engine's attribute `admission`."""
    links: SchedulerLinks
    prefix_index: PrefixIndex
    gate: Gate
    running: Mapping[int, RequestRecord]
    """The records of unfinished calls, the oldest first."""
    collect_metrics: Callable[[], Awaitable[bytes]]
    """Returns the metrics of the gateway and all its replicas as text."""
    observer: Observer
    """An option may append to the observer's attribute `listeners`."""
    clock: Clock
    gateway_id: str
    is_first: bool
    """Whether the gateway's first model has these parts. Its options run what all models share."""
    redis_url: str | None
    internal_tls: Tls | None


@dataclass(frozen=True, slots=True)
class RouteParts:
    """The parts of the clients' HTTP server that routes of options use."""

    generation: GenerationRoutes
    inference: Inference
    gate: Gate
    bodies: BodyReader
    model: Path
    """Path of the model's directory or file."""
    headers: tuple[RequestHeader, ...]
    """Headers that the gateway reads in requests that run the model."""
    generating_headers: tuple[RequestHeader, ...]
    """Headers that the gateway reads in requests that generate tokens."""


StreamCall = Callable[[AsyncIterator[Any], Context], Awaitable[None]]
"""Handles a gRPC call with a stream of requests, and writes the answers to the call's context."""


@dataclass(frozen=True, slots=True)
class CallParts:
    """The parts of the clients' gRPC server that calls of options use."""

    inference: Inference
    gate: Gate
    observer: Observer
    records: CallRecords
    streams: AnswerStreams


class Option:
    """One option. A subclass overrides the methods and attributes that it uses. By default they
    have no effect. Each option is a folder beside this module, which only `listed.py` imports.
    """

    metric_specs: ClassVar[Sequence[MetricSpec]] = ()
    request_headers: ClassVar[Sequence[RequestHeader]] = ()
    """Headers that this option reads in requests that generate tokens. Only the application, and
    not QuickRefusals, checks a request with one of these headers. Turns of clients' sessions cannot
    have them.
    """
    operations: ClassVar[Mapping[str, str]] = {}
    """Maps each path whose requests run the model to the operation's name in traces and metrics."""
    bodies: ClassVar[Mapping[str, type[BaseModel]]] = {}
    """Maps paths to the classes of their request bodies, if the classes belong to this option."""
    answer_headers: ClassVar[Sequence[str]] = ()
    """Headers that `guarded` may add to answers."""
    access: Access | None = None
    """Replaces the default check of clients' access. None keeps the default."""
    private_labels: Sequence[str] = ()
    """Names of metric labels. Clients may not see time series that have one of these labels."""
    redis_uses: Mapping[str, str] = {}
    """Maps what the option reads from Redis for each request to what happens without Redis."""

    def __init__(self, settings: Any, parts: OptionParts) -> None:
        """`settings` are all settings of the gateway, including this option's. Raises SettingError
        for an invalid setting.
        """

    @property
    def collectors(self) -> Sequence[Collector]:
        """Prometheus collectors of the metrics in `metric_specs`."""
        return ()

    @property
    def max_streams(self) -> int:
        """Limit on the number of concurrent gRPC streams of this option's calls."""
        return 0

    def routes(self, parts: RouteParts, options: "Options") -> Sequence[Route]:  # noqa: ARG002
        """Returns this option's routes of the clients' HTTP API. They replace routes with the same
        paths. `options` are all options of the gateway.
        """
        return ()

    def operator_routes(self, options: "Options") -> Sequence[Route]:  # noqa: ARG002
        return ()

    def calls(
        self,
        parts: CallParts,  # noqa: ARG002
        options: "Options",  # noqa: ARG002
    ) -> Mapping[str, StreamCall]:
        """Returns a map from methods' names of the clients' gRPC service to their handlers."""
        return {}

    def guarded(self, app: ASGIApp, paths: Collection[str]) -> ASGIApp:  # noqa: ARG002
        """Wraps the HTTP application in checks of POST requests to `paths`, which all run the
        model. The checks run before the request's body is read.
        """
        return app

    def wrap(self, app: ASGIApp, *, for_operators: bool) -> ASGIApp:  # noqa: ARG002
        """Wraps the HTTP application of clients, or of operators if `for_operators` is true. The
        wrapper receives requests before API keys are checked.
        """
        return app

    def traced(self, tracing: Tracing) -> Tracing:
        """Called once at the gateway's start. Returns the tracing to use for requests."""
        return tracing

    def admitted(
        self,
        record: RequestRecord,  # noqa: ARG002
        context: Context | None,  # noqa: ARG002
    ) -> AbstractAsyncContextManager[None] | None:
        """Returns a context manager for a gRPC call that runs the model, or for a turn of a
        client's session. It is entered before the call's message is read. None means that no
        context manager is needed. `context` is None for a turn.
        """
        return None

    def needs_room(self, headers: Mapping[str, str], caller: Caller) -> bool:  # noqa: ARG002
        """Whether a request needs room at a replica. A request whose answer already exists needs
        none. Header names are in lower case. Raises InvalidArgument for an invalid header.
        """
        return True

    async def before_queue(
        self,
        generation: Generation,
        record: RequestRecord,  # noqa: ARG002
        api: str,  # noqa: ARG002
    ) -> Generation:
        """Called for a checked request before its sequences are queued. Returns the Generation to
        run: `generation` itself, or another one, for example one that reads a stored answer. `api`
        is the kind of answer, such as a chat completion. The call is cancelled at the request's
        deadline.
        """
        return generation

    def join(self, first: Self) -> None:
        """Called before the servers are made, if this option belongs to a further model of the
        gateway. `first` is the first model's option. An option can share with it what belongs to
        the process.
        """

    async def require_usable(self) -> None:
        """Called before the gateway listens. Raises SettingError if a setting is wrong."""

    async def start(self) -> None:
        """Starts the option's own servers. Raises Unavailable if an address cannot be bound."""

    async def run(self) -> None:
        """Runs from the start of the gateway until it is cancelled."""
        await asyncio.Event().wait()

    def begin_drain(self, error: StepwellError) -> None:
        """Called when the gateway begins to drain. If the option ends calls now, it raises `error`
        in them.
        """

    async def close(self, error: StepwellError) -> None:
        """Called after the gateway has drained. Ends the remaining requests with `error`."""

    async def stop(self, second_stop: asyncio.Event | None) -> None:
        """Called after the gateway's servers have stopped. Stops the option's own servers at once
        if `second_stop` is None. Otherwise the servers may run for some time, until `second_stop`
        is set.
        """


class Options:
    def __init__(self, options: Sequence[Option] = ()) -> None:
        self._options = options
        self.request_headers = tuple(
            header for option in options for header in option.request_headers
        )
        self.header_names = frozenset(header.name.lower() for header in self.request_headers)
        self.answer_headers = tuple(
            header for option in options for header in option.answer_headers
        )
        self.private_labels = tuple(label for option in options for label in option.private_labels)
        accesses = (option.access for option in options if option.access is not None)
        self.access = next(accesses, Access())

    def __iter__(self) -> Iterator[Option]:
        return iter(self._options)

    def header_in(self, headers: Container[str]) -> str | None:
        names = (header.name for header in self.request_headers)
        return next((name for name in names if name.lower() in headers), None)

    def guarded(self, app: ASGIApp, paths: Collection[str]) -> ASGIApp:
        for option in self._options:
            app = option.guarded(app, paths)
        return app

    def wrap(self, app: ASGIApp, *, for_operators: bool) -> ASGIApp:
        for option in self._options:
            app = option.wrap(app, for_operators=for_operators)
        return app

    def admitted(
        self, record: RequestRecord, context: Context | None = None
    ) -> AbstractAsyncContextManager[None]:
        contexts = (option.admitted(record, context) for option in self._options)
        needed = [one for one in contexts if one is not None]
        return _all_of(needed) if needed else nullcontext()

    def needs_room(self, headers: Mapping[str, str], caller: Caller) -> bool:
        return all(option.needs_room(headers, caller) for option in self._options)

    async def before_queue(
        self, generation: Generation, record: RequestRecord, api: str
    ) -> Generation:
        for option in self._options:
            generation = await option.before_queue(generation, record, api)
        return generation


@asynccontextmanager
async def _all_of(contexts: Sequence[AbstractAsyncContextManager[None]]) -> AsyncIterator[None]:
    async with AsyncExitStack() as entered:
        for context in contexts:
            await entered.enter_async_context(context)
        yield
