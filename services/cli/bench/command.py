"""The command `stepwell bench`: parses flags, runs the load, and writes the results."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop

from services.cli.bench.adapters.address import Address
from services.cli.bench.adapters.report import report
from services.cli.bench.adapters.tokenizers import local_counter, server_counter
from services.cli.bench.arguments import parse
from services.cli.bench.core.result import (
    SCHEMA_VERSION,
    distribution_document,
    request_rows,
    summary_document,
)
from services.cli.bench.core.summary import Summary, summarize
from services.cli.bench.core.vocabulary import Vocabulary, counted_vocabulary
from services.cli.bench.loads import MAX_TOKENS
from services.cli.bench.run import BenchRun, Outcome
from services.cli.bench.settings import BenchSettings
from services.cli.client import Client
from services.cli.errors import CommandError, require_directory
from services.cli.plotting import require_matplotlib

_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    settings, output = parse(argv)
    if output.plot is not None:
        require_matplotlib()
    for path in (output.json, output.plot):
        require_directory(path)
    outcome = _measure(settings)
    summary = summarize(outcome.records, settings.goodput)
    print(outcome.headline)
    text = report(summary, outcome.usage, outcome.lengths_text, is_open=settings.is_open)
    print(text, flush=True)
    if outcome.usage.warning is not None:
        _warn(outcome.usage.warning)
    if output.json is not None:
        _write_json(document(outcome, summary), output.json)
    if output.plot is not None and summary.completed:
        from services.cli.bench.adapters.plot import draw  # noqa: PLC0415 - needs an extra

        draw(outcome.records, summary, outcome.headline, output.plot)
    if outcome.is_interrupted:
        return _INTERRUPTED
    return int(not summary.completed or summary.failed > 0)


def _measure(settings: BenchSettings) -> Outcome:
    address = Address.parse(settings.url)
    with Client(address.url, settings.api_key, settings.tls) as client:
        model = settings.model or client.default_model()
        vocabulary = _vocabulary(settings, client, model)
        run = BenchRun(settings, address, model, vocabulary, _warn)
        if settings.programs is not None:
            run.max_tokens = client.max_model_len(model) or MAX_TOKENS
    return uvloop.run(run.run())


def _vocabulary(settings: BenchSettings, client: Client, model: str) -> Vocabulary | None:
    """Words with known token counts. None if no words are needed or tokens cannot be counted."""
    if settings.dataset is not None:
        return None
    if settings.tokenizer is not None:
        count, source = local_counter(settings.tokenizer), str(settings.tokenizer)
    else:
        found = server_counter(client, model)
        if found is None:
            return None
        count, source = found, "the server's /tokenize"
    return counted_vocabulary(count, source)


def _write_json(value: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(value, allow_nan=False) + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


def _warn(sentence: str) -> None:
    print(f"stepwell bench: {sentence}", file=sys.stderr, flush=True)


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
