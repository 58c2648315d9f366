"""Builds the document of a run for `--json`. docs/benchmarks.md describes each field."""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from services.cli.bench.core.result import (
    SCHEMA_VERSION,
    distribution_document,
    request_rows,
    summary_document,
)
from services.cli.bench.core.summary import Summary
from services.cli.bench.run import Outcome


def document(outcome: Outcome, summary: Summary) -> dict[str, Any]:
    usage, vocabulary = outcome.usage, outcome.vocabulary
    return {
        "schema": "stepwell-bench",
        "schema_version": SCHEMA_VERSION,
        "stepwell_version": version("stepwell"),
        "started_at": outcome.started_at.isoformat(),
        "interrupted": outcome.is_interrupted,
        "server": {"url": outcome.url, "model": outcome.model, "left_out": outcome.left_out},
        "prompt_lengths": {
            "by": None if vocabulary is None else vocabulary.source,
            "tokens_per_word": None if vocabulary is None else vocabulary.tokens_per_word,
        },
        "settings": outcome.settings.public(),
        "summary": summary_document(summary),
        "generator": {
            **asdict(usage),
            "loop_lag_ms": distribution_document(usage.loop_lag_ms),
            "warning": usage.warning,
        },
        "requests": request_rows(outcome.records),
    }
