"""Converts structural tags to grammars. A structural tag constrains parts of an answer. xgrammar
defines the format of tags, and vLLM's clients send them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.request.structured_outputs import (
    StructuredOutputs,
    StructuredOutputsKind,
    invalid,
)
from services.gateway.adapters.grammars.lark import Lark, make_lark
from services.gateway.core.ports import Tokenizer

MAX_DEPTH = 16
MAX_TAGS = 512
MAX_TRIGGERS = 16
_NAME = "structural_tag"


async def structural_tag(tag: Mapping[str, Any], tokenizer: Tokenizer) -> StructuredOutputs:
    """Returns the grammar of a structural tag, which is {"format": …} or {"structures": […],
    "triggers": […]}.

    Raises InvalidArgument if the tag is malformed or nested too deep.
    """
    form = tag.get("format")
    if form is None:
        form = {
            "type": "triggered_tags",
            "triggers": tag.get("triggers"),
            "tags": [
                {
                    "begin": _text(one, "begin"),
                    "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
                    "end": _text(one, "end"),
                }
                for one in _objects(tag, "structures")
            ],
        }
    literals: list[str] = []
    _collect(form, literals, MAX_DEPTH)
    tags = _Tags(await make_lark(tokenizer, literals))
    return tags.grammar(form)


def _collect(form: object, literals: list[str], depth: int) -> None:
    """Collects all strings of a format that may be literals. Raises InvalidArgument if the format
    is nested too deep.
    """
    if depth < 0:
        raise _wrong(f"is nested more than {MAX_DEPTH} deep")
    if isinstance(form, str):
        literals.append(form)
    elif isinstance(form, Mapping):
        for key, value in form.items():
            if key not in ("json_schema", "schema"):
                _collect(value, literals, depth - 1)
    elif isinstance(form, list):
        for value in form:
            _collect(value, literals, depth - 1)


class _Tags:
    """Writes the parts of a structural tag as rules."""

    def __init__(self, lark: Lark) -> None:
        self._lark = lark
        self._num_forms = 0
        self._writers: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda form: lark.rule(lark.literal(_text(form, "value"))),
            "json_schema": self._json_schema,
            "regex": lambda form: self._wanted(StructuredOutputsKind.REGEX, _text(form, "pattern")),
            "grammar": lambda form: self._wanted(
                StructuredOutputsKind.GRAMMAR, _text(form, "grammar")
            ),
            "any_text": lambda _form: lark.any_text(),
            "sequence": lambda form: lark.rule(" ".join(self._each(form, "elements"))),
            "or": lambda form: lark.rule(" | ".join(self._each(form, "elements"))),
            "tag": lambda form: self._tag(form, after=""),
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def grammar(self, form: Mapping[str, Any]) -> StructuredOutputs:
        return self._lark.text(self._form(form))

    def _form(self, form: object) -> str:
        self._num_forms += 1
        if self._num_forms > MAX_TAGS:
            raise _wrong(f"has more than {MAX_TAGS} parts")
        kind = form.get("type") if isinstance(form, Mapping) else None
        writer = self._writers.get(kind) if isinstance(kind, str) else None
        if writer is None or not isinstance(form, Mapping):
            raise _wrong("has a part whose type is not one of " + ", ".join(self._writers))
        return writer(form)

    def _each(self, form: Mapping[str, Any], key: str) -> list[str]:
        return [self._form(one) for one in _objects(form, key)]

    def _wanted(self, kind: StructuredOutputsKind, text: str) -> str:
        try:
            return self._lark.wanted(StructuredOutputs(kind, text))
        except ValueError as error:
            raise _wrong(f"{kind.value}: {error}") from error

    def _json_schema(self, form: Mapping[str, Any]) -> str:
        schema = form.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise _wrong("json_schema must be an object")
        try:
            StructuredOutputs(StructuredOutputsKind.JSON, json.dumps(schema)).validate()
        except RecursionError as error:
            raise _wrong("has a schema that is nested too deep") from error
        return self._lark.schema(schema)

    def _tag(self, tag: Mapping[str, Any], after: str) -> str:
        """Returns a rule for a tag, without its beginning `after` (the trigger), which another rule
        matches.
        """
        begin, content, end = _text(tag, "begin"), tag.get("content"), tag.get("end")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not all(isinstance(one, str) for one in ends):
            raise _wrong("end must be a text")
        opened = self._lark.literal(begin.removeprefix(after))
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            closed = self._lark.rule(" | ".join(map(self._lark.text_to, ends)))
            return self._lark.rule(f"{opened} {closed}")
        closed = self._lark.rule(" | ".join(self._lark.literal(one) or '""' for one in ends))
        return self._lark.rule(f"{opened} {self._form(content)} {closed}")

    def _triggered(self, form: Mapping[str, Any]) -> str:
        triggers, tags = _texts(form, "triggers"), _objects(form, "tags")
        if not all(_text(tag, "begin").startswith(tuple(triggers)) for tag in tags):
            raise _wrong("has tags that no trigger begins")
        branches: list[str] = []
        for trigger in triggers:
            begun = [tag for tag in tags if _text(tag, "begin").startswith(trigger)]
            if begun:
                inner = self._lark.rule(" | ".join(self._tag(tag, trigger) for tag in begun))
                branches.append(self._lark.rule(f"{self._lark.text_to(trigger)} {inner}"))
        several = self._lark.rule(" | ".join(branches))
        rest = self._lark.text_without(triggers)
        if form.get("stop_after_first"):
            return several if form.get("at_least_one") else self._lark.rule(f"{several} | {rest}")
        count = "+" if form.get("at_least_one") else "*"
        return self._lark.rule(f"{several}{count} {rest}")

    def _separated(self, form: Mapping[str, Any]) -> str:
        one = self._lark.rule(" | ".join(self._tag(tag, "") for tag in _objects(form, "tags")))
        many = one
        if not form.get("stop_after_first"):
            separator = self._lark.literal(_text(form, "separator"))
            many = self._lark.rule(f"{one} ({separator} {one})*")
        return many if form.get("at_least_one") else self._lark.rule(f"({many})?")


def _objects(form: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    values = form.get(key)
    if not isinstance(values, list) or not values:
        raise _wrong(f"{key} must be a list with something in it")
    if len(values) > MAX_TAGS or not all(isinstance(one, Mapping) for one in values):
        raise _wrong(f"{key} must hold at most {MAX_TAGS} objects")
    return values


def _texts(form: Mapping[str, Any], key: str) -> list[str]:
    values = form.get(key)
    if not isinstance(values, list) or not values or len(values) > MAX_TRIGGERS:
        raise _wrong(f"{key} must be a list of 1 to {MAX_TRIGGERS} texts")
    if not all(isinstance(one, str) and one for one in values):
        raise _wrong(f"{key} must be a list of texts, none of them empty")
    return values


def _text(form: Mapping[str, Any], key: str) -> str:
    value = form.get(key)
    if not isinstance(value, str):
        raise _wrong(f"{key} must be a text")
    return value


def _wrong(problem: str) -> Exception:
    return invalid(f"{_NAME} {problem}")
