"""The constraints that clients set on answers: OpenAI's `response_format`, and vLLM's
`structured_outputs`.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from services.common.errors import InvalidArgument
from services.common.request.structured_outputs import (
    FIELD,
    StructuredOutputs,
    StructuredOutputsKind,
    invalid,
)
from services.gateway.adapters.grammars.structural_tags import structural_tag
from services.gateway.adapters.http.exchange.fields import (
    Body,
    JsonObject,
    Only,
    Texts,
    by_type,
    choice,
    given,
    text_or_object,
)
from services.gateway.core.ports import Tokenizer

ANY_OBJECT = '{"type": "object"}'
_NO_CHOICE = "the schema determines the JSON that the model may write"
_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class TextFormat(Body):
    """Allows any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Requires a JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A JSON schema and its name. Answers conform to the schema even if `strict` is false."""

    name: str
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """Requires JSON that conforms to a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(Body):
    """Constrains parts of the text, either by `format`, or by `structures`, each of which applies
    after one of the texts in `triggers`.
    """

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: Texts | None = None


AnswerFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[StructuralTagFormat, Tag("<structural_tag>")],
    choice(
        by_type, "must be an object whose type is text, json_object, json_schema or structural_tag"
    ),
]


TextOrObject = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    choice(text_or_object, "must be a string or an object"),
]


class StructuredOutputsBody(Body):
    """The constraint on the answer in vLLM's schema. Exactly one of the fields may be set."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [given(name) for name in _FORMS]})

    json_: TextOrObject | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: TextOrObject | None = None
    # vLLM's options for the form of JSON.
    disable_any_whitespace: Annotated[Any, Only(False, why=_NO_CHOICE)] = None
    disable_additional_properties: Annotated[Any, Only(False, why=_NO_CHOICE)] = None
    disable_fallback: Annotated[Any, Only(False, why="this server has one backend")] = None
    whitespace_pattern: Annotated[Any, Only(why=_NO_CHOICE)] = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        forms = [getattr(self, name) for name in ("json_", *_FORMS[1:])]
        if sum(form is not None and form is not False for form in forms) != 1:
            raise PydanticCustomError(
                "alternative", "must have exactly one of " + ", ".join(_FORMS)
            )
        return self

    async def wanted(self, tokenizer: Tokenizer) -> StructuredOutputs:
        """Returns the constraint. Raises InvalidArgument for an invalid structural tag. Does not
        validate other constraints.
        """
        if self.structural_tag is not None:
            return await structural_tag(_tag(self.structural_tag), tokenizer)
        if self.regex is not None:
            return StructuredOutputs(StructuredOutputsKind.REGEX, self.regex)
        if self.choice is not None:
            text = json.dumps(self.choice, ensure_ascii=False)
            return StructuredOutputs(StructuredOutputsKind.CHOICE, text)
        if self.grammar is not None:
            return StructuredOutputs(StructuredOutputsKind.GRAMMAR, self.grammar)
        schema = ANY_OBJECT if self.json_object else self.json_
        assert schema is not None
        return json_form(schema)


async def wanted_form(
    response_format: AnswerFormat | None,
    structured_outputs: StructuredOutputsBody | None,
    tokenizer: Tokenizer,
) -> StructuredOutputs | None:
    """Returns the constraint on an answer, or None if there is none. Raises InvalidArgument if both
    fields set a constraint.
    """
    of_format = None
    if isinstance(response_format, JsonObjectFormat):
        of_format = json_form(ANY_OBJECT)
    elif isinstance(response_format, JsonSchemaFormat):
        of_format = json_form(response_format.json_schema.schema_)
    elif isinstance(response_format, StructuralTagFormat):
        of_format = await structural_tag(response_format.model_dump(), tokenizer)
    if structured_outputs is None:
        return of_format
    if of_format is not None:
        raise InvalidArgument(
            f"{FIELD} and response_format both define the format of the answer: send one of them",
            field=FIELD,
        )
    return await structured_outputs.wanted(tokenizer)


def _tag(value: dict[str, Any] | str) -> dict[str, Any]:
    """Returns a structural tag as an object. vLLM's clients may send it as JSON text."""
    try:
        tag = json.loads(value) if isinstance(value, str) else value
        json.dumps(tag, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise invalid("structural_tag is not JSON") from error
    if not isinstance(tag, dict):
        raise invalid("structural_tag must be an object")
    return tag


def json_form(schema: Mapping[str, Any] | str) -> StructuredOutputs:
    if not isinstance(schema, str):
        schema = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return StructuredOutputs(StructuredOutputsKind.JSON, schema)
