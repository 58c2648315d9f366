"""Compiles what outputs conform to for one vocabulary, by llguidance: at the edge to judge it, in
workers to hold outputs to it. Both find the same.
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

# Bounds of a token's mask, in llguidance's units of work, of which some 15,000 take a millisecond.
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
"""Texts whose tokens are allowed all at once where a grammar allows all such texts; other tokens
are tried one by one. With more lengths than llguidance's own, 10 and 30, this holds for most tokens
within a JSON string of a `maxLength`, too.
"""


class GrammarCompiler:
    """Makes matchers over the tokens of one model. May be used by several threads."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """`tokenizer_json` is the text of a tokenizer.json. Tokens of the model that it lacks, up
        to `vocab_size`, are never allowed; `eos_token_ids` where an output may end. Takes a second
        for a large vocabulary. Raises ValueError for a tokenizer whose tokens are not made of
        bytes.
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
        """A matcher at the beginning of an output. Raises InvalidArgument, with llguidance's
        reason, for what it does not know or cannot hold an output to.

        That is decided by the text and the vocabulary, not by how long it takes: the sizes of texts
        bound that, to about two seconds for the worst that is known. Compiling does not hold the
        interpreter's lock.
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
    """What is demanded, in llguidance's form. Raises ValueError for what cannot be one."""
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
    """The first lines of an error of llguidance, which say what is wrong, in one."""
    if error.startswith("NoExtension"):
        return "no output conforms to it"
    return " ".join(error.replace("<non-verbose/>", "").split())[:_MAX_REASON]
