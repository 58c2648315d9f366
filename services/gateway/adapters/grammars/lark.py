"""Writes grammars in llguidance's Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.request.schema_checks import held_schema
from services.common.request.structured_outputs import (
    JSON_OPTIONS,
    StructuredOutputs,
    StructuredOutputsKind,
)
from services.gateway.core.ports import Tokenizer

SPACE = r"/[ \n\t]{0,2}/"
_MARKER = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{1,24}\]")
_MAX_MARKERS = 256
_ANY = r"/(.|\n)*/"


class Lark:
    """A grammar that grows rule by rule. Markers that are tokens of their own are demanded as such:
    to llguidance these are no text.
    """

    def __init__(self, marker_ids: Mapping[str, int]) -> None:
        self._marker_ids = marker_ids
        self._rules: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """Adds a rule; its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text; empty for none."""
        parts: list[str] = []
        for piece in _split(text):
            token_id = self._marker_ids.get(piece)
            parts.append(_quoted(piece) if token_id is None else f"<[{token_id}]>")
        return " ".join(parts)

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON that a schema accepts. Raises InvalidArgument for one that cannot be enforced."""
        whole = {**held_schema(schema), "x-guidance": JSON_OPTIONS}
        return self.rule("%json " + json.dumps(whole, ensure_ascii=False))

    def wanted(self, form: StructuredOutputs) -> str:
        """A text of one of the forms that clients demand. Raises InvalidArgument, or ValueError for
        a grammar that is not one.
        """
        form.validate()
        if form.kind is StructuredOutputsKind.JSON:
            return self.schema(json.loads(form.text))
        if form.kind is StructuredOutputsKind.REGEX:
            return self.regex(form.text)
        if form.kind is StructuredOutputsKind.CHOICE:
            return self.rule(" | ".join(map(_quoted, form.choices())))
        # Only here: most gateways need none.
        from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415

        text = gbnf_to_lark(form.text) if "::=" in form.text else form.text
        return self.rule("%lark {\n" + text + "\n}")

    def regex(self, pattern: str) -> str:
        """A text that a regular expression matches as a whole."""
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
        return self.rule("/" + escaped.replace("\n", r"\n") + "/")

    def any_text(self) -> str:
        return self.rule(_ANY)

    def text_to(self, literal: str) -> str:
        """Any text up to this one, which is not empty, for the first time."""
        first, *rest = _split(literal)
        token_id = self._marker_ids.get(first)
        tail = self.literal("".join(rest))
        if token_id is not None:
            return self.rule(f"{self.any_text()} <[{token_id}]> {tail}")
        before = self.rule(_ANY, f"[suffix={_quoted(first)}]")
        return self.rule(f"{before} {tail}")

    def text_without(self, literals: Sequence[str]) -> str:
        """Any text in which none of these begins."""
        parts = [_ANY]
        for literal in literals:
            first = _split(literal)[0]
            if first not in self._marker_ids:
                parts.append(rf"~/(.|\n)*{_as_regex(first)}(.|\n)*/")
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {' & '.join(parts)}")
        return name

    def text(self, start: str) -> StructuredOutputs:
        """The whole grammar, which begins with `start`."""
        whole = "\n".join([f"start: {start}", *self._rules])
        return StructuredOutputs(StructuredOutputsKind.GRAMMAR, whole)


async def make_lark(tokenizer: Tokenizer, literals: Sequence[str]) -> Lark:
    """A grammar of a model, which will have some of these literals."""
    markers = list({found for literal in literals for found in _MARKER.findall(literal)})
    encoded = await tokenizer.encode(
        markers[:_MAX_MARKERS], add_special_tokens=False, max_tokens=1_000
    )
    return Lark(
        {marker: ids[0] for marker, ids in zip(markers, encoded, strict=False) if len(ids) == 1}
    )


def _split(text: str) -> list[str]:
    """Texts and what may be markers among them, in their order."""
    pieces, at = list[str](), 0
    for found in _MARKER.finditer(text):
        pieces += [text[at : found.start()], found[0]]
        at = found.end()
    return [piece for piece in (*pieces, text[at:]) if piece]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_regex(text: str) -> str:
    escaped = re.sub(r"[\\.+*?()|\[\]{}^$/&~#-]", lambda found: "\\" + found[0], text)
    return escaped.replace("\n", r"\n")
