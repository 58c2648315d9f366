"""The access log: one line per call, without the content of requests and answers."""

import logging

from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.adapters.telemetry.request_times import engine_times, traces_of
from services.gateway.core.traces.timeline import Part

logger = logging.getLogger(__name__)

_PROBES = frozenset(("/health", "/ping", "/load", "/version", "/metrics"))
"""Paths that monitors request every few seconds. Requests to them are logged at level DEBUG."""


def log_access(record: RequestRecord) -> None:
    call = record.call
    level = logging.DEBUG if call.path in _PROBES else logging.INFO
    if logger.isEnabledFor(level):
        line = f"{call.method} {call.path} {record.status}"
        logger.log(level, line, extra={**_fields(record), **record.log_fields})


def _fields(record: RequestRecord) -> dict[str, object]:
    call = record.call
    fields: dict[str, object] = {
        "protocol": call.protocol,
        "client": call.client,
        "tenant": record.caller.caller_id,
        "seconds": round(record.seconds, 6),
        "error": record.error_type,
    }
    if record.operation:
        fields |= _generation_fields(record)
    return {name: value for name, value in fields.items() if value != ""}


def _generation_fields(record: RequestRecord) -> dict[str, object]:
    generation = record.generation
    if generation is None or not generation.was_taken:
        return {}
    usage, traces = generation.usage(), traces_of(generation)
    fields: dict[str, object] = {
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_cached_tokens": usage.num_cached_tokens,
        "num_output_tokens": usage.num_generated_tokens,
        "finish_reason": ",".join(dict.fromkeys(generation.finish_reasons())),
    }
    if record.first_token is not None:
        first = (record.first_token - record.timeline.began) / 1e9
        fields["time_to_first_token"] = round(first, 6)
    wait = max((t.timeline.nanos_of(Part.WAIT, Part.RESUBMIT) for t in traces), default=0)
    if wait:
        fields["wait_seconds"] = round(wait / 1e9, 6)
    if (times := engine_times(traces)) is not None:
        fields["queue_seconds"] = round(times.queue, 6)
        fields["inference_seconds"] = round(times.inference, 6)
    if traces:
        replicas = {address: None for trace in traces for address in trace.stays}
        fields["replica"] = ",".join(replicas)
        fields["num_sent"] = sum(trace.num_sent for trace in traces)
    return fields
