"""Reading server-sent events."""

from services.cli.client import events


def test_each_event_is_the_data_up_to_an_empty_line() -> None:
    assert list(events(["data: 1", "", "data: 2", ""])) == ["1", "2"]


def test_data_lines_of_one_event_are_joined() -> None:
    assert list(events(["data: {", "data: }", ""])) == ["{\n}"]


def test_one_space_after_the_colon_is_not_data() -> None:
    assert list(events(["data:x", "", "data:  y", ""])) == ["x", " y"]


def test_comments_and_other_fields_are_passed_over() -> None:
    assert list(events([": ping", "", "event: message", "id: 7", "data: x", ""])) == ["x"]


def test_an_event_that_breaks_off_is_dropped() -> None:
    assert list(events(["data: whole", "", "data: half"])) == ["whole"]
