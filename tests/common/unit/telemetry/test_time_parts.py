"""The text of a request's times. The rounded parts always add up to the rounded sum."""

import re

from hypothesis import given
from hypothesis import strategies as st

from services.common.telemetry.time_parts import (
    EXPLANATIONS,
    TimePart,
    added_up,
    part_of_reason,
    parts_of_attributes,
    time_attributes,
    time_line,
)

TENTH = 100_000_000


def test_a_line_has_the_whole_and_its_parts_in_their_order() -> None:
    seconds = {"gateway": 8, "decode": 23, "slots": 49, "blocks": 29, "budget": 7, "prefill": 9}
    parts = added_up([TimePart(name, tenths * TENTH) for name, tenths in seconds.items()])
    assert time_line(parts) == (
        "12.5 s = slots 4.9 · blocks 2.9 · budget 0.7 · prefill 0.9 · decode 2.3 · gateway 0.8"
    )


def test_short_times_are_shown_in_milliseconds() -> None:
    assert time_line([TimePart("prefill", 14_600_000), TimePart("decode", 30_300_000)]) == (
        "45 ms = prefill 15 · decode 30"
    )
    assert time_line([TimePart("gateway", 1_250_000)]) == "1.3 ms = gateway 1.3"
    assert time_line([]) == "0.0 ms = nothing"


lengths = st.one_of(st.integers(0, 10**7), st.integers(0, 10**12))


@given(st.dictionaries(st.sampled_from(list(EXPLANATIONS)), lengths))
def test_the_numbers_that_are_shown_add_up(nanos: dict[str, int]) -> None:
    parts = added_up([TimePart(name, length) for name, length in nanos.items()])
    line = time_line(parts)
    whole, _unit, *shown = re.findall(r"[\d.]+| m?s ", line)
    assert abs(float(whole) - sum(map(float, shown))) < 1e-6
    assert parts_of_attributes(time_attributes(parts)) == parts


def test_of_equal_names_the_longer_one_says_what_was_waited_for() -> None:
    (part,) = added_up([TimePart("blocks", 5, "a", 1), TimePart("blocks", 9, "b", 2)])
    assert part == TimePart("blocks", 14, "b", 2)


def test_an_unknown_reason_is_still_counted() -> None:
    assert part_of_reason("max_seqs") == "slots"
    assert part_of_reason("of the next release") == "other"
