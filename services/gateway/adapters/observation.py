"""Watches a request from outside: its span, its latencies, its counts."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from services.common import names
from services.common.errors import StepwellError
from services.common.telemetry import Tracing, traceparent_of
from services.gateway.adapters.metrics import Metrics
from services.gateway.core.choice import Piece
from services.gateway.core.generation import Generation
from services.gateway.core.prefix_index import PrefixIndex
from services.gateway.core.route import Route

CANCELLED = "cancelled"


class Observation:
    def __init__(self, span: Span, metrics: Metrics) -> None:
        self.traceparent = traceparent_of(span)
        """What goes along with the request; empty when it is not sampled."""
        self._span = span
        self._metrics = metrics
        self._started = time.perf_counter()
        self._first_token_seconds: float | None = None
        self._last_token: dict[int, float] = {}
        self._generation: Generation | None = None
        self._is_refused = False
        # How sequences ended that were not finished.
        self._end = "abort"

    async def watch(
        self, generation: Generation, pieces: AsyncGenerator[list[Piece], None], *, stream: bool
    ) -> AsyncGenerator[list[Piece], None]:
        """Passes the pieces on, and takes their times."""
        self._generation = generation
        if self._span.is_recording():
            self._span.set_attributes(_request_attributes(generation, stream))
        async with aclosing(pieces) as source:
            async for added in source:
                now = time.perf_counter()
                for piece in added:
                    self._saw(piece, now)
                yield added

    def _saw(self, piece: Piece, now: float) -> None:
        num_tokens = len(piece.token_ids)
        if num_tokens:
            self._metrics.generation_tokens.inc(num_tokens)
            last = self._last_token.get(piece.index)
            if last is not None:
                for _ in range(num_tokens):
                    self._metrics.inter_token_latency.observe((now - last) / num_tokens)
            elif self._first_token_seconds is None:
                self._first_token_seconds = now - self._started
                self._metrics.time_to_first_token.observe(self._first_token_seconds)
            self._last_token[piece.index] = now
        if piece.finish_reason is not None:
            self._metrics.ended(piece.finish_reason.value)

    def completed(self) -> None:
        """The request is over, whatever way.

        One that was refused has no tokens, no end and no latency to count; one whose client left
        the queue has ended, and no more.
        """
        seconds = time.perf_counter() - self._started
        generation = self._generation
        if generation is None or self._is_refused:
            return
        if self._span.is_recording() and generation.mailbox is not None:
            self._span.set_attributes(_routing_attributes(generation.mailbox.routes))
        for _ in range(len(generation.choices) - len(generation.finish_reasons())):
            self._metrics.ended(self._end)
        if not generation.was_taken:
            return
        usage = generation.usage()
        self._metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        self._metrics.cached_tokens.inc(usage.num_cached_tokens)
        self._metrics.e2e_latency.observe(seconds)
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    names.GENAI_RESPONSE_FINISH_REASONS: generation.finish_reasons(),
                    names.GENAI_USAGE_INPUT_TOKENS: usage.num_prompt_tokens,
                    names.GENAI_USAGE_OUTPUT_TOKENS: usage.num_generated_tokens,
                    names.GENAI_USAGE_CACHE_READ_INPUT_TOKENS: usage.num_cached_tokens,
                    names.GENAI_LATENCY_E2E: seconds,
                }
            )
            if self._first_token_seconds is not None:
                first = self._first_token_seconds
                self._span.set_attribute(names.GENAI_RESPONSE_TIME_TO_FIRST_CHUNK, first)
                self._span.set_attribute(names.GENAI_LATENCY_TIME_TO_FIRST_TOKEN, first)

    def failed(self, error_type: str, message: str) -> None:
        self._span.set_attribute(names.GENAI_ERROR_TYPE, error_type)
        self._span.set_status(Status(StatusCode.ERROR, message))
        if error_type != CANCELLED:
            self._end = "error"
            if self._generation is None or not self._generation.was_taken:
                self._is_refused = True
                self._metrics.refused(error_type)


class Observer:
    def __init__(
        self, model_name: str, tracing: Tracing, metrics: Metrics, index: PrefixIndex
    ) -> None:
        self._model_name = model_name
        self._index = index
        self._tracing = tracing
        self._metrics = metrics

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts what is refused before it can be watched. Errors pass through."""
        try:
            yield
        except StepwellError as error:
            self._metrics.refused(error.error_reason.lower())
            raise

    @contextmanager
    def observing(self, operation: str, traceparent: str) -> Iterator[Observation]:
        """A server span around a request, and its metrics. Errors pass through."""
        span = self._tracing.start(
            f"{operation} {self._model_name}",
            traceparent,
            kind=SpanKind.SERVER,
            attributes={
                names.GENAI_OPERATION_NAME: operation,
                names.GENAI_PROVIDER_NAME: names.GENAI_PROVIDER,
                names.GENAI_REQUEST_MODEL: self._model_name,
                names.GENAI_RESPONSE_MODEL: self._model_name,
                names.ATTR_DIRECTORY_STATE: self._index.state.value,
            },
        )
        observation = Observation(span, self._metrics)
        self._metrics.requests_in_flight.inc()
        try:
            yield observation
        except StepwellError as error:
            observation.failed(error.error_reason.lower(), error.message)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            observation.failed(CANCELLED, "the client went away")
            raise
        except Exception as error:
            observation.failed(type(error).__name__, "a defect")
            raise
        finally:
            observation.completed()
            self._metrics.requests_in_flight.dec()
            span.end()


def _routing_attributes(routes: Sequence[Route]) -> dict[str, str | int | float]:
    """The last route, since the answer came by it, and how many there were."""
    if not routes:
        return {}
    last = routes[-1]
    attributes: dict[str, str | int | float] = {
        names.ATTR_ROUTING_REPLICA: last.address,
        names.ATTR_ROUTING_REASON: last.reason.value,
        names.ATTR_ROUTING_NUM_CANDIDATES: last.num_candidates,
        names.ATTR_ROUTING_NUM_CACHED_TOKENS: last.num_cached_tokens,
        names.ATTR_ROUTING_NUM_SENT: len(routes),
    }
    if last.cost_seconds is not None:
        attributes[names.ATTR_ROUTING_COST_SECONDS] = last.cost_seconds
    return attributes


def _request_attributes(
    generation: Generation, stream: bool
) -> dict[str, str | int | float | bool | list[str]]:
    request, sampling = generation.request, generation.sequences[0].sampling
    attributes: dict[str, str | int | float | bool | list[str]] = {
        names.GENAI_RESPONSE_ID: request.request_id,
        names.GENAI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GENAI_REQUEST_TOP_P: sampling.top_p,
        names.GENAI_REQUEST_TOP_K: sampling.top_k,
        names.GENAI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.GENAI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.GENAI_REQUEST_CHOICE_COUNT: request.n,
        names.GENAI_REQUEST_STREAM: stream,
    }
    if sampling.max_tokens is not None:
        attributes[names.GENAI_REQUEST_MAX_TOKENS] = sampling.max_tokens
    if request.sampling.seed is not None:
        attributes[names.GENAI_REQUEST_SEED] = request.sampling.seed
    if request.stop:
        attributes[names.GENAI_REQUEST_STOP_SEQUENCES] = list(request.stop)
    return attributes
