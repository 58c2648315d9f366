"""Errors about a damaged step log name the field."""

import pytest

from services.cli.replay.fields import Field, FieldError, field_name


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
