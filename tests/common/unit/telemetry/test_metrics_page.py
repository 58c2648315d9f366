"""The metrics page of the documentation has exactly the registry's metrics, with all their
properties.
"""

import re

from services.common.telemetry import names
from services.common.telemetry.metric_specs import SPECS
from services.common.telemetry.metric_specs.spec import Kind, Source
from tools.metrics_page import PAGE, TABLES, filled, labels

NAMED = {value for key, value in vars(names).items() if key.startswith("METRIC_")}


def test_the_page_is_what_the_registry_writes() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "run: python -m tools.metrics_page"


def test_every_metric_stands_in_one_table() -> None:
    rows = re.findall(r"^\| `((?:vllm:|stepwell_|http_|process_)\w+)` \|", PAGE.read_text(), re.M)
    assert sorted(rows) == sorted(spec.served_name for spec in SPECS.values())
    assert sum(map(len, TABLES.values())) == len(SPECS)


def test_the_registry_has_every_name() -> None:
    assert set(SPECS) == NAMED


def test_metrics_over_otlp_are_on_the_page() -> None:
    sent = {value for key, value in vars(names).items() if key.startswith("GENAI_SERVER_")}
    assert set(re.findall(r"^\| `(gen_ai\.server\.\S+)` \|", PAGE.read_text(), re.M)) == sent


def test_specs_are_well_formed() -> None:
    for spec in SPECS.values():
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
