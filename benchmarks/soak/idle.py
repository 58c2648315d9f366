"""Sends no request for minutes, while programs of agents are paused.

    python -m benchmarks.soak idle --minutes 5 [--programs N] [--model DIR]

The prefix cache must remain, the services' memory must not grow, and no service may log a warning.
A prompt is sent twice, so that its prefix is found in the cache the second time. Each program has a
turn before the idle time, and another one after it. After the given time the prompt is sent once
more. The exit status is 1 if the last answer or its number of cached prompt tokens differs from the
second answer's, if a program's second turn does not find the prompt of its first turn in the cache,
if a service grew, or if a service logged a warning or an error.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.common.arguments import add_model, count, make_parser, positive
from benchmarks.common.models import read_config
from benchmarks.common.process_usage import usage_of
from benchmarks.common.stack import Stack
from benchmarks.soak.attack.findings import Finding, Sample, findings, table
from services.cli.settings import UpSettings

NUM_PROMPT_TOKENS, NUM_TOKENS = 400, 16
FIRST_TOKEN = 20
NUM_PROGRAM_TOKENS = 64
"""Number of tokens of a program's first prompt, and of the tokens that each further turn adds."""
BLOCK_SIZE = 16
AT_ONCE = 16
ANSWER_SECONDS = 60.0
SAMPLES, SAMPLE_SECONDS = 60, 10.0
WARM_UP_SHARE, WARM_UP_SECONDS = 0.25, 300.0
MB_PER_HOUR = 24.0
WARNING_LEVELS = (" warning ", " error ", " critical ")


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion, and the number of cached tokens of its prompt."""

    text: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers before and after the idle time, how many programs found their contexts again, the
    growth of each process, and the logged warnings.
    """

    before: Answer
    after: Answer
    num_programs: int
    num_continued: int
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether both answers and their cached tokens are equal, every program found its context,
        no process grew, and no warning was logged.
        """
        same = self.before.num_cached_tokens > 0 and self.after == self.before
        grew = any(finding.complaint for finding in self.findings)
        return same and self.num_continued == self.num_programs and not (grew or self.warnings)


async def idle(model: Path, minutes: float, num_programs: int) -> Outcome:
    """Runs the test. Raises RuntimeError if the services do not start."""
    config = read_config(model)
    vocab_size = int(config["vocab_size"])
    longest = int(config["max_position_embeddings"])
    num_tokens = min(NUM_PROMPT_TOKENS, longest - NUM_TOKENS)
    prompt = [FIRST_TOKEN + i % (vocab_size - FIRST_TOKEN) for i in range(num_tokens)]
    # Twice as many tokens as are sent.
    num_cached = 2 * (num_tokens + (2 * NUM_PROGRAM_TOKENS + NUM_TOKENS) * (num_programs + 1))
    settings = UpSettings(
        model=model,
        policy="program",
        num_blocks=num_cached // BLOCK_SIZE,
        max_num_seqs=AT_ONCE,
    )
    async with Stack(settings) as stack:
        url = f"http://{stack.http}/v1/completions"
        await _complete(url, prompt)
        before = await _complete(url, prompt)
        await _all_turns(url, vocab_size, num_programs, 1)
        samples = await _samples(stack, 60 * minutes)
        turns = await _all_turns(url, vocab_size, num_programs, 2)
        after = await _complete(url, prompt)
        warnings = [
            f"{name}: {line}"
            for name, log in stack.logs().items()
            for line in log.splitlines()
            if any(level in line for level in WARNING_LEVELS)
        ]
    warm_up = min(WARM_UP_SHARE * 60 * minutes, WARM_UP_SECONDS)
    found = findings(samples, warm_up, MB_PER_HOUR)
    num_continued = sum(turn.num_cached_tokens >= NUM_PROGRAM_TOKENS for turn in turns)
    return Outcome(before, after, num_programs, num_continued, found, tuple(warnings))


async def _samples(stack: Stack, seconds: float) -> list[Sample]:
    """Samples the memory of the services at regular intervals for `seconds`."""
    begun, samples = time.monotonic(), list[Sample]()
    every = min(seconds / SAMPLES, SAMPLE_SECONDS)
    while (passed := time.monotonic() - begun) < seconds:
        usages = {name: usage_of(pid) for name, pid in stack.pids().items()}
        samples.append(Sample(passed, usages))
        await asyncio.sleep(every)
    return samples


async def _all_turns(url: str, vocab_size: int, num_programs: int, turn: int) -> list[Answer]:
    """Sends a turn of each program. Each turn adds NUM_PROGRAM_TOKENS tokens to the prompt."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def turn_of(number: int) -> Answer:
        first, spread = 7919 * (number + 1), vocab_size - FIRST_TOKEN
        prompt = [FIRST_TOKEN + (first + i * i) % spread for i in range(turn * NUM_PROGRAM_TOKENS)]
        async with limit:
            return await _complete(url, prompt, job_id=f"idle-{number}")

    return await asyncio.gather(*map(turn_of, range(num_programs)))


async def _complete(url: str, prompt: list[int], **fields: str) -> Answer:
    """Sends a prompt over a new connection, because only the connections between the services are
    meant to have been idle.
    """
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= fields
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS) as http:
        answer = (await http.post(url, json=body)).raise_for_status().json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(answer["choices"][0]["text"], cached)


def report(outcome: Outcome) -> str:
    before, after = outcome.before.num_cached_tokens, outcome.after.num_cached_tokens
    same = "the same" if outcome.after.text == outcome.before.text else "ANOTHER"
    return "\n".join(
        (
            table(outcome.findings),
            "",
            f"{before} prompt tokens were cached before, {after} after; {same} answer; "
            f"{outcome.num_continued} of {outcome.num_programs} programs found their contexts; "
            f"{len(outcome.warnings)} warnings",
            *outcome.warnings,
        )
    )


def parse_options(argv: Sequence[str]) -> tuple[Path, float, int]:
    parser = make_parser("soak idle", __doc__)
    add = parser.add_argument
    add("--minutes", type=positive, default=5.0, help="minutes without requests (default: 5)")
    add("--programs", type=count, default=100, help="number of paused programs (default: 100)")
    add_model(parser)
    parsed = parser.parse_args(argv)
    return parsed.model, parsed.minutes, parsed.programs


def main(argv: Sequence[str]) -> int:
    """Runs the test and prints the report. Returns 1 if it failed."""
    outcome = asyncio.run(idle(*parse_options(argv)))
    print(report(outcome))
    return 0 if outcome.is_good else 1
