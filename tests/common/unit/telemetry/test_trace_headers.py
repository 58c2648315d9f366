"""W3C baggage is converted to attributes of spans."""

from hypothesis import given
from hypothesis import strategies as st

from services.common.telemetry.trace_headers import baggage_attributes, passed_on


def test_entries_are_attributes_without_their_properties() -> None:
    assert baggage_attributes("a=1,b = two%20words ;secret=x;y, =no,none,c=") == {
        "baggage.a": "1",
        "baggage.b": "two words",
        "baggage.c": "",
    }
    assert baggage_attributes("") == {}


@given(st.text(max_size=10_000))
def test_what_is_shown_of_any_text_is_bounded(text: str) -> None:
    attributes = baggage_attributes(text)
    assert len(attributes) <= 16
    assert all(len(value) <= 256 and len(key) <= 264 for key, value in attributes.items())


def test_what_is_too_long_is_not_passed_on() -> None:
    assert passed_on("a=" + "b" * 8190) != ""
    assert passed_on("a=" + "b" * 8191) == ""
