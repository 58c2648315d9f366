"""Formats the figures of a run as text."""

from collections.abc import Iterator

from services.cli.bench.adapters.loop_lag import GeneratorUsage
from services.cli.bench.core.percentiles import PERCENTILES, Distribution
from services.cli.bench.core.summary import Summary

_MAX_MESSAGE = 200
_NAMES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "e2el_ms": "end-to-end latency",
    "program_ms": "program",
    "schedule_lag_ms": "schedule lag",
}


def report(summary: Summary, usage: GeneratorUsage, lengths: str, *, is_open: bool) -> str:
    """Formats counts and throughput, a table of latencies, and the load generator's usage.
    `lengths` describes how prompt lengths were determined. `is_open` is whether arrival times were
    scheduled (an open loop). Only then the report shows how late requests were sent.
    """
    shown = [name for name in _NAMES if is_open or name != "schedule_lag_ms"]
    return "\n".join(
        [
            *_counts(summary, lengths),
            "",
            *_table({_NAMES[name]: getattr(summary, name) for name in shown}),
            "",
            _generator(usage),
        ]
    )


def _counts(summary: Summary, lengths: str) -> Iterator[str]:
    yield f"requests       {summary.completed:,} completed, {summary.failed:,} failed"
    for kind, count in summary.failures.items():
        message = " ".join(summary.failure_messages.get(kind, "").split())
        why = f": {message[:_MAX_MESSAGE]}" if message else ""
        yield f"               {count:,} failed: {kind}{why}"
    yield (
        f"duration       {summary.duration_seconds:.2f} s, up to "
        f"{summary.max_concurrent_requests:,} requests at once"
    )
    yield f"input tokens   {summary.total_input_tokens:,}{_cached(summary)}"
    yield f"prompt lengths {lengths}"
    how = "" if summary.output_tokens_by_usage else " events, as the server reports no usage,"
    yield (
        f"output tokens  {summary.total_output_tokens:,}{how} of {summary.total_output_len:,} "
        "asked for"
    )
    yield (
        f"throughput     {summary.request_throughput:.2f} requests/s, "
        f"{summary.output_throughput:,.1f} output tokens/s, "
        f"{summary.total_token_throughput:,.1f} tokens/s"
    )
    if summary.request_goodput is not None:
        yield f"goodput        {summary.request_goodput:.2f} requests/s"


def _cached(summary: Summary) -> str:
    if summary.total_cached_tokens is None or not summary.total_input_tokens:
        return ""
    share = 100 * summary.total_cached_tokens / summary.total_input_tokens
    return f", {summary.total_cached_tokens:,} of them cached ({share:.1f} %)"


def _table(figures: dict[str, Distribution | None]) -> Iterator[str]:
    heads = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    yield f"{'milliseconds':<22}" + "".join(f"{head:>11}" for head in heads)
    for name, values in figures.items():
        if values is not None:
            numbers = (values.mean, *values.percentiles.values(), values.max)
            yield f"{name:<22}" + "".join(f"{number:>11,.2f}" for number in numbers)


def _generator(usage: GeneratorUsage) -> str:
    lag = usage.loop_lag_ms
    lags = f", event loop lag {lag.percentiles[99]:.1f} ms p99, {lag.max:.1f} ms max" if lag else ""
    return f"generator      {100 * usage.processor_share:.0f} % of a processor{lags}"
