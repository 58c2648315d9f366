"""Structured outputs: formats to which a client requires an output to conform, as in vLLM."""

import enum
import json
from dataclasses import dataclass
from functools import lru_cache

from services.common.errors import InvalidArgument

FIELD = "structured_outputs"
MAX_TEXT_BYTES = 65_536
MAX_DEPTH = 64
MAX_NODES = 10_000
MAX_CHOICES = 4096
KEPT_GRAMMARS = 32
"""The number of recent grammars that a worker caches besides grammars that compile slowly."""
JSON_OPTIONS = {
    # Whitespace between two JSON tokens. Without a limit a model could output it endlessly.
    "whitespace_pattern": r"[ \n\t]{1,80}",
    # Rejects schemas that cannot be enforced exactly, even if a schema sets `lenient` itself.
    "lenient": False,
    "coerce_one_of": False,
}
"""llguidance's options for JSON Schemas, which are the same in all services."""


class StructuredOutputsKind(enum.Enum):
    """Kinds of formats, with the meaning of `StructuredOutputs.text`. The names are vLLM's."""

    JSON = "json"
    """A JSON Schema, which is a JSON object."""
    REGEX = "regex"
    """A regular expression that matches whole outputs."""
    CHOICE = "choice"
    """A JSON list of the texts that are permitted as outputs."""
    GRAMMAR = "grammar"
    """A context-free grammar, in Lark or GBNF syntax."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The format to which a whole output, from its first to its last character, must conform."""

    kind: StructuredOutputsKind
    text: str

    def validate(self) -> None:
        """Raises InvalidArgument if the text is empty or exceeds a size limit. The limits apply to
        the number of bytes and, for JSON, to the number of values and their depth. Every service
        validates every request, so recent results are cached.
        """
        _validate(self)

    def choices(self) -> list[str]:
        """The permitted outputs of kind CHOICE. Raises InvalidArgument if `text` is malformed."""
        choices = _parsed(self)
        if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
            raise invalid("choice must be a list of strings")
        if not 0 < len(choices) <= MAX_CHOICES:
            raise invalid(f"choice has {len(choices)} texts; 1 to {MAX_CHOICES} are allowed")
        return choices


def invalid(problem: str) -> InvalidArgument:
    """Creates the error for a request whose `structured_outputs` has this problem."""
    return InvalidArgument(f"{FIELD}: {problem}", field=FIELD)


@lru_cache(KEPT_GRAMMARS)
def _validate(wanted: StructuredOutputs) -> None:
    try:
        size = len(wanted.text.encode())
    except UnicodeEncodeError as error:
        raise invalid("contains half a surrogate pair, which is not valid text") from error
    if not size:
        raise invalid(f"{wanted.kind.value} is empty")
    if size > MAX_TEXT_BYTES:
        raise invalid(f"{wanted.kind.value} has {size} bytes; at most {MAX_TEXT_BYTES} are allowed")
    if "\0" in wanted.text:
        raise invalid(f"{wanted.kind.value} must not contain the character NUL")
    if wanted.kind is StructuredOutputsKind.JSON:
        _check_schema(_parsed(wanted))
    elif wanted.kind is StructuredOutputsKind.CHOICE:
        wanted.choices()


def _check_schema(schema: object) -> None:
    if not isinstance(schema, dict):
        raise invalid("json must be a JSON Schema, which is an object")
    num_nodes, depth, level = 0, 0, list[object]([schema])
    while level and depth < MAX_DEPTH:
        num_nodes, depth = num_nodes + len(level), depth + 1
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise invalid(f"json is nested more than {MAX_DEPTH} deep")
    if num_nodes > MAX_NODES:
        raise invalid(f"json has {num_nodes} values; at most {MAX_NODES} are allowed")


def _parsed(wanted: StructuredOutputs) -> object:
    try:
        return json.loads(wanted.text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{wanted.kind.value} is not JSON") from error


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
