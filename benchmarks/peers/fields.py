"""The fields of messages between services, and the changes that are tried on each field."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_INVALID_TEXT = "\x01invalid\x02"
"""Placeholder in a string field. After serialization, bytes that are not UTF-8 replace it."""
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_UNKNOWN_ENUM = 9999

Value = Any
_Changes = Mapping[str, Callable[[Value], Value]]

_NUMBERS: _Changes = {
    "zero": lambda _: 0,
    "one more": lambda value: value + 1,
    "one less": lambda value: value - 1,
}
_REALS: _Changes = {
    "zero": lambda _: 0.0,
    "negated": lambda value: -value,
    "doubled": lambda value: 2 * value,
    "not a number": lambda _: math.nan,
    "infinite": lambda _: math.inf,
}
_TEXTS: _Changes = {
    "emptied": lambda _: "",
    "lengthened": lambda value: value + "x",
    "invalid": lambda _: _INVALID_TEXT,
}
_BYTES: _Changes = {
    "emptied": lambda _: b"",
    "shortened": lambda value: value[:-1],
    "lengthened": lambda value: value + b"\0",
    "inverted": lambda value: bytes(byte ^ 0xFF for byte in value),
}
_LISTS: Mapping[str, Callable[[Sequence[Value]], Sequence[Value]]] = {
    "list emptied": lambda _: [],
    "first removed": lambda values: values[1:],
    "last removed": lambda values: values[:-1],
    "last repeated": lambda values: [*values, *values[-1:]],
    "reversed": lambda values: values[::-1],
}


def field_paths(
    message: Descriptor, before: tuple[str, ...] = (), above: tuple[Descriptor, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The paths of a message's fields, including the fields of nested messages."""
    for field in message.fields:
        path = (*before, field.name)
        yield path
        inner = _message_type(field)
        if inner is not None and inner not in above:
            yield from field_paths(inner, path, (*above, message))


def present_paths(message: Message, before: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The paths of the fields that are set in a message."""
    found = set()
    for field, value in message.ListFields():
        path = (*before, field.name)
        found.add(path)
        if _message_type(field) is not None:
            for inner in value if field.is_repeated else (value,):
                found |= present_paths(inner, path)
    return found


def change_names(message: Descriptor, path: Sequence[str]) -> list[str]:
    """Names of the changes that can be tried on the field at a path."""
    field = _field_at(message, path)
    if field.message_type is not None and _message_type(field) is None:
        return ["removed"]
    names = list(_LISTS) if field.is_repeated else []
    if field.message_type is not None:
        return [*names, "removed", "added"]
    names += _values_of(field)
    return [*names, "removed"] if field.has_presence else names


def changed(message: Message, path: Sequence[str], change: str) -> bytes | None:
    """The serialized message with the field at `path` changed. It is None if nothing would change.

    If a message along the path is repeated, its last element is changed. If the field is a list of
    values, its last value is changed.
    """
    copy = type(message)()
    copy.CopyFrom(message)
    parent: Any = copy
    for name in path[:-1]:
        field = parent.DESCRIPTOR.fields_by_name[name]
        value = getattr(parent, name)
        if not (value if field.is_repeated else parent.HasField(name)):
            return None
        parent = value[-1] if field.is_repeated else value
    field = parent.DESCRIPTOR.fields_by_name[path[-1]]
    if not _change(parent, field, change):
        return None
    data = copy.SerializeToString(deterministic=True)
    data = data.replace(_INVALID_TEXT.encode(), b"\xff" * len(_INVALID_TEXT))
    return None if data == message.SerializeToString(deterministic=True) else data


def _message_type(field: FieldDescriptor) -> Descriptor | None:
    """The message type of a field. It is None for scalar values and maps."""
    kind = field.message_type
    return None if kind is None or kind.GetOptions().map_entry else kind


def _field_at(message: Descriptor, path: Sequence[str]) -> FieldDescriptor:
    for name in path[:-1]:
        inner = message.fields_by_name[name].message_type
        assert inner is not None
        message = inner
    return message.fields_by_name[path[-1]]


def _values_of(field: FieldDescriptor) -> _Changes:
    """Maps the names of the changes of one value of a field to functions that make them."""
    if field.cpp_type in _INTEGERS:
        smallest, largest = _INTEGERS[field.cpp_type]
        ends: _Changes = {"smallest": lambda _: smallest, "largest": lambda _: largest}
        return {**_NUMBERS, **ends}
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return _REALS
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return {"flipped": lambda value: not value}
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        numbers = [value.number for value in field.enum_type.values]
        return {
            "unspecified": lambda _: 0,
            "unknown": lambda _: _UNKNOWN_ENUM,
            "another": lambda value: numbers[(value + 1) % len(numbers)],
        }
    return _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS


def _change(parent: Message, field: FieldDescriptor, change: str) -> bool:
    """Changes a field of a message in place. Returns whether the change applies."""
    values = getattr(parent, field.name)
    if change in _LISTS:
        kept = list(_LISTS[change](list(values)))
        parent.ClearField(field.name)
        getattr(parent, field.name).extend(kept)
        return True
    if change == "removed":
        parent.ClearField(field.name)
        return True
    if change == "added":
        if field.is_repeated:
            values.add()
        else:
            values.SetInParent()
        return True
    return _change_value(parent, field, _values_of(field)[change])


def _change_value(
    parent: Message, field: FieldDescriptor, change: Callable[[Value], Value]
) -> bool:
    values = getattr(parent, field.name)
    if field.is_repeated and not values:
        return False
    value = change(values[-1] if field.is_repeated else values)
    if field.cpp_type in _INTEGERS:
        smallest, largest = _INTEGERS[field.cpp_type]
        if not smallest <= value <= largest:
            return False
    if field.is_repeated:
        values[-1] = value
    else:
        setattr(parent, field.name, value)
    return True
