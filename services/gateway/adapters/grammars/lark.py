"""Writes grammars in the dialect of Lark that llguidance compiles."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.request.schema_checks import held_schema
from services.common.request.structured_outputs import (
    JSON_OPTIONS,
    StructuredOutputs,
    StructuredOutputsKind,
    invalid,
)
from services.gateway.core.ports import Tokenizer
from services.gateway.core.text.parsing.reasoning import PromptedReasoning, ReasoningState

SPACE = r"/[ \n\t]{0,2}/"
_MARKER = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{1,24}\]")
_MAX_MARKERS = 256
_ANY = r"/(.|\n)*/"


class Lark:
    """A grammar that is built rule by rule. Markers are texts such as <think> or [INST]. A marker
    that is a single token is written as its token id, since llguidance does not match special
    tokens as text.
    """

    def __init__(self, marker_ids: Mapping[str, int]) -> None:
        self._marker_ids = marker_ids
        self._rules: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        parts: list[str] = []
        for piece in _split(text):
            token_id = self._marker_ids.get(piece)
            parts.append(_quoted(piece) if token_id is None else f"<[{token_id}]>")
        return " ".join(parts)

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Adds a rule for JSON that conforms to a schema. Raises InvalidArgument if the schema
        cannot be enforced.
        """
        whole = {**held_schema(schema), "x-guidance": JSON_OPTIONS}
        return self.rule("%json " + json.dumps(whole, ensure_ascii=False))

    def wanted(self, form: StructuredOutputs) -> str:
        """Adds a rule for a client's structured-output constraint. Raises ValueError for a
        malformed grammar, and InvalidArgument for any other invalid constraint.
        """
        form.validate()
        if form.kind is StructuredOutputsKind.JSON:
            return self.schema(json.loads(form.text))
        if form.kind is StructuredOutputsKind.REGEX:
            return self.regex(form.text)
        if form.kind is StructuredOutputsKind.CHOICE:
            return self.rule(" | ".join(map(_quoted, form.choices())))
        # Imported here, since most gateways compile no grammar.
        from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415

        text = gbnf_to_lark(form.text) if "::=" in form.text else form.text
        return self.rule("%lark {\n" + text + "\n}")

    def regex(self, pattern: str) -> str:
        """Adds a rule for a text that a regular expression matches as a whole."""
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
        return self.rule("/" + escaped.replace("\n", r"\n") + "/")

    def any_text(self) -> str:
        return self.rule(_ANY)

    def text_to(self, literal: str) -> str:
        """Adds a rule for any text up to and including the first occurrence of `literal`, which
        must not be empty.
        """
        first, *rest = _split(literal)
        token_id = self._marker_ids.get(first)
        tail = self.literal("".join(rest))
        if token_id is not None:
            return self.rule(f"{self.any_text()} <[{token_id}]> {tail}")
        before = self.rule(_ANY, f"[suffix={_quoted(first)}]")
        return self.rule(f"{before} {tail}")

    def text_without(self, literals: Sequence[str]) -> str:
        """Adds a rule for text in which none of these literals can begin: it lacks the first piece
        of each literal, which is the literal's first marker or the text before it.
        """
        parts = [_ANY]
        for literal in literals:
            first = _split(literal)[0]
            if first not in self._marker_ids:
                parts.append(rf"~/(.|\n)*{_as_regex(first)}(.|\n)*/")
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {' & '.join(parts)}")
        return name

    def text(self, start: str) -> StructuredOutputs:
        """Returns the whole grammar. Its start rule has the body `start`."""
        whole = "\n".join([f"start: {start}", *self._rules])
        return StructuredOutputs(StructuredOutputsKind.GRAMMAR, whole)


async def make_lark(tokenizer: Tokenizer, literals: Sequence[str]) -> Lark:
    """Makes an empty grammar, and looks up the token ids of the markers in `literals`, the literals
    that the grammar will contain.
    """
    markers = list({found for literal in literals for found in _MARKER.findall(literal)})
    encoded = await tokenizer.encode(
        markers[:_MAX_MARKERS], add_special_tokens=False, max_tokens=1_000
    )
    return Lark(
        {marker: ids[0] for marker, ids in zip(markers, encoded, strict=False) if len(ids) == 1}
    )


def _split(text: str) -> list[str]:
    """Splits a text into plain texts and possible markers, in order."""
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


_SPACE = r"/[ \n\t]{0,4}/"


async def after_reasoning(
    form: StructuredOutputs, reasoning: PromptedReasoning, tokenizer: Tokenizer
) -> StructuredOutputs:
    """Returns the constraint of a whole answer whose part after the reasoning must match `form`.

    vLLM applies its token masks only after the reasoning. Here the grammar has an unconstrained
    part for the reasoning instead, so that an answer cannot end within the reasoning.
    """
    if reasoning.state is ReasoningState.OVER:
        return form
    lark = await make_lark(tokenizer, reasoning_literals(reasoning))
    return lark.text(f"{thought(lark, reasoning)} {wanted_rule(lark, form)}")


def wanted_rule(lark: Lark, form: StructuredOutputs) -> str:
    """Returns a rule for the constraint. Raises InvalidArgument if the constraint is invalid."""
    try:
        return lark.wanted(form)
    except ValueError as error:
        raise invalid(f"grammar: {error}") from error


def reasoning_literals(reasoning: PromptedReasoning | None) -> list[str]:
    """Returns the literals of the rule that `thought` writes."""
    return [] if reasoning is None else [reasoning.form.start, reasoning.form.end]


def thought(lark: Lark, reasoning: PromptedReasoning | None) -> str:
    """Returns a rule for the reasoning before the answer, or "" if `reasoning` is None."""
    if reasoning is None or reasoning.state is ReasoningState.OVER:
        return ""
    inside = lark.rule(f"{lark.text_to(reasoning.form.end)} {_SPACE}")
    if reasoning.state is ReasoningState.INSIDE:
        return inside
    opened = lark.literal(reasoning.form.start)
    return lark.rule(f"(({_SPACE} {opened}) {inside})?")
