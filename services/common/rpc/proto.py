import enum
from dataclasses import fields
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.descriptor import Descriptor

E = TypeVar("E", bound=enum.Enum)
V = TypeVar("V", bound=int)


class _Values(Protocol[V]):
    """A generated enum: the names of its values and their numbers."""

    def items(self) -> "list[tuple[str, V]]": ...


class ProtoEnum(Generic[E, V]):
    """Converts between the members of a Python enum and the numbers of a proto enum. The member
    `NAME` corresponds to the proto's value `<prefix>NAME`. Only `<prefix>UNSPECIFIED` may have no
    counterpart: any other difference raises TypeError at construction, that is, at import.
    """

    __slots__ = ("_members", "_numbers")

    def __init__(self, members: type[E], values: _Values[V], prefix: str) -> None:
        numbers = {name.removeprefix(prefix): number for name, number in values.items()}
        numbers.pop("UNSPECIFIED")
        unmatched = numbers.keys() ^ set(members.__members__)
        if unmatched:
            raise TypeError(f"{members.__name__} and {prefix}* differ in {sorted(unmatched)}")
        self._numbers: dict[E, V] = {members[name]: number for name, number in numbers.items()}
        self._members: dict[int, E] = {number: member for member, number in self._numbers.items()}

    def to_proto(self, member: E) -> V:
        return self._numbers[member]

    def from_proto(self, number: int) -> E | None:
        """Returns the member for a number. Returns None for UNSPECIFIED and unknown numbers."""
        return self._members.get(number)


def require_same_fields(dataclass: type[Any], message: Descriptor) -> None:
    """Raises TypeError if the dataclass and the message have different field names. Modules that
    convert messages call this at import, so that no process starts that would drop a field.
    """
    unmatched = {field.name for field in fields(dataclass)} ^ set(message.fields_by_name)
    if unmatched:
        raise TypeError(
            f"{dataclass.__name__} and {message.full_name} differ in {sorted(unmatched)}"
        )
