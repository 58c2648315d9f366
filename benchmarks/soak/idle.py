"""Sends no request for minutes. The prefix cache must remain, and no service may log a warning.

    python -m benchmarks.soak idle --minutes 5 [--model DIR]

A prompt is sent twice, so that its prefix is found in the cache the second time. After the given
time the prompt is sent once more. The exit status is 1 if the last answer or its number of cached
prompt tokens differs from the second answer's, or if a service logged a warning or an error.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.common.arguments import add_model, make_parser, positive
from benchmarks.common.models import read_config
from benchmarks.common.stack import Stack
from services.cli.settings import UpSettings

NUM_PROMPT_TOKENS, NUM_TOKENS = 400, 16
FIRST_TOKEN = 20
ANSWER_SECONDS = 60.0
WARNING_LEVELS = (" warning ", " error ", " critical ")


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion, and the number of cached tokens of its prompt."""

    text: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers before and after the idle time, and the logged warnings."""

    before: Answer
    after: Answer
    warnings: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether both answers and their cached tokens are equal, and no warning was logged."""
        return self.before.num_cached_tokens > 0 and self.after == self.before and not self.warnings


async def idle(model: Path, minutes: float) -> Outcome:
    """Runs the test. Raises RuntimeError if the services do not start."""
    config = read_config(model)
    num_tokens = min(NUM_PROMPT_TOKENS, int(config["max_position_embeddings"]) - NUM_TOKENS)
    prompt = [
        FIRST_TOKEN + i % (int(config["vocab_size"]) - FIRST_TOKEN) for i in range(num_tokens)
    ]
    async with Stack(UpSettings(model=model)) as stack:
        url = f"http://{stack.http}/v1/completions"
        await _complete(url, prompt)
        before = await _complete(url, prompt)
        await asyncio.sleep(60 * minutes)
        after = await _complete(url, prompt)
        warnings = [
            f"{name}: {line}"
            for name, log in stack.logs().items()
            for line in log.splitlines()
            if any(level in line for level in WARNING_LEVELS)
        ]
    return Outcome(before, after, tuple(warnings))


async def _complete(url: str, prompt: list[int]) -> Answer:
    """Sends a prompt over a new connection, because only the connections between the services are
    meant to have been idle.
    """
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS) as http:
        answer = (await http.post(url, json=body)).raise_for_status().json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(answer["choices"][0]["text"], cached)


def report(outcome: Outcome) -> str:
    before, after = outcome.before.num_cached_tokens, outcome.after.num_cached_tokens
    same = "the same" if outcome.after.text == outcome.before.text else "ANOTHER"
    return "\n".join(
        (
            f"{before} prompt tokens were cached before, {after} after; {same} answer; "
            f"{len(outcome.warnings)} warnings",
            *outcome.warnings,
        )
    )


def parse_options(argv: Sequence[str]) -> tuple[Path, float]:
    parser = make_parser("soak idle", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=positive, default=5.0, help="how long (default: 5)")
    add_model(parser)
    parsed = parser.parse_args(argv)
    return parsed.model, parsed.minutes


def main(argv: Sequence[str]) -> int:
    """Runs the test and prints the report. Returns 1 if it failed."""
    outcome = asyncio.run(idle(*parse_options(argv)))
    print(report(outcome))
    return 0 if outcome.is_good else 1
