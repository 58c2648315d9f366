"""Reads the parts of a step log's entries."""

from contextlib import suppress

from services.cli.replay.fields import Field
from services.common.errors import InvalidArgument
from services.common.request.encoder_input import EncoderInput
from services.common.request.program import DeclaredProgram
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.output import ModelRunnerOutput
from services.scheduler.core.step_costs import ObservedStep


def read_sampling(entry: Field, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        eos_token_ids=tuple(entry["eos_token_ids"].integers()),
        stop_token_ids=tuple(entry["stop_token_ids"].integers()),
        repetition_detection=_read_repetition(entry["repetition_detection"]),
        min_tokens=entry["min_tokens"].integer(),
    )


def read_observed(entry: Field) -> list[ObservedStep]:
    """The steps whose times became known just before the entry's step was planned."""
    steps = []
    for item in entry.get("observed_steps", []).items():
        parts = list(item.items())
        if len(parts) != 3:
            raise item.wrong("must be a number of requests, a number of tokens, and seconds")
        num_requests, num_tokens, seconds = parts
        steps.append((num_requests.integer(1), num_tokens.integer(), seconds.number(0, 1e18)))
    return steps


def read_items(field: Field, num_tokens: int) -> tuple[EncoderInput, ...]:
    items: list[EncoderInput] = []
    for entry in field.items():
        parts = list(entry.items())
        if len(parts) != 4:
            raise entry.wrong("must be an identifier, an offset, a length, and positions or null")
        name, offset, length, embeds = parts
        begin = offset.integer(items[-1].end if items else 0, num_tokens - 1)
        count = length.integer(1, num_tokens - begin)
        positions = None if embeds.value is None else tuple(embeds.integers(0, count - 1))
        items.append(EncoderInput(name.text(), begin, count, positions))
    return tuple(items)


def read_grammar(entry: Field) -> GrammarStatus | None:
    if "grammar" not in entry.members():
        return None
    return entry["grammar"].member(GrammarStatus)


def _read_refused(entry: Field, token_ids: list[list[int]]) -> dict[int, int]:
    """Maps a request's index in the step to the position of the first token its grammar refuses."""
    refused = _by_index(entry.get("refused_tokens", {}), len(token_ids))
    return {index: of.integer(0, len(token_ids[index])) for index, of in refused.items()}


def _by_index(entry: Field, num_requests: int) -> dict[int, Field]:
    """Maps a request's index in the step to the request's value in `entry`."""
    found = {}
    for name in entry.members():
        index = int(name) if name.isdecimal() else num_requests
        if index >= num_requests:
            raise entry[name].wrong("must be of a request of the step")
        found[index] = entry[name]
    return found


def read_program(entry: Field) -> DeclaredProgram | None:
    if "program" not in entry.members():
        return None
    program = entry["program"]
    declared = DeclaredProgram(
        program["id"].text(),
        program["parent_id"].text(),
        program["tool"].text(),
        program["ends"].boolean(),
        program.get("keep_seconds", 0).integer(0, 2**32),
    )
    try:
        declared.check()
    except InvalidArgument as error:
        raise program.wrong(f"must describe a program ({error.message})") from None
    return declared


def read_tenant(entry: Field) -> bytes:
    with suppress(ValueError):
        return bytes.fromhex(entry.text())
    raise entry.wrong("must be hexadecimal")


def read_digest(entry: Field) -> bytes:
    with suppress(ValueError):
        digest = bytes.fromhex(entry.text())
        if len(digest) in (0, 32):
            return digest
    raise entry.wrong("must be a SHA-256 in hexadecimal")


def _read_repetition(entry: Field) -> RepetitionDetection | None:
    if entry.value is None:
        return None
    values = entry.integers()
    if len(values) != 3:
        raise entry.wrong("must be two sizes and a count")
    repetition = RepetitionDetection(*values)
    try:
        repetition.validate()
    except InvalidArgument as error:
        raise entry.wrong(f"must describe a repetition ({error.message})") from None
    return repetition


def read_output(entry: Field, num_requests: int) -> ModelRunnerOutput:
    tokens, drafts = entry["token_ids"], entry["draft_token_ids"]
    token_ids = [item.integers() for item in tokens.items()]
    if len(token_ids) != num_requests:
        raise tokens.wrong(f"must list tokens of {num_requests} requests")
    draft_token_ids = [item.integers(-1) for item in drafts.items()]
    if len(draft_token_ids) not in (0, num_requests):
        raise drafts.wrong(f"must list drafts of {num_requests} requests, or nothing")
    nan = entry["nan_requests"].integers(0, num_requests - 1)
    pooled = entry.get("pooled", []).integers(0, num_requests - 1)
    errors = _by_index(entry.get("grammar_errors", {}), num_requests)
    return ModelRunnerOutput(
        token_ids,
        draft_token_ids=draft_token_ids,
        nan_requests=frozenset(nan),
        pooled=dict.fromkeys(pooled),
        refused_tokens=_read_refused(entry, token_ids),
        grammar_errors={index: error.text() for index, error in errors.items()},
    )
