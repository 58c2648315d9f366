"""A dataclass and its message, field by field."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor


def require_same_fields(dataclass: type[Any], message: "Descriptor") -> None:
    """Raises TypeError, which names them, if one has fields that the other lacks. Called where a
    codec is imported, so that no process starts with a field that it would drop.
    """
    unmatched = {field.name for field in fields(dataclass)} ^ set(message.fields_by_name)
    if unmatched:
        raise TypeError(
            f"{dataclass.__name__} and {message.full_name} differ in {sorted(unmatched)}"
        )
