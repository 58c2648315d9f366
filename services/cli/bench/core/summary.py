"""The metrics of a run.

They are defined as in `vllm bench serve`, with two differences. Latencies start at the time when a
request should be sent (the intended time). Only an event with output counts as a token (as in
guidellm), because some servers send an empty first event before they have computed anything.

* TTFT: from the intended time to the first event with output.
* TPOT: from the first event with output to the end, divided by the number of output tokens after
  the first token. Only requests with at least two tokens have a TPOT (guidellm calls it the
  inter-token latency).
* ITL: the gaps between consecutive events with output, over all requests. Several tokens that
  arrive in one event add only one gap.
* E2EL: from the intended time to the last event of the response.
* Program: from the intended time of a session's first request to the end of its last response, if
  sessions have several turns.
* Throughput: successful requests, divided by the time from the first measured request's intended
  time to the end of the last response.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.cli.bench.core.percentiles import Distribution, distribution
from services.cli.bench.core.record import RequestRecord

OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_objective(text: str) -> tuple[str, float]:
    """Parses `ttft:200` into metric and milliseconds. `e2e` means `e2el`. Raises ValueError."""
    name, _, value = text.partition(":")
    name = "e2el" if name == "e2e" else name
    try:
        millis = float(value)
    except ValueError:
        millis = 0.0
    if name not in OBJECTIVES or not 0 < millis < math.inf:
        raise ValueError(
            f"must be one of {', '.join(OBJECTIVES)} with milliseconds, such as ttft:200, "
            f"not {text!r}"
        )
    return name, millis


def is_good(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether a request succeeded and met every objective. A metric without a value, such as the
    TPOT of an output of one token, meets its objective.
    """
    if not record.is_ok:
        return False
    figures = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
    return all((figures[name] or 0.0) * 1000 <= millis for name, millis in objectives.items())


_MILLIS = 1000.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts, rates per second, and distributions in ms (or None), all without the warm-up."""

    completed: int
    failed: int
    failures: dict[str, int]
    failure_messages: dict[str, str]
    """Maps a kind of failure to its first nonempty message."""
    duration_seconds: float
    total_input_tokens: int
    total_output_tokens: int
    total_output_len: int
    """The sum of the output lengths that the completed requests specified."""
    total_cached_tokens: int | None
    """Number of prompt tokens found in a prefix cache. None if the server reports none."""
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    """Requests per second that met all objectives. None without objectives."""
    max_concurrent_requests: int
    output_tokens_by_usage: bool
    """Whether the server's `usage` counts output tokens. Otherwise events with output are counted.
    """
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    program_ms: Distribution | None
    """Durations of sessions of several turns (programs). None if all sessions have one turn."""
    schedule_lag_ms: Distribution | None


def summarize(records: Iterable[RequestRecord], objectives: Mapping[str, float]) -> Summary:
    """Computes the metrics of all requests except the warm-up."""
    measured = [record for record in records if not record.is_warmup]
    done = [record for record in measured if record.is_ok]
    failed = [record.failure for record in measured if record.failure is not None]
    failures = Counter(failure.kind for failure in failed)
    ends = [record.ended for record in done if record.ended is not None]
    seconds = max(ends) - min(record.intended for record in measured) if ends else 0.0
    num_input = sum(record.num_input_tokens or 0 for record in done)
    num_output = sum(record.output_tokens for record in done)
    cached = [r.num_cached_tokens for r in done if r.num_cached_tokens is not None]
    num_good = sum(is_good(record, objectives) for record in done)

    def per_second(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return Summary(
        completed=len(done),
        failed=len(measured) - len(done),
        failures=dict(failures.most_common()),
        failure_messages={one.kind: one.message for one in reversed(failed) if one.message},
        duration_seconds=seconds,
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        total_output_len=sum(record.output_len for record in done),
        total_cached_tokens=sum(cached) if cached else None,
        request_throughput=per_second(len(done)),
        output_throughput=per_second(num_output),
        total_token_throughput=per_second(num_input + num_output),
        request_goodput=per_second(num_good) if objectives else None,
        max_concurrent_requests=_most_at_once(done),
        output_tokens_by_usage=all(record.num_output_tokens is not None for record in done),
        ttft_ms=_of(done, lambda record: record.ttft),
        tpot_ms=_of(done, lambda record: record.tpot),
        itl_ms=distribution([gap * _MILLIS for record in done for gap in record.itls]),
        e2el_ms=_of(done, lambda record: record.e2el),
        program_ms=_programs(done),
        schedule_lag_ms=_of(measured, lambda record: record.schedule_lag),
    )


def _programs(done: Sequence[RequestRecord]) -> Distribution | None:
    spans: dict[int, tuple[float, float, int]] = {}
    for record in done:
        begin, end, num_turns = spans.get(record.session, (record.intended, 0.0, 0))
        end = max(end, record.ended or 0.0)
        spans[record.session] = min(begin, record.intended), end, num_turns + 1
    if all(num_turns == 1 for _, _, num_turns in spans.values()):
        return None
    return distribution([(end - begin) * _MILLIS for begin, end, _ in spans.values()])


def _of(
    records: Sequence[RequestRecord], figure: Callable[[RequestRecord], float | None]
) -> Distribution | None:
    values = (figure(record) for record in records)
    return distribution([value * _MILLIS for value in values if value is not None])


def _most_at_once(done: Sequence[RequestRecord]) -> int:
    changes = [(record.sent or record.intended, 1) for record in done]
    changes += [(record.ended, -1) for record in done if record.ended is not None]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
