"""An error names the field, and the line on which its value begins."""

import pytest

from services.cli.replay.fields import Field, FieldError, field_name, line_of

TEXT = """{
  "a": 1,
  "b": [10, 20,
        {"c": null}],
  "b2": {"d":
    "e"},
  "a": 2
}"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 1),
        (("b",), 3),
        (("b", 1), 3),
        (("b", 2), 4),
        (("b", 2, "c"), 4),
        (("b2", "d"), 6),
        (("b2", "missing"), 5),
        (("a",), 7),
        (("b", 2, "missing", "deeper"), 4),
        (("a", "deeper"), 7),
    ],
)
def test_the_line_of_a_value(path: tuple[str | int, ...], line: int) -> None:
    assert line_of(TEXT, path) == line


def test_a_path_is_written_as_people_write_it() -> None:
    assert field_name(("events", 3, "add", "max_tokens")) == "events[3].add.max_tokens"


def test_complaints_name_the_field_and_show_the_value() -> None:
    field = Field({"events": [{"step": True}], "long": "x" * 100})
    with pytest.raises(FieldError, match=r"^events\[0\]\.step must be a whole number .* not true$"):
        next(field["events"].items())["step"].integer()
    with pytest.raises(FieldError, match=r"^events\[0\]\.add is missing$"):
        _ = next(field["events"].items())["add"]
    with pytest.raises(FieldError, match=r'^long must be a list, not "x{39}\.\.\.$'):
        list(field["long"].items())
    with pytest.raises(FieldError, match=r"^long is not known$"):
        field.only(["events"])
