"""Strict types for fields of request bodies, and annotations for known but unsupported fields."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_INT64 = 2**63
"""Integers must be less than this number, so that no integer with a million digits is parsed."""


def _as_integer(value: Any) -> Any:
    """Converts 16.0 to 16, because 16.0 is an integer in JSON Schema, too."""
    return int(value) if type(value) is float and value.is_integer() else value


def _as_integers(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        if not isinstance(value, list) or float not in map(type, value):
            raise
        return validate([_as_integer(item) for item in value])


Int = Annotated[int, Field(ge=-_INT64, lt=_INT64), BeforeValidator(_as_integer)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

# `fail_fast` ends the validation at the first wrong item, since a body may have a million items.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_as_integers)]
Texts = Annotated[list[str], Field(fail_fast=True)]


def _by_first_item(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, str):
        return "<texts>"
    return "<lists>" if isinstance(first, list) else "<items>"


def text_or_list(value: Any) -> str | None:
    """Returns the union tag, which selects a model, of a text or a list. Returns None for any other
    value.
    """
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


def text_or_object(value: Any) -> str | None:
    """Returns the union tag of a text or an object, and None for any other value."""
    if isinstance(value, str):
        return "<text>"
    return "<object>" if isinstance(value, dict) else None


def by_type(value: Any) -> str | None:
    """Returns the union tag of an object, made from its `type`."""
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else None


def choice(by: Callable[[Any], str | None], message: str) -> Discriminator:
    """Makes a discriminator, which selects one alternative of a union by its tag before validation,
    so that an error lists only this alternative's problems. `message` is the error message for a
    value without a tag.
    """
    return Discriminator(by, custom_error_type="alternative", custom_error_message=message)


def _with_finite_numbers(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses NaN and infinity, such as 1e400, which `allow_inf_nan` does not find in any JSON."""
    to_check: list[Any] = [value]
    while to_check:
        one = to_check.pop()
        if isinstance(one, dict):
            to_check += one.values()
        elif isinstance(one, list):
            to_check += one
        elif isinstance(one, float) and not math.isfinite(one):
            raise PydanticCustomError("finite_number", "must have only finite numbers")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_with_finite_numbers)]
"""Any JSON object without NaN and infinity, because answers may repeat the object as JSON."""

Prompts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<items>")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("<lists>")],
    choice(_by_first_item, "must be a string, a list of strings, token ids, or lists of these"),
]
TextOrTexts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<list>")],
    choice(text_or_list, "must be a string or a list of strings"),
]


class Body(BaseModel):
    """A JSON object whose fields have strict types. A null field counts as absent. A BodyReader
    ignores unknown fields, unless a setting makes it refuse them. Each validator is built at its
    first use, because building all of them takes a fifth of the gateway's starting time.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, defer_build=True
    )


class HistoryBody(Body):
    """A part of a conversation or of a tool's description. Unknown keys, which clients and other
    servers add, are dropped silently, because the part is only rendered into the prompt.
    """

    model_config = ConfigDict(extra="ignore")


def given(name: str) -> dict[str, Any]:
    """Returns the JSON Schema of an object in which the field `name` is present and not null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class Only:
    """Annotation of a field that accepts only null and `values`, which have no effect.

    Any other value is an error with the message `why`, which names the unsupported feature.
    """

    def __init__(self, *values: Any, why: str) -> None:
        self._values = values
        self._why = why

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: object) -> dict[str, Any]:
        return {"enum": [None, *self._values], "description": f"Other values: {self._why}."}

    def _check(self, value: Any) -> None:
        if not _is_one_of(value, self._values):
            raise PydanticCustomError("not_supported", "{why}", {"why": self._why})


@dataclass(slots=True)
class BodyNotes:
    """Facts that the validation of a body collects, in pydantic's validation context."""

    ignored: list[str] = field(default_factory=list)
    ttls: list[int | None] = field(default_factory=list)
    """The times, in seconds, for which the client requests to keep the prompt cached. None stands
    for `breakpoint_ttl`.
    """
    breakpoint_ttl: int = 1800
    """Seconds for a cache breakpoint without a ttl. The default is OpenAI's."""

    @property
    def keep_seconds(self) -> int:
        """The longest of the times in `ttls`, or 0 if there is none."""
        return max((ttl or self.breakpoint_ttl for ttl in self.ttls), default=0)


class Without:
    """Annotation of a field that is accepted but has no effect. The answer is correct without the
    effect, and only lacks a guarantee or takes longer. For a value other than null and `values`, a
    header of the answer lists `name` among the ignored fields.
    """

    def __init__(self, name: str, *values: Any) -> None:
        self._name = name
        self._values = values

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._note, handler(source))

    def _note(self, value: Any, info: ValidationInfo) -> None:
        if isinstance(info.context, BodyNotes) and not _is_one_of(value, self._values):
            info.context.ignored.append(self._name)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is null or one of `values`. 1.0 equals 1, but true does not equal 1."""
    return value is None or any(_kind(value) is _kind(v) and value == v for v in values)


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


Ignored = Annotated[Any, AfterValidator(lambda _: None)]
"""A field whose value is accepted and ignored, since it does not affect the model."""
