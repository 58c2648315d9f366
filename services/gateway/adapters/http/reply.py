"""Runs one generation inside one HTTP exchange, and ends it when the client goes away."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.common.errors import InternalError, StepwellError
from services.gateway.adapters.http.bodies import SamplingBody
from services.gateway.adapters.http.client_probe import BETWEEN_EVENTS
from services.gateway.adapters.http.connection import SEND_BODY
from services.gateway.adapters.http.deadline import each_until, until
from services.gateway.adapters.http.dialect import Dialect, event
from services.gateway.adapters.http.errors import error_body, error_response
from services.gateway.adapters.http.json_pieces import send_json
from services.gateway.adapters.observation import Observation, Observer
from services.gateway.core.choice import Piece
from services.gateway.core.gate import Gate
from services.gateway.core.generation import Answer, Generation
from services.gateway.core.inference import Inference
from services.gateway.core.request import ClientRequest

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would hold tokens back.
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A body that was read, with what its API makes of it."""

    body: SamplingBody
    dialect: type[Dialect]
    traceparent: str
    deadline: float | None
    to_request: Callable[[], Awaitable[ClientRequest]]


class GenerationReply(Response):
    """The answer to a completion of either kind, streamed or whole.

    The status is sent with the first item from the engine, so that a refusal by the scheduler has
    its own status also where a stream was asked for. When the client disconnects
    the work is cancelled and its sequences are aborted.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Exchange]],
        inference: Inference,
        gate: Gate,
        observer: Observer,
    ) -> None:
        """`read` reads the body; it is called once the gate is entered."""
        super().__init__()
        self._read = read
        self._inference = inference
        self._gate = gate
        self._observer = observer
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with ExitStack() as entered:
                with self._observer.counting_refusals():
                    entered.enter_context(self._gate.enter())
                    exchange = await self._read()
                await self._answer(exchange, scope, receive, send)
        except StepwellError as error:
            await error_response(error)(scope, receive, send)

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        async def tracked(message: Message) -> None:
            self._started = True
            await send(message)

        work = asyncio.create_task(self._work(exchange, scope, receive, tracked))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()

    async def _work(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._observer.observing(
                exchange.dialect.operation, exchange.traceparent
            ) as observation:
                await self._generate(exchange, observation, scope["state"], send)
        except StepwellError as error:
            await self._refuse(exchange.body.in_client_words(error), scope, receive, send)
        except Exception:
            logger.exception("defect while serving %s", exchange.dialect.operation)
            await self._refuse(InternalError("a defect here"), scope, receive, send)

    async def _generate(
        self, exchange: Exchange, observation: Observation, state: dict[str, Any], send: Send
    ) -> None:
        async with until(exchange.deadline):
            request = await exchange.to_request()
            generation = await self._inference.prepare(
                request, observation.traceparent, exchange.deadline
            )
        is_stream = bool(exchange.body.stream)
        if not is_stream:
            self._inference.check_num_logprobs(generation)
        inference = self._inference
        dialect = exchange.dialect(
            exchange.body, request, inference.model_name, inference.tokenizer
        )
        pieces = observation.watch(generation, inference.run(generation), stream=is_stream)
        if exchange.deadline is not None:
            pieces = each_until(exchange.deadline, pieces)
        async with aclosing(pieces) as source:
            if is_stream:
                await _stream(source, generation, dialect, state, send)
            else:
                await _whole(source, generation, dialect, send)

    async def _refuse(
        self, error: StepwellError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if self._started:
            body = event(error_body(error)) + b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": body})
        else:
            await error_response(error)(scope, receive, send)


async def _stream(
    pieces: AsyncIterator[list[Piece]],
    generation: Generation,
    dialect: Dialect,
    state: dict[str, Any],
    send: Send,
) -> None:
    send_body = state.get(SEND_BODY, send)
    opened = False
    async for added in pieces:
        choices = [] if opened else dialect.opening()
        for piece in added:
            choices += dialect.chunks(piece)
        if not opened:
            opened = True
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await send(start)
        if choices:
            state[BETWEEN_EVENTS] = False
            for number, events in enumerate(dialect.encode_chunks(choices, generation.usage)):
                if number:
                    await asyncio.sleep(0)
                await send_body({"type": "http.response.body", "body": events, "more_body": True})
            state[BETWEEN_EVENTS] = True
    last = dialect.closing(generation.usage())
    await send({"type": "http.response.body", "body": last})


async def _whole(
    pieces: AsyncIterator[list[Piece]], generation: Generation, dialect: Dialect, send: Send
) -> None:
    answers = [Answer() for _ in generation.choices]
    async for added in pieces:
        for piece in added:
            answers[piece.index].add(piece)
    await send_json(dialect.whole(answers, generation.usage()), send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
