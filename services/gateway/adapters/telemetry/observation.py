"""Observes requests without affecting them: measures latencies, counts tokens and outcomes, and
updates the RequestRecord.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from services.common.errors import InternalError, StepwellError
from services.gateway.adapters.telemetry.genai_metrics import GenAiMetrics
from services.gateway.adapters.telemetry.metrics import Metrics
from services.gateway.adapters.telemetry.request_record import CANCELLED, RequestRecord, is_failure
from services.gateway.adapters.telemetry.request_times import traces_of
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.delivery import Sink
from services.gateway.core.request.generation import Generation, Usage
from services.gateway.core.request.wait import Wait
from services.gateway.core.traces.timeline import Part


class Listener(Protocol):
    """Receives the outcome of each request, for example to count it for a tenant."""

    def answered(self, record: RequestRecord, usage: Usage) -> None:
        """Called at the end of a request that a replica had scheduled."""

    def refused(self, caller: Caller, reason: str) -> None:
        """Called when a request fails before a replica has scheduled it. `reason` is the code of
        the error.
        """


class Observation:
    """Measures the latencies and counts the tokens of one request."""

    def __init__(
        self,
        record: RequestRecord,
        metrics: Metrics,
        genai: GenAiMetrics,
        listeners: Sequence[Listener],
    ) -> None:
        self._listeners = listeners
        self._record = record
        self._metrics = metrics
        self._genai = genai
        self._started = record.timeline.began / 1e9
        self._first_token_seconds: float | None = None
        self._last_token: dict[int, float] = {}
        self._generation: Generation | None = None
        self._num_resumed_tokens = 0
        """Number of tokens to skip, which were counted for an earlier request."""
        self._is_refused = False
        self._end = "abort"
        """The finish reason that is counted for sequences without a finish reason of their own."""

    @contextmanager
    def watching(
        self, generation: Generation, sink: Sink, *, stream: bool
    ) -> Iterator["WatchedSink"]:
        """Provides, for a `with` block, a sink that measures when pieces of the answer arrive, and
        forwards them to `sink`.
        """
        self._generation = self._record.generation = generation
        self._num_resumed_tokens = generation.num_resumed_tokens
        self._record.is_stream = stream
        self._record.enter(Part.GENERATE)
        try:
            yield WatchedSink(sink, _saw_nothing if generation.is_replay else self._saw)
        finally:
            self._write()

    def _write(self) -> None:
        """Starts the timeline's part WRITE, in which the last output is sent, at the end of the
        last sequence.
        """
        timeline = self._record.timeline
        ends = [trace.timeline.ended or timeline.now() for trace in traces_of(self._generation)]
        began = timeline.stretches[-1].began
        timeline.enter(Part.WRITE, at=max([began, *ends]) if ends else None)

    def _saw(self, piece: Piece) -> None:
        num_tokens = len(piece.token_ids)
        if self._num_resumed_tokens:
            num_skipped = min(self._num_resumed_tokens, num_tokens)
            self._num_resumed_tokens -= num_skipped
            num_tokens -= num_skipped
        if num_tokens:
            now, last = time.perf_counter(), self._last_token.get(piece.index)
            self._last_token[piece.index] = now
            self._metrics.tokens.came(num_tokens, None if last is None else now - last)
            if self._first_token_seconds is None:
                self._first_token_seconds = now - self._started
                self._record.first_token = int(1e9 * now)
                self._metrics.time_to_first_token.observe(
                    self._first_token_seconds, self._exemplar()
                )
        if piece.finish_reason is not None:
            self._metrics.ended(piece.finish_reason.value)

    def completed(self) -> None:
        """Counts a request that has ended. Does nothing for a refused request, and for a replayed
        answer: an answer that was started, and is counted, for an earlier request with the same
        idempotency key. If the client disconnected while the request was queued, only the waits and
        the finish reason are counted.
        """
        seconds = time.perf_counter() - self._started
        generation = self._generation
        if generation is None or generation.is_replay or self._is_refused:
            return
        if generation.mailbox is not None:
            self._waited(generation.mailbox.waits)
        for _ in range(len(generation.choices) - len(generation.finish_reasons())):
            self._metrics.ended(self._end)
        if not generation.was_taken:
            return
        usage = generation.usage()
        if num_resumed := generation.num_resumed_tokens:
            num_generated = max(0, usage.num_generated_tokens - num_resumed)
            usage = replace(usage, num_generated_tokens=num_generated)
        self._metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        self._metrics.cached_tokens.inc(usage.num_cached_tokens)
        self._metrics.request_seconds.observe(seconds, self._exemplar())
        self._genai.completed(
            self._record.operation,
            seconds,
            self._first_token_seconds,
            usage,
            self._record.error_type or None,
        )
        for listener in self._listeners:
            listener.answered(self._record, usage)

    def _exemplar(self) -> dict[str, str] | None:
        return {"trace_id": self._record.trace_id} if self._record.origin.is_sampled else None

    def _waited(self, waits: Sequence[Wait]) -> None:
        for wait in waits:
            self._metrics.waited(wait.reason, wait.seconds)

    def failed(self, error_type: str, message: str, *, is_failure: bool) -> None:
        self._record.failed(error_type, message, is_failure=is_failure)
        if error_type != CANCELLED:
            self._end = "error"
            if self._generation is None or not self._generation.was_taken:
                self._is_refused = True
                _count_refusal(self._metrics, self._listeners, self._record, error_type)


class WatchedSink:
    """Calls `saw` with each piece of an answer, and then forwards the pieces to a sink."""

    __slots__ = ("_put", "_saw", "_sink", "drain")

    def __init__(self, sink: Sink, saw: Callable[[Piece], None]) -> None:
        self._sink = sink
        self._put, self.drain = sink.put, sink.drain
        self._saw = saw

    @property
    def is_ready(self) -> bool:
        return self._sink.is_ready

    def put(self, added: list[Piece]) -> None:
        for piece in added:
            self._saw(piece)
        self._put(added)


def _saw_nothing(_piece: Piece) -> None:
    """Used for replayed answers, whose pieces were counted when they were generated."""


class Observer:
    """Makes Observations of requests, and counts requests that are refused before that."""

    def __init__(self, metrics: Metrics, genai: GenAiMetrics, index: PrefixIndex) -> None:
        self._index = index
        self._metrics = metrics
        self._genai = genai
        self.listeners: list[Listener] = []

    def counting_refusals(
        self, record: RequestRecord, caller: Caller = ANYONE
    ) -> "CountedRefusals":
        """Counts an error of the `with` block as the refusal of a request that has no Observation
        yet. The error is raised again.
        """
        record.caller = caller
        return CountedRefusals(self, record)

    def refused(self, record: RequestRecord, error: StepwellError) -> None:
        reason = error.metric_reason
        _count_refusal(self._metrics, self.listeners, record, reason)
        record.failed(reason, error.message, is_failure=isinstance(error, InternalError))

    @contextmanager
    def observing(
        self, operation: str, record: RequestRecord, caller: Caller = ANYONE
    ) -> Iterator[Observation]:
        """Observes a request while the `with` block runs. An error is counted and raised again."""
        record.operation, record.caller = operation, caller
        record.directory_state = self._index.state.value
        observation = Observation(record, self._metrics, self._genai, self.listeners)
        self._metrics.requests_in_flight.inc()
        try:
            yield observation
        except StepwellError as error:
            observation.failed(error.metric_reason, error.message, is_failure=is_failure(error))
            raise
        except (asyncio.CancelledError, GeneratorExit):
            observation.failed(
                CANCELLED, "the client disconnected or cancelled the request", is_failure=False
            )
            raise
        except Exception as error:
            observation.failed(type(error).__name__, "a defect", is_failure=True)
            raise
        finally:
            observation.completed()
            self._metrics.requests_in_flight.dec()


class CountedRefusals:
    """The context manager of Observer.counting_refusals. It is a class, because a generator would
    be slower, and each request uses several of them.
    """

    __slots__ = ("_observer", "_record")

    def __init__(self, observer: Observer, record: RequestRecord) -> None:
        self._observer = observer
        self._record = record

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, StepwellError):
            self._observer.refused(self._record, error)


def _count_refusal(
    metrics: Metrics, listeners: Sequence[Listener], record: RequestRecord, reason: str
) -> None:
    metrics.refused(reason)
    for listener in listeners:
        listener.refused(record.caller, reason)
