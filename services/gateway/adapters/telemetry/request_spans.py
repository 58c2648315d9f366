"""The spans of a request at the gateway, made from its RequestRecord when it has ended, or while it
runs.

The root span, such as `chat tiny` for the model tiny, lasts from the call's arrival to the end of
its answer. Its child spans are the consecutive parts of the call's time. There are no gaps between
parts, so the sum of their durations is the call's duration. Each sequence (the prompt and one
answer) has a quota of spans. If a sequence's timeline has more parts than the quota, the sequence's
last span extends to the sequence's end.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from opentelemetry.trace import SpanContext, SpanKind

from services.common.telemetry import names
from services.common.telemetry.time_parts import time_attributes
from services.common.telemetry.trace_context import new_span_id, numbered_span_id
from services.common.telemetry.trace_headers import baggage_attributes
from services.common.telemetry.tracing import Attributes, Tracing
from services.gateway.adapters.telemetry.request_record import KeptFor, RequestRecord
from services.gateway.adapters.telemetry.request_times import engine_times, parts_of, traces_of
from services.gateway.adapters.telemetry.span_status import span_status, status_attributes
from services.gateway.core.request.generation import Generation
from services.gateway.core.traces.sequence_trace import (
    EngineTimes,
    SequenceTrace,
    engine_span_number,
)
from services.gateway.core.traces.time_parts import EngineParts
from services.gateway.core.traces.timeline import Part, Stretch, Timeline

MAX_SPANS = 1152
"""Limit on the number of spans of one request, divided equally among its sequences. With 256
sequences, the quota still suffices for each sequence that is sent to only one replica.
"""
_MAX_STOPS, _MAX_CHARACTERS = 16, 256
"""Limits on the number of stop strings in a span, and on the characters of each text from a
client.
"""

Values = dict[str, str | int | float | bool | Sequence[str]]


class RequestSpans:
    def __init__(
        self,
        record: RequestRecord,
        tracing: Tracing,
        model_name: str,
        so_far: EngineParts | None = None,
        now: int | None = None,
    ) -> None:
        """`so_far` has the time parts that replicas have reported for unfinished sequences. Parts
        of the timeline that have not ended are cut at `now`, or at the current time if it is None.
        """
        self._record = record
        self._so_far = so_far
        self._tracing = tracing
        self._model_name = model_name
        self._root = record.origin.context(record.root_span_id)
        self._num_left = MAX_SPANS - len(record.timeline.stretches) - 1
        self._is_running = record.timeline.ended is None
        self._end = record.timeline.ended or now or record.timeline.now()
        self.num_dropped = record.timeline.num_dropped

    def make(self, kept_for: KeptFor | None) -> None:
        """Exports all spans. `kept_for` is the reason for tracing the request, or None for a
        running request. An attribute marks spans of parts that have not ended.
        """
        record = self._record
        for stretch, end in stretches_of(record.timeline, self._end):
            is_generate = stretch.part is Part.GENERATE
            span_id = record.generate_span_id if is_generate else new_span_id()
            context = record.origin.context(span_id)
            details = self._details(stretch, record.timeline)
            if is_generate:
                self._make_sequences(context, stretch.began, end)
            elif stretch.part is Part.WRITE and record.write_nanos:
                details[names.ATTR_WRITE_SECONDS] = record.write_nanos / 1e9
            self._make(stretch.part.value, context, self._root, stretch.began, end, details)
        self.make_root(kept_for)

    def _details(self, stretch: Stretch, timeline: Timeline) -> Values:
        details: Values = dict(stretch.details or {})
        if self._is_running and timeline.ended is None and stretch is timeline.stretches[-1]:
            details[names.ATTR_IS_RUNNING] = True
        return details

    def _make_sequences(self, parent: SpanContext, began: int, ended: int) -> None:
        traces = traces_of(self._record.generation)
        for num_done, trace in enumerate(traces):
            share = self._num_left // (len(traces) - num_done)
            self._num_left -= self._make_sequence(trace, share, parent, began, ended)

    def _make_sequence(
        self, trace: SequenceTrace, share: int, parent: SpanContext, began: int, ended: int
    ) -> int:
        """Makes at most `share` spans of a sequence. Returns the number of spans made."""
        stretches, num_sent, num_ways = list(stretches_of(trace.timeline, self._end)), 0, 0
        kept = stretches[:share]
        num_left_out = len(stretches) - len(kept)
        self.num_dropped += num_left_out + trace.timeline.num_dropped
        if num_left_out and kept:
            kept[-1] = kept[-1][0], stretches[-1][1]
        for stretch, end in kept:
            is_engine = stretch.part is Part.ENGINE
            num_sent += is_engine
            details = self._sequence_details(trace, stretch)
            if num_left_out and stretch is kept[-1][0]:
                details[names.ATTR_NUM_DROPPED_SPANS] = num_left_out
            span_id = (
                numbered_span_id(parent.span_id, engine_span_number(trace.index, num_sent))
                if is_engine
                else new_span_id()
            )
            context = self._record.origin.context(span_id)
            first, last = max(began, stretch.began), min(ended, end)
            kind = SpanKind.CLIENT if is_engine else SpanKind.INTERNAL
            self._make(stretch.part.value, context, parent, first, last, details, kind)
            if is_engine and num_sent == trace.num_sent and not num_left_out:
                num_ways = self._make_ways(trace.times, share - len(kept), context, first, last)
        return len(kept) + num_ways

    def _sequence_details(self, trace: SequenceTrace, stretch: Stretch) -> Values:
        details = self._details(stretch, trace.timeline)
        details[names.ATTR_SEQUENCE] = trace.index
        if stretch.outcome:
            details[names.ATTR_OUTCOME] = stretch.outcome
        return details

    def _make_ways(
        self, times: EngineTimes | None, num_left: int, parent: SpanContext, began: int, ended: int
    ) -> int:
        """Makes the spans of the transfers to a replica and back. Returns the number of spans made,
        2 or 0.

        The total duration of both transfers is the time from `began` to `ended` minus the time that
        the replica reported. How much of it belongs to the first transfer is computed from the
        replica's clock, so it may be wrong if the clocks differ.
        """
        if times is None or times.queued_unix_nanos is None:
            return 0
        if num_left < 2:
            self.num_dropped += 2
            return 0
        left = max(0, ended - began - times.nanos)
        arrived = times.queued_unix_nanos - self._record.unix_offset
        queued = began + min(max(0, arrived - began), left)
        for name, first, last in (
            (names.SPAN_GATEWAY_SEND, began, queued),
            (names.SPAN_GATEWAY_RECEIVE, min(queued + times.nanos, ended), ended),
        ):
            self._make(name, self._record.origin.context(new_span_id()), parent, first, last, {})
        return 2

    def _make(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext,
        began: int,
        ended: int,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        offset = self._record.unix_offset
        self._tracing.record(
            name,
            context,
            parent,
            began + offset,
            max(began, ended) + offset,
            attributes=attributes,
            kind=kind,
        )

    def make_root(self, kept_for: KeptFor | None) -> None:
        record = self._record
        self._tracing.record(
            f"{record.operation} {self._model_name}",
            self._root,
            record.origin.parent,
            record.timeline.began + record.unix_offset,
            self._end + record.unix_offset,
            attributes=self._root_attributes(kept_for),
            kind=SpanKind.SERVER,
            status=span_status(record),
        )

    def _root_attributes(self, kept_for: KeptFor | None) -> Values:
        record = self._record
        attributes: Values = {
            names.GENAI_OPERATION_NAME: record.operation,
            names.GENAI_PROVIDER_NAME: names.GENAI_PROVIDER,
            names.GENAI_REQUEST_MODEL: self._model_name,
            names.GENAI_RESPONSE_MODEL: self._model_name,
            names.ATTR_REQUEST_ID: record.request_id,
        }
        if kept_for is None:
            attributes[names.ATTR_IS_RUNNING] = True
        else:
            attributes |= {
                names.GENAI_LATENCY_E2E: record.seconds,
                names.ATTR_KEPT_FOR: kept_for.value,
            }
        attributes |= time_attributes(parts_of(record, self._end, self._so_far))
        if record.directory_state:
            attributes[names.ATTR_DIRECTORY_STATE] = record.directory_state
        if record.caller.caller_id:
            attributes[names.ATTR_TENANT] = record.caller.caller_id
        attributes |= status_attributes(record)
        if self.num_dropped:
            attributes[names.ATTR_NUM_DROPPED_SPANS] = self.num_dropped
        attributes |= baggage_attributes(record.baggage)
        if record.generation is not None:
            attributes |= _asked(record.generation, record.is_stream)
            attributes |= _answered(record, record.generation)
        return attributes


def stretches_of(timeline: Timeline, until: int) -> Iterator[tuple[Stretch, int]]:
    """Yields each part of the timeline with its end. If the timeline has not ended, the last part
    ends at `until`.
    """
    yield from ((one, following.began) for one, following in pairwise(timeline.stretches))
    yield timeline.stretches[-1], timeline.ended or until


def _asked(generation: Generation, is_stream: bool) -> Values:
    request, sampling = generation.request, generation.sequences[0].sampling
    attributes: Values = {
        names.GENAI_RESPONSE_ID: request.request_id,
        names.GENAI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GENAI_REQUEST_TOP_P: sampling.top_p,
        names.GENAI_REQUEST_TOP_K: sampling.top_k,
        names.GENAI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.GENAI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.GENAI_REQUEST_CHOICE_COUNT: request.n,
        names.GENAI_REQUEST_STREAM: is_stream,
    }
    if generation.is_replay:
        attributes[names.ATTR_IS_REPLAY] = True
    if sampling.max_tokens is not None:
        attributes[names.GENAI_REQUEST_MAX_TOKENS] = sampling.max_tokens
    if (seed := request.sampling.seed) is not None:
        # A span's integers have 64 bits with a sign, so the seed is as the client wrote it.
        attributes[names.GENAI_REQUEST_SEED] = seed if seed < 2**63 else seed - 2**64
    if request.stop:
        stops = [text[:_MAX_CHARACTERS] for text in request.stop[:_MAX_STOPS]]
        attributes[names.GENAI_REQUEST_STOP_SEQUENCES] = stops
    return attributes


def _answered(record: RequestRecord, generation: Generation) -> Values:
    """Returns the attributes of a request that was sent to replicas: its route, tokens and
    times.
    """
    mailbox = generation.mailbox
    attributes: Values = {}
    if mailbox is None or generation.is_replay:
        return attributes
    if mailbox.routes:
        attributes |= mailbox.routes[-1].details()
        attributes[names.ATTR_ROUTING_NUM_SENT] = len(mailbox.routes)
    if not generation.was_taken:
        return attributes
    usage = generation.usage()
    attributes |= {
        names.GENAI_RESPONSE_FINISH_REASONS: generation.finish_reasons(),
        names.GENAI_USAGE_INPUT_TOKENS: usage.num_prompt_tokens,
        names.GENAI_USAGE_OUTPUT_TOKENS: usage.num_generated_tokens,
        names.GENAI_USAGE_CACHE_READ_INPUT_TOKENS: usage.num_cached_tokens,
    }
    if record.first_token is not None:
        first = (record.first_token - record.timeline.began) / 1e9
        attributes[names.GENAI_RESPONSE_TIME_TO_FIRST_CHUNK] = first
        attributes[names.GENAI_LATENCY_TIME_TO_FIRST_TOKEN] = first
    attributes[names.ATTR_WAIT_SECONDS] = max(
        (trace.timeline.nanos_of(Part.WAIT, Part.RESUBMIT) / 1e9 for trace in mailbox.traces),
        default=0.0,
    )
    times = engine_times(mailbox.traces)
    if times is not None:
        attributes |= {
            names.GENAI_LATENCY_QUEUE: times.queue,
            names.GENAI_LATENCY_PREFILL: times.prefill,
            names.GENAI_LATENCY_DECODE: times.decode,
            names.GENAI_LATENCY_INFERENCE: times.inference,
        }
    return attributes
