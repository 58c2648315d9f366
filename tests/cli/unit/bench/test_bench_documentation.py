"""docs/benchmarks.md lists exactly the flags of `stepwell bench` and the fields of its document."""

import re
from pathlib import Path

import pytest

from services.cli.bench.arguments import parse
from services.cli.bench.core.percentiles import distribution
from services.cli.bench.core.record import RequestRecord
from services.cli.bench.core.result import distribution_document, request_rows, summary_document
from services.cli.bench.core.summary import summarize

PAGE = (
    (Path(__file__).parents[4] / "docs" / "benchmarks.md")
    .read_text()
    .partition("## `stepwell bench`\n")[2]
)


def flags_of_the_help(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        parse(["--help"])
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]+", capsys.readouterr().out))


def test_the_flags_of_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", PAGE))
    assert len(named) > 20
    assert named - flags_of_the_help(capsys) == set()


def test_every_field_of_the_document_is_on_the_page() -> None:
    record = RequestRecord(0, 0, 0, is_warmup=False, intended=0.0, output_len=1)
    (row,) = request_rows([record])
    numbers = distribution_document(distribution([1.0])) or {}
    fields = {*summary_document(summarize([], {})), *row, *numbers}
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert fields - named == set()
