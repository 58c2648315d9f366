"""Compiles structured outputs for one vocabulary with llguidance. The gateway compiles grammars to
validate requests, and workers compile them to restrict outputs. Both accept the same grammars.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from services.common.request.schema_checks import held_schema
from services.common.request.structured_outputs import (
    JSON_OPTIONS,
    StructuredOutputs,
    StructuredOutputsKind,
    invalid,
)

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Limits on the work for one token mask, in llguidance's units. About 15,000 units take 1 ms.
_STEP_LEXER_FUEL = 60_000
_STEP_MAX_ITEMS = 10_000
_MAX_LEXER_STATES = 20_000
_MAX_REASON = 300
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{length}}}" for length in (6, 8, 10, 12, 15, 20, 30)),
    f"{_IN_STRING}+",
]
"""llguidance's "slices": if a grammar allows every text that matches one of these patterns, all
matching tokens are allowed at once. All other tokens are tested one by one. The lengths 10 and 30
are added to llguidance's own patterns, for JSON strings with `maxLength`.
"""


class GrammarCompiler:
    """Compiles matchers for the vocabulary of one model. Thread-safe."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """`tokenizer_json` is the text of a tokenizer.json. Token ids below `vocab_size` that the
        tokenizer lacks are never allowed. `eos_token_ids` are allowed at positions where an output
        may end. Takes a second for a large vocabulary. Raises ValueError for a tokenizer whose
        tokens do not consist of bytes.
        """
        described = json.loads(tokenizer_json)
        described["truncation"] = described["padding"] = None
        self._tokenizer = LLTokenizer(
            json.dumps(described),
            n_vocab=vocab_size,
            eos_token=list(eos_token_ids) or None,
            slices=_SLICES,
        )
        self._limits = LLParserLimits(
            step_lexer_fuel=_STEP_LEXER_FUEL,
            step_max_items=_STEP_MAX_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, wanted: StructuredOutputs) -> LLMatcher:
        """Returns a matcher in its initial state. Raises InvalidArgument with llguidance's reason
        if the grammar is invalid or cannot be enforced. Whether a grammar is accepted depends only
        on its text and the vocabulary, not on time. llguidance does not limit the time and memory
        of every grammar, so the gateway does. Compiling releases the GIL.
        """
        wanted.validate()
        try:
            grammar = _grammar(wanted)
        except ValueError as error:
            raise invalid(f"{wanted.kind.value}: {reason_in_words(str(error))}") from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise invalid(f"{wanted.kind.value}: {reason_in_words(matcher.get_error())}")
        return matcher


def _grammar(wanted: StructuredOutputs) -> str:
    if wanted.kind is StructuredOutputsKind.JSON:
        schema = held_schema(json.loads(wanted.text))
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides=cast("JsonCompileOptions", JSON_OPTIONS)
        )
    if wanted.kind is StructuredOutputsKind.REGEX:
        return LLMatcher.grammar_from_regex(wanted.text)
    if wanted.kind is StructuredOutputsKind.CHOICE:
        texts = (json.dumps(text, ensure_ascii=False) for text in wanted.choices())
        return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    return grammar_from("grammar", wanted.text)


def reason_in_words(error: str) -> str:
    """Joins the first lines of an llguidance error, which contain the reason, into one line."""
    if error.startswith("NoExtension"):
        return "no output conforms to the grammar"
    return " ".join(error.replace("<non-verbose/>", "").split())[:_MAX_REASON]
