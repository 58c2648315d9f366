"""Compares the fields of a dataclass with the fields of its message."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor


def require_same_fields(dataclass: type[Any], message: "Descriptor") -> None:
    """Raises TypeError if the dataclass and the message have different field names.

    It is called when a codec is imported, so that no process starts that would drop a field.
    """
    unmatched = {field.name for field in fields(dataclass)} ^ set(message.fields_by_name)
    if unmatched:
        raise TypeError(
            f"{dataclass.__name__} and {message.full_name} differ in {sorted(unmatched)}"
        )
