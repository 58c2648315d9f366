"""The generated pages docs/settings.md, fields.md and metrics.md equal what the code declares."""

import re
from pathlib import Path

import pytest

from services.common.telemetry import names
from services.common.telemetry.metric_specs import SPECS
from services.common.telemetry.metric_specs.spec import Kind, Source
from tools.reference_pages import ALL_SPECS, LISTS, METRICS, PAGES, filled, labels

METRICS_PAGE = next(page for page in PAGES if page.name == "metrics.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_what_the_code_writes(page: Path) -> None:
    assert filled(page.read_text()) == page.read_text(), "run: python -m tools.reference_pages"


def test_every_list_stands_on_one_page() -> None:
    listed = [
        name for page in PAGES for name in re.findall(r"<!-- (?!end)(.+) -->", page.read_text())
    ]
    assert sorted(listed) == sorted(LISTS)


def test_every_metric_stands_in_one_list() -> None:
    rows = re.findall(r"^\* `((?:vllm:|stepwell_|http_|process_)\w+)` \(", METRICS_PAGE, re.M)
    assert sorted(rows) == sorted(spec.served_name for spec in ALL_SPECS.values())
    assert sum(map(len, METRICS.values())) == len(ALL_SPECS)


def test_every_metric_of_a_service_is_listed() -> None:
    assert {spec.name for spec in SPECS} <= ALL_SPECS.keys()


def test_metrics_over_otlp_are_on_the_page() -> None:
    sent = {value for key, value in vars(names).items() if key.startswith("GENAI_SERVER_")}
    assert set(re.findall(r"^\| `(gen_ai\.server\.\S+)` \|", METRICS_PAGE, re.M)) == sent


def test_specs_are_well_formed() -> None:
    for spec in ALL_SPECS.values():
        assert re.fullmatch("(vllm:|stepwell_|http_|process_)[a-z0-9_]+", spec.name)
        assert bool(spec.buckets) == (spec.kind is Kind.HISTOGRAM), spec.name
        assert len(labels(spec)) == len(set(labels(spec))), spec.name
        assert re.fullmatch(r"[A-Z1].*\.", spec.text), spec.name
        assert "|" not in spec.text, spec.name
        is_vllms = spec.name.startswith("vllm:")
        if is_vllms and spec.source is not Source.GATEWAY:
            assert labels(spec)[:2] == ("model_name", "engine"), spec.name
        if spec.unit == "seconds":
            assert "_seconds" in spec.name, spec.name
        if spec.unit == "bytes":
            assert spec.name.endswith("_bytes"), spec.name
