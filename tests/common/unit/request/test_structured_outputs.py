"""A request's structured outputs are validated before they are compiled to a grammar."""

import json
import time

import pytest

from services.common.errors import InvalidArgument
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind


def schema_of(num_values: int) -> StructuredOutputs:
    """A schema as a new str object, because each request has one of its own."""
    text = json.dumps({"enum": list(range(num_values))})
    return StructuredOutputs(StructuredOutputsKind.JSON, text)


def processor_seconds(wanted: StructuredOutputs) -> float:
    began = time.thread_time()
    wanted.validate()
    return time.thread_time() - began


def test_a_text_that_passed_is_not_read_again() -> None:
    first = processor_seconds(schema_of(9_000))
    again = [processor_seconds(schema_of(9_000)) for _ in range(9)]
    assert sorted(again)[4] < first / 3


def test_a_text_that_did_not_pass_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="json has 10002 values"):
            schema_of(10_000).validate()
