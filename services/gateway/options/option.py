"""The interface through which an option takes part in requests and adds routes."""

import asyncio
from collections.abc import AsyncIterator, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import grpc
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.types import ASGIApp

from services.common.errors import StepwellError
from services.common.telemetry.metric_specs.spec import MetricSpec
from services.common.telemetry.tracing import Tracing
from services.gateway.adapters.access import Access
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

CallContext = grpc.aio.ServicerContext[Any, Any]

if TYPE_CHECKING:
    from services.common.tls.credentials import Tls
    from services.gateway.options.server_parts import CallParts, RouteParts, StreamCall


@dataclass(frozen=True, slots=True)
class OptionParts:
    """The parts of a gateway that its options use."""

    settings: ClientSettings
    inference: Inference
    engine: Fleet
    """Its `admission` may be replaced."""
    links: SchedulerLinks
    prefix_index: PrefixIndex
    gate: Gate
    running: Mapping[int, RequestRecord]
    """The records of calls that have not ended, the oldest first."""
    observer: Observer
    """Its `listeners` may be extended."""
    clock: Clock
    gateway_id: str
    redis_url: str | None
    internal_tls: "Tls | None"


class Option:
    """One option. A subclass overrides the methods and attributes that it uses. The others have no
    effect. The folder of an option is beside this module, and only `listed.py` imports it.
    """

    metric_specs: ClassVar[Sequence[MetricSpec]] = ()
    request_headers: ClassVar[Sequence[RequestHeader]] = ()
    """Headers of generating requests that this option reads. QuickRefusals leaves requests with
    such a header to the application. Turns of sessions cannot have one.
    """
    operations: ClassVar[Mapping[str, str]] = {}
    """Maps each path that a model computes to its operation in traces and metrics."""
    bodies: ClassVar[Mapping[str, type[BaseModel]]] = {}
    """Maps each path to its body, if the body is this option's own."""
    answer_headers: ClassVar[Sequence[str]] = ()
    """Headers that `guarded` may add to answers."""
    access: Access | None = None
    """Replaces the access of clients."""
    private_labels: Sequence[str] = ()
    """Labels of metrics whose series clients may not see."""

    def __init__(self, settings: Any, parts: OptionParts) -> None:
        """`settings` are the gateway's settings, which include this option's settings. Raises
        SettingError for an invalid setting.
        """

    @property
    def collectors(self) -> Sequence[Collector]:
        """Collectors of the metrics of `metric_specs`."""
        return ()

    @property
    def max_streams(self) -> int:
        """Limit on the gRPC streams of this option's calls."""
        return 0

    def routes(self, parts: "RouteParts", options: "Options") -> Sequence[Route]:  # noqa: ARG002
        """Routes of the clients' HTTP API. Each of them replaces a route with the same path.
        `options` are all options of the gateway.
        """
        return ()

    def operator_routes(self) -> Sequence[Route]:
        return ()

    def calls(
        self,
        parts: "CallParts",  # noqa: ARG002
        options: "Options",  # noqa: ARG002
    ) -> Mapping[str, "StreamCall"]:
        """Maps names of methods of the clients' gRPC service to their handlers."""
        return {}

    def guarded(self, app: ASGIApp, paths: Collection[str]) -> ASGIApp:  # noqa: ARG002
        """Wraps the HTTP application in checks of POST requests to `paths`, the paths that a model
        computes. The checks run before the body is read.
        """
        return app

    def wrap(self, app: ASGIApp, *, for_operators: bool) -> ASGIApp:  # noqa: ARG002
        """Wraps the HTTP application of clients, or of operators if `for_operators`. The wrapper
        receives requests before API keys are checked.
        """
        return app

    def traced(self, tracing: Tracing) -> Tracing:
        """Called once, at the start. Returns the tracing of requests."""
        return tracing

    def admitted(
        self,
        record: RequestRecord,  # noqa: ARG002
        context: CallContext | None,  # noqa: ARG002
    ) -> AbstractAsyncContextManager[None] | None:
        """A context for each gRPC call that a model computes, entered before the message is read,
        and for each turn of a session. `context` is None for a turn. The result is None if no
        context is needed.
        """
        return None

    def needs_room(self, headers: Mapping[str, str], caller: Caller) -> bool:  # noqa: ARG002
        """Whether a request needs a free place at an engine. Header names are in lower case. Raises
        InvalidArgument for an invalid header.
        """
        return True

    async def before_queue(
        self,
        generation: Generation,
        record: RequestRecord,  # noqa: ARG002
        api: str,  # noqa: ARG002
    ) -> Generation:
        """Called for a checked request before its sequences are queued. If the request's deadline
        passes, the call is cancelled. Returns the generation to deliver, which is this one or
        another one. Either of them may have its own `source`. `api` is the kind of answer, such as
        a chat completion.
        """
        return generation

    async def require_usable(self) -> None:
        """Called before the gateway listens. Raises SettingError if a setting is wrong."""

    async def start(self) -> None:
        """Starts the option's own servers. Raises Unavailable if an address cannot be bound."""

    async def run(self) -> None:
        """Runs until cancelled, from the start of the gateway."""
        await asyncio.Event().wait()

    def begin_drain(self, error: StepwellError) -> None:
        """Called when the gateway begins to drain. `error` is for what ends at once."""

    async def close(self, error: StepwellError) -> None:
        """Ends the option's remaining requests with an error after the gateway has drained."""

    async def stop(self, second_stop: asyncio.Event | None) -> None:
        """Stops the option's own servers, after the gateway's servers. They may serve for longer,
        until `second_stop` is set. None means that they stop at once.
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
        self, record: RequestRecord, context: CallContext | None = None
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
