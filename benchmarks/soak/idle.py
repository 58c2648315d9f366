"""Leaves the four services alone, and fails if they forget or complain meanwhile.

    python -m benchmarks.soak idle --minutes 5 [--model DIR]

A prompt is asked twice, so that the second time its prefix comes from the cache; then nothing is
asked for the given time, and then the same once more. The exit status is 1 if the last answer is
another one, if fewer tokens of its prompt were cached, or if a service logged a warning or an
error.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.common.stack import Stack
from services.cli.settings import UpSettings

NUM_PROMPT_TOKENS, NUM_TOKENS = 400, 16
FIRST_TOKEN = 20
ANSWER_SECONDS = 60.0
COMPLAINTS = (" warning ", " error ", " critical ")


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion, and how many tokens of its prompt were cached."""

    text: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers before and after, and the lines that complain."""

    before: Answer
    after: Answer
    complaints: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing was forgotten and nothing went wrong."""
        return (
            self.before.num_cached_tokens > 0 and self.after == self.before and not self.complaints
        )


async def idle(model: Path, minutes: float) -> Outcome:
    """Runs it. Raises RuntimeError when the services do not start."""
    config = json.loads((model / "config.json").read_text())
    num_tokens = min(NUM_PROMPT_TOKENS, int(config["max_position_embeddings"]) - NUM_TOKENS)
    prompt = [
        FIRST_TOKEN + i % (int(config["vocab_size"]) - FIRST_TOKEN) for i in range(num_tokens)
    ]
    async with Stack(UpSettings(model=model)) as stack:
        url = f"http://{stack.http}/v1/completions"
        await _ask(url, prompt)
        before = await _ask(url, prompt)
        await asyncio.sleep(60 * minutes)
        after = await _ask(url, prompt)
        complaints = [
            f"{name}: {line}"
            for name, log in stack.logs().items()
            for line in log.splitlines()
            if any(level in line for level in COMPLAINTS)
        ]
    return Outcome(before, after, tuple(complaints))


async def _ask(url: str, prompt: list[int]) -> Answer:
    """A connection of its own for each: only those between the services are kept."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS) as http:
        answer = (await http.post(url, json=body)).raise_for_status().json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(answer["choices"][0]["text"], cached)


def report(outcome: Outcome) -> str:
    """What was found, for people."""
    before, after = outcome.before.num_cached_tokens, outcome.after.num_cached_tokens
    same = "the same" if outcome.after.text == outcome.before.text else "ANOTHER"
    return "\n".join(
        (
            f"{before} prompt tokens were cached before, {after} after; {same} answer; "
            f"{len(outcome.complaints)} warnings",
            *outcome.complaints,
        )
    )


def parse_options(argv: Sequence[str]) -> tuple[Path, float]:
    """The command line. Ends the process with one sentence when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak idle",
        description="Leave the services alone; fail if they forget or complain.",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument(
        "--model", type=Path, default=Path("models/demo"), help="directory (default: models/demo)"
    )
    parsed = parser.parse_args(argv)
    if not parsed.minutes > 0:
        parser.error("argument --minutes: must be above 0")
    if not (parsed.model / "config.json").is_file():
        parser.error(f"{parsed.model} is not a model directory")
    return parsed.model, parsed.minutes


def main(argv: Sequence[str]) -> int:
    """Runs, prints, judges."""
    outcome = asyncio.run(idle(*parse_options(argv)))
    print(report(outcome))
    return 0 if outcome.is_good else 1
