from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor


def require_same_fields(dataclass: type[Any], message: "Descriptor") -> None:
    """Raises TypeError if the dataclass and the message have different field names. Codecs call
    this function at import, so that a process that would drop a field does not start.
    """
    unmatched = {field.name for field in fields(dataclass)} ^ set(message.fields_by_name)
    if unmatched:
        raise TypeError(
            f"{dataclass.__name__} and {message.full_name} differ in {sorted(unmatched)}"
        )
