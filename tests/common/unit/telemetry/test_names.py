"""Names of tracing spans and of their attributes."""

import re

import pytest

from services.common.telemetry import names

NAMES = {key: value for key, value in vars(names).items() if key.isupper()}


@pytest.mark.parametrize("prefix", ["SPAN_", "EVENT_", "ATTR_", "GENAI_"])
def test_names_of_a_kind_differ(prefix: str) -> None:
    values = [value for key, value in NAMES.items() if key.startswith(prefix)]
    assert values
    assert len(set(values)) == len(values)


def test_every_name_is_of_a_kind_and_well_formed() -> None:
    shapes = {
        "SPAN": r"[a-z]+(\.[a-z_]+)+",
        "EVENT": r"[a-z_]+",
        "WAIT": r"[a-z_]+",
        "ATTR": r"(stepwell|gen_ai|error|http|rpc|server)(\.[a-z_]+)+",
        "GENAI": r"stepwell|chat|text_completion|embeddings|score|(gen_ai|error)(\.[a-z0-9_]+)+",
    }
    for key, value in NAMES.items():
        shape = shapes.get(key.partition("_")[0])
        assert shape is not None, key
        assert re.fullmatch(shape, value), f"{key} is {value}"
