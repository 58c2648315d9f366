"""The gateway validates grammars in a process of its own."""

import asyncio
import json
import signal
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from services.common.errors import InvalidArgument, ResourceExhausted, Unavailable
from services.common.request.grammar_compiler import GrammarCompiler
from services.common.request.structured_outputs import (
    MAX_DEPTH,
    MAX_TEXT_BYTES,
    StructuredOutputs,
    StructuredOutputsKind,
)
from services.gateway.adapters.grammars import compiler_process
from services.gateway.adapters.grammars import judge as grammar_judge
from services.gateway.adapters.grammars.judge import GrammarJudge
from services.gateway.adapters.tokenizer.hf_tokenizer import load_tokenizer
from tests.gateway.tiny_tokenizer import write_tokenizer

JSON, REGEX = StructuredOutputsKind.JSON, StructuredOutputsKind.REGEX
CHOICE, GRAMMAR = StructuredOutputsKind.CHOICE, StructuredOutputsKind.GRAMMAR
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return load_tokenizer(directory).to_json()


@pytest.fixture(scope="module")
def judge(tokenizer_json: str) -> GrammarJudge:
    return GrammarJudge(lambda: tokenizer_json)


@pytest.fixture
def new_judge(tokenizer_json: str) -> GrammarJudge:
    """A judge that knows no verdict yet."""
    return GrammarJudge(lambda: tokenizer_json)


async def verdict(judge: GrammarJudge, kind: StructuredOutputsKind, text: str) -> str:
    """The message of the client's error, or "" if the grammar is accepted."""
    try:
        await judge.check(StructuredOutputs(kind, text), VOCAB_SIZE, [0])
    except InvalidArgument as error:
        return f"{error.field}: {error.message.partition(': ')[2]}"
    return ""


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


REFERRED = (
    *("Resp[int]", "Map<string,int>", "My Type", "List`1", "名前", "é", "A|B", "a%b", "a%20b"),
    *("a/b", "a~b", 'x"y', "a^b", "{x}", "a\\b", "#x", "a?b", "a%5Bb"),
)
"""Names of definitions with characters that a URI does not allow, or that have a meaning in it."""


def referring(name: str) -> dict[str, Any]:
    """A schema that refers to a definition by its unescaped name, as schema generators do."""
    pointer = name.replace("~", "~0").replace("/", "~1")
    return {"$ref": f"#/$defs/{pointer}", "$defs": {name: {"type": "integer"}}}


BAD = [
    (REGEX, "(", "unclosed group"),
    (REGEX, "a(?=b)", "look-around"),
    (REGEX, r"(a)\1", "backreferences"),
    (REGEX, "", "regex is empty"),
    (REGEX, "a\0b", "must not contain the character NUL"),
    (REGEX, "\ud800", "surrogate"),
    (REGEX, "a" * (MAX_TEXT_BYTES + 1), f"at most {MAX_TEXT_BYTES}"),
    (JSON, '{"type": "what"}', "Invalid type: what"),
    (JSON, '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
    (JSON, '{"not": {}, "x-guidance": {"lenient": true}}', 'Unimplemented keys: ["not"]'),
    (JSON, '{"oneOf": [{"type": "string"}, {"maxLength": 3}]}', "oneOf"),
    (JSON, '{"$ref": "#"}', "no output conforms to the"),
    (JSON, '{"$ref": "http://localhost/schema"}', "does not fetch"),
    (JSON, '{"$ref": "#/$defs/No[x]"}', "Pointer '/$defs/No%5Bx%5D' does not exist"),
    (JSON, '{"multipleOf": 500000000}', "multipleOf is supported only up to 429496729"),
    (JSON, '{"multipleOf": 0.0000000003}', "multipleOf is supported only up to 429496729"),
    (
        JSON,
        '{"multipleOf": 1e5, "$ref": "#/$defs/A", "$defs": {"A": {"multipleOf": 100000}}}',
        "multipleOf is supported only up to 429496729",
    ),
    (JSON, '{"type": "object", "minProperties": 2}', "minProperties of 2 is not supported"),
    (
        JSON,
        '{"patternProperties": {"^x$": {}}, "additionalProperties": false, "minProperties": 2}',
        "minProperties of 2 is not supported",
    ),
    (
        JSON,
        '{"items": {"allOf": [{"$ref": "#/$defs/A"}, {"required": ["a"]}]},'
        ' "$defs": {"A": {"minProperties": 3}}}',
        "minProperties of 3 is not supported where names are free and 1 are required",
    ),
    (JSON, '{"required": ["a", "b"], "maxProperties": 1, "type": "object"}', "Unsatisfiable"),
    (
        JSON,
        '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}',
        "requires itself endlessly",
    ),
    (
        JSON,
        '{"type": "array", "items": {"anyOf": [{"$ref": "#"}]}, "minItems": 1}',
        "requires itself endlessly",
    ),
    (JSON, '{"enum": []}', "Unsatisfiable"),
    (JSON, '{"allOf": [{"$ref": "#/allOf/' + "9" * 5000 + '"}]}', "parse array index"),
    (JSON, "[1]", "which is an object"),
    (JSON, "{", "json is not JSON"),
    (JSON, json.dumps(nested(MAX_DEPTH)), f"more than {MAX_DEPTH} deep"),
    (JSON, "[" * 30_000, "json is not JSON"),
    (JSON, json.dumps({"enum": [1] * 11_000}), "values; at most"),
    (CHOICE, "[]", "1 to"),
    (CHOICE, '["a", 1]', "must be a list of strings"),
    (GRAMMAR, "start: missing", 'unknown name: "missing"'),
    (GRAMMAR, "root ::= (", "GBNF"),
    (GRAMMAR, "root ::= " + "(" * 5000, "recursion"),
    (GRAMMAR, "start: a\na: b\nb: a", "no output conforms to the"),
]


@pytest.mark.parametrize(("kind", "text", "reason"), BAD, ids=[str(i) for i in range(len(BAD))])
async def test_what_cannot_be_compiled_is_refused_with_the_reason(
    kind: StructuredOutputsKind, text: str, reason: str, judge: GrammarJudge
) -> None:
    said = await verdict(judge, kind, text)
    assert said.startswith("structured_outputs: ")
    assert reason in said
    assert await verdict(judge, kind, text) == said, "the verdict is kept"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (JSON, "{}"),
        (JSON, json.dumps(nested(MAX_DEPTH - 20))),
        (JSON, '{"type": "object", "required": ["a"], "minProperties": 2}'),
        (JSON, '{"type": "object", "properties": {"a": {"$ref": "#"}}}'),
        (
            JSON,
            '{"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}',
        ),
        (
            JSON,
            '{"properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "type": "object",'
            ' "required": ["a"]}',
        ),
        (JSON, '{"minProperties": 2, "allOf": [{"required": ["a"]}]}'),
        *((JSON, json.dumps(referring(name))) for name in REFERRED),
        (REGEX, "(a+)+b"),
        (CHOICE, '["a", "", "\\n"]'),
        (GRAMMAR, 'root ::= "a" | "(" root ")"'),
        (GRAMMAR, 'start: "a"+'),
    ],
)
async def test_what_can_be_compiled_is_accepted(
    kind: StructuredOutputsKind, text: str, judge: GrammarJudge
) -> None:
    assert await verdict(judge, kind, text) == ""


@pytest.mark.parametrize("name", [*REFERRED, "Resp%5Bint%5D"])
def test_a_reference_is_found_as_a_validator_finds_it(tokenizer_json: str, name: str) -> None:
    schema = referring(name)
    if name == "Resp%5Bint%5D":
        schema["$defs"] = {"Resp[int]": {"type": "integer"}}
    if name not in ("a%20b", "a%5Bb"):  # the validator would decode these names
        assert Draft202012Validator(schema).is_valid(5)
        assert not Draft202012Validator(schema).is_valid("x")
    compiler = GrammarCompiler(tokenizer_json, VOCAB_SIZE, [0])
    matcher = compiler.compile(StructuredOutputs(JSON, json.dumps(schema)))
    tokenizer = Tokenizer.from_str(tokenizer_json)
    for text, is_good in (("5", True), ('"x"', False)):
        one = matcher.deep_copy()
        assert one.consume_tokens(tokenizer.encode(text).ids) == is_good


BOMBS = {
    "products": json.dumps(
        {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(2)]}
                for i in range(10)
            ]
        }
    ),
    "multiples": json.dumps({"type": "integer", "multipleOf": 99_991}),
    "properties": json.dumps({"properties": {f"key{i}": {"type": "string"} for i in range(3000)}}),
    "references": json.dumps(
        {
            "properties": {f"{i:x}": {"$ref": "#/x"} for i in range(1000)},
            "x": {"allOf": [{} for _ in range(3000)]},
        }
    ),
    "divisors": json.dumps(
        {
            "anyOf": [
                {"type": "integer", "multipleOf": n}
                for n in (593, 619, 647, 659, 701, 709, 727, 743)
            ]
        }
    ),
}
ENDLESS = {"divisors"}
"""Bombs whose compilation has not ended after a minute, with gigabytes of memory."""


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_takes_no_time_of_this_process(name: str, judge: GrammarJudge) -> None:
    await verdict(judge, REGEX, "a")  # starts the process that compiles
    judging = asyncio.create_task(verdict(judge, JSON, BOMBS[name]))
    began, turns = time.process_time(), 0
    while not judging.done():
        await asyncio.sleep(0.01)
        turns += 1
    took = time.process_time() - began
    assert took < 1
    assert turns > took / 0.1
    if name in ENDLESS:
        assert "takes too long to compile" in judging.result()
    assert await verdict(judge, REGEX, f"a|{name}") == ""


async def test_what_takes_too_long_is_refused_here_alone(
    new_judge: GrammarJudge, tokenizer_json: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the gateway limits the time of compilation. A worker with a slower processor must not
    refuse a grammar that the gateway has accepted.
    """
    monkeypatch.setattr(grammar_judge, "MAX_COMPILE_SECONDS", 0.0)
    assert "takes too long to compile" in await verdict(new_judge, REGEX, "[a-z]{1,30}")
    compiler = GrammarCompiler(tokenizer_json, VOCAB_SIZE, [0])
    assert not compiler.compile(StructuredOutputs(REGEX, "[a-z]{1,30}")).is_error()


async def test_no_more_wait_than_are_compiled_in_a_while(new_judge: GrammarJudge) -> None:
    texts = [f"[a-z]{{1,{n}}}" for n in range(1, 100)]
    outcomes = await asyncio.gather(
        *(new_judge.check(StructuredOutputs(REGEX, text), VOCAB_SIZE, [0]) for text in texts),
        return_exceptions=True,
    )
    refused = [one for one in outcomes if isinstance(one, ResourceExhausted)]
    assert len(refused) == len(texts) - 64
    assert await verdict(new_judge, REGEX, texts[-1]) == ""


async def test_calls_with_the_same_grammar_wait_for_one_compilation(
    new_judge: GrammarJudge,
) -> None:
    calls = [asyncio.create_task(verdict(new_judge, REGEX, "a{1,9}")) for _ in range(100)]
    await asyncio.sleep(0)
    calls[0].cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1:] == [""] * 99


async def test_grammars_of_clients_that_left_do_not_take_the_place_of_others(
    new_judge: GrammarJudge,
) -> None:
    for n in range(1, 100):
        call = asyncio.create_task(verdict(new_judge, REGEX, f"b{{1,{n}}}"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
    assert await verdict(new_judge, REGEX, "b") == ""


@pytest.mark.parametrize("wait_seconds", [0.1, 60.0])
async def test_a_killed_process_is_no_refusal(
    new_judge: GrammarJudge, monkeypatch: pytest.MonkeyPatch, wait_seconds: float
) -> None:
    """The process hangs. It is killed when the wait is over, or by something else before."""
    assert await verdict(new_judge, REGEX, "a") == ""
    assert new_judge._compiler is not None
    process = new_judge._compiler[1]._process
    monkeypatch.setattr(compiler_process, "_MOST_WAIT_SECONDS", wait_seconds)
    process.send_signal(signal.SIGSTOP)
    check = asyncio.create_task(verdict(new_judge, REGEX, "b"))
    if wait_seconds > 1:
        await asyncio.sleep(0.1)
        process.kill()
    with pytest.raises(Unavailable, match="has ended; try again"):
        await check
    monkeypatch.undo()
    assert await verdict(new_judge, REGEX, "b") == ""


async def test_a_tokenizer_that_does_not_fit_the_model_is_said_so(new_judge: GrammarJudge) -> None:
    with pytest.raises(InvalidArgument, match="not available with this model's tokenizer"):
        await new_judge.check(StructuredOutputs(REGEX, "a"), 10, [0])
