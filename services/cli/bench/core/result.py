"""Converts the results of a run to JSON values. docs/benchmarks.md has the schema."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from services.cli.bench.core.percentiles import Distribution
from services.cli.bench.core.record import RequestRecord
from services.cli.bench.core.summary import Summary

SCHEMA_VERSION = 1
"""The schema's version. It increases when a field is removed or changes its meaning."""


def summary_document(summary: Summary) -> dict[str, Any]:
    values = asdict(summary)
    for name in values:
        value = getattr(summary, name)
        if isinstance(value, Distribution):
            values[name] = distribution_document(value)
    return values


def distribution_document(values: Distribution | None) -> dict[str, float] | None:
    """Returns `count`, `mean`, `std`, `min`, `max`, and percentiles (`p50` and so on), if any."""
    if values is None:
        return None
    document: dict[str, float] = asdict(values)
    del document["percentiles"]
    for percent, value in values.percentiles.items():
        document[f"p{percent}"] = value
    return document


def request_rows(records: Iterable[RequestRecord]) -> list[dict[str, Any]]:
    """One row for each request, in order. Times are seconds after the start. Latencies are ms."""
    return [_row(record) for record in sorted(records, key=lambda record: record.number)]


def _row(record: RequestRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "session": record.session,
        "turn": record.turn,
        "warmup": record.is_warmup,
        "intended": _rounded(record.intended),
        "sent": _rounded(record.sent),
        "ended": _rounded(record.ended),
        "output_len": record.output_len,
        "input_tokens": record.num_input_tokens,
        "output_tokens": record.num_output_tokens,
        "cached_tokens": record.num_cached_tokens,
        "finish_reason": record.finish_reason,
        "failure": None if record.failure is None else record.failure.kind,
        "message": None if record.failure is None else record.failure.message,
        "ttft_ms": _millis(record.ttft),
        "tpot_ms": _millis(record.tpot),
        "e2el_ms": _millis(record.e2el),
        "itl_ms": [_millis(gap) for gap in record.itls],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _millis(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
