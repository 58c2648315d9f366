"""Serves one request for generation: reads the body, runs the model, and sends the answer. If the
client disconnects, the work is cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from services.common.errors import InternalError, StepwellError
from services.gateway.adapters.http.exchange.asking_body import AskingBody, StreamedBody, renamed
from services.gateway.adapters.http.exchange.deadline import ending_at, until
from services.gateway.adapters.http.exchange.dialect import Api, ConvertedRequest, StreamingDialect
from services.gateway.adapters.http.exchange.errors import error_response
from services.gateway.adapters.http.exchange.event_stream import EventStream
from services.gateway.adapters.http.exchange.json_pieces import send_json
from services.gateway.adapters.http.exchange.program_fields import parent_header
from services.gateway.adapters.http.exchange.request_state import CLIENT
from services.gateway.adapters.http.exchange.while_connected import while_connected
from services.gateway.adapters.telemetry.observation import Observation, Observer
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.adapters.telemetry.request_times import metrics_body
from services.gateway.core.caller import Caller
from services.gateway.core.gate import Gate
from services.gateway.core.request.arrivals import Arrival
from services.gateway.core.request.delivery import Answers
from services.gateway.core.request.generation import Generation, best_answers
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest
from services.gateway.core.traces.timeline import Part

logger = logging.getLogger(__name__)


class RequestHooks(Protocol):
    """The methods of `Option` that are called for requests that run the model."""

    def needs_room(self, headers: Mapping[str, str], caller: Caller) -> bool: ...

    async def before_queue(
        self, generation: Generation, record: RequestRecord, api: str
    ) -> Generation: ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request's body, with the data that the route's handler made from the body and headers."""

    body: AskingBody
    api: Api[Any]
    caller: Caller
    record: RequestRecord
    deadline: float | None
    arrival: Arrival
    to_request: Callable[[], Awaitable[ClientRequest]]


@dataclass(eq=False)
class GenerationReply:
    """The answer to a request of any kind, streamed or whole.

    The answer's status is sent with the first output of the engine, or with the first keep-alive of
    a silent stream. Until then a refusal by the scheduler can set the status, even if the client
    requested a stream. When the client disconnects, the request's sequences are aborted, unless the
    answer is stored under an idempotency key.
    """

    read: Callable[[ExitStack], Awaitable[Exchange]]
    """Reads the body. It is called after the gate has counted the request. When the request ends,
    the stack that it receives is closed.
    """
    inference: Inference
    hooks: RequestHooks
    gate: Gate
    observer: Observer
    keep_alive: float
    """A keep-alive is sent after this number of seconds without an event. 0 disables keep-alives.
    """
    _broken_off: Callable[[StepwellError], bytes] | None = None
    """Returns the last events of a stream that an error ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with ExitStack() as entered:
                state = scope["state"]
                with self.observer.counting_refusals(state["record"], state["caller"]):
                    entered.enter_context(self.gate.enter())
                    exchange = await self.read(entered)
                with while_connected(state[CLIENT]):
                    await self._work(exchange, scope, receive, send)
        except StepwellError as error:
            await error_response(error, scope)(scope, receive, send)

    async def _work(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self.observer.observing(
                exchange.api.operation, exchange.record, exchange.caller
            ) as observation:
                await self._generate(exchange, observation, scope["state"], send)
        except StepwellError as error:
            names = {"program.parent_id": parent_header(exchange.record.headers)}
            error = exchange.body.in_client_words(renamed(error, names))
            await self._refuse(error, scope, receive, send)
        except Exception:
            logger.exception("defect while serving %s", exchange.api.operation)
            await self._refuse(
                InternalError(
                    "the request failed because of a defect of the server; its log has the cause"
                ),
                scope,
                receive,
                send,
            )

    async def _generate(
        self, exchange: Exchange, observation: Observation, state: dict[str, Any], send: Send
    ) -> None:
        inference, record, body = self.inference, exchange.record, exchange.body
        api, stream = exchange.api, None
        is_stream = isinstance(body, StreamedBody) and body.stream
        if is_stream and isinstance(api, type) and issubclass(api, StreamingDialect):
            stream = EventStream(api.keep_alive, state, send, record)
            self._broken_off = api.refused
        async with until(exchange.deadline):
            await self._until_limits(record, stream)
            record.enter(Part.TOKENIZE)
            request = await exchange.to_request()
            if request.output_form is not None:
                record.ignored_fields += request.output_form.unserved_fields
            record.enter(Part.PREPARE)
            generation = await inference.prepare(request, record.trace_headers, exchange.deadline)
            if stream is None:
                inference.check_num_logprobs(generation)
            generation = await self.hooks.before_queue(generation, record, api.id_prefix)
        record.enter(Part.PREPARE)
        adapter = generation.request.adapter
        name = inference.model_name if adapter is None else adapter.name
        arrived = generation.identity.arrival_unix_nanos
        dialect = api(
            ConvertedRequest(body, generation.request, arrived, name, inference.tokenizer)
        )
        if stream is not None and isinstance(dialect, StreamingDialect):
            stream.begin(generation, dialect)
            self._broken_off = dialect.broken_off
        sink = stream or Answers(generation)
        with observation.watching(generation, sink, stream=stream is not None) as watched:
            exchange.arrival.end()
            delivery = inference.delivery(generation, watched, stream=stream is not None)
            with ExitStack() as entered:
                entered.enter_context(ending_at(exchange.deadline, delivery.end))
                if stream is not None:
                    entered.enter_context(kept_alive(stream, self.keep_alive, delivery.wake))
                await delivery.run()
        if isinstance(sink, EventStream):
            await sink.close(metrics_body(record) if body.include_metrics else None)
        else:
            returned = best_answers(sink.answers, generation.request)
            answer = dialect.whole(returned, generation.usage())
            if body.include_metrics:
                answer["metrics"] = metrics_body(record)
            await send_json(answer, send)

    async def _until_limits(self, record: RequestRecord, stream: EventStream | None) -> None:
        """Waits for the first replica. Meanwhile a stream sends keep-alives."""
        if stream is None:
            await self.inference.until_limits(record.wait)
            return
        async with asyncio.TaskGroup() as tasks:
            with kept_alive(stream, self.keep_alive, lambda: tasks.create_task(stream.drain())):
                await self.inference.until_limits(record.wait)

    async def _refuse(
        self, error: StepwellError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record: RequestRecord = scope["state"]["record"]
        if record.status:  # the answer has begun
            assert self._broken_off is not None
            await send({"type": "http.response.body", "body": self._broken_off(error)})
        else:
            await error_response(error, scope)(scope, receive, send)


@contextmanager
def kept_alive(stream: EventStream, interval: float, wake: Callable[[], object]) -> Iterator[None]:
    """While the block runs, sends a keep-alive whenever nothing was sent for `interval` seconds. An
    interval of 0 disables this. Calls `wake` if the stream must be drained to send the keep-alive.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    stream.last_sent = loop.time()

    def tick() -> None:
        nonlocal timer
        silent = loop.time() - stream.last_sent
        if silent >= interval:
            silent = 0.0
            if stream.keep_alive():
                wake()
        timer = loop.call_later(interval - silent, tick)  # noqa: F821 - deleted at the end

    if interval:
        timer = loop.call_later(interval, tick)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        del tick  # breaks the function's reference cycle, which includes the stream
