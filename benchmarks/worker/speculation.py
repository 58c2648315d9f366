"""What speculation gains and costs on the CPU, by what is written: with it and without, in turns.

    python -m benchmarks.worker.speculation --model 135m --threads 2 --rounds 5

Runner, scheduler and pool in one process, twice over the same weights: once with n-grams, once
without. A model of random weights writes nothing that could be guessed, so it is told what to
write: the logit of the next token of a text is raised. All else is computed as it would be. Texts
are this project's, by the tokens of the demo model:

* an edit of a program: the prompt is one of its files, the answer the same with names changed;
* an extraction: the prompt is lines of JSON, the answer some fields of each;
* a continuation: the prompt is the beginning of a page in prose, the answer goes on with it;
* tokens drawn at random, which nothing repeats;
* what misleads: two tokens that come again and again, each time with another one behind them.

Figures are medians of rounds, from the first token to the last. Tokens a step are those of the runs
with speculation.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import uvloop
from tokenizers import Tokenizer

from benchmarks.common.arguments import make_parser
from benchmarks.common.console import log, show
from benchmarks.common.in_process import InProcess
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model
from services.worker.backends.attention import LayerAttention
from services.worker.backends.lora import LoraRows
from services.worker.core.model_runner import ModelRunner
from services.worker.core.worker import Worker
from services.worker.models.model import Model
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
RAISED = 1e4
"""More than any logit is above another."""
MAX_MODEL_LEN = 1024
LONGEST_PROMPT, NUM_TOKENS = 700, 256
NUM_AT_ONCE, NUM_TOKENS_EACH = 32, 64
"""Requests of the loads that are not of one, and tokens of each."""
CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}


@dataclass(frozen=True, slots=True)
class Text:
    """What is written: the tokens of a prompt, and of an answer to it."""

    name: str
    prompt: list[int]
    answer: list[int]


class ToldModel:
    """A Model that writes what it is told, at whatever cost it has."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._next_tokens = torch.zeros(MAX_MODEL_LEN, dtype=torch.int64)
        self.num_steps = 0

    def tell(self, text: Text) -> None:
        """What all sequences consist of from here on. Steps are counted anew."""
        self.num_steps = 0
        tokens = torch.tensor([*text.prompt, *text.answer][1:MAX_MODEL_LEN])
        self._next_tokens[: len(tokens)] = tokens

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed(token_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: LayerAttention,
        embedded: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
        lora: LoraRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.num_steps += 1
        found = self._model.forward(token_ids, positions, attention, embedded, wanted, lora)
        if found[1] is not None:
            at = positions if wanted is None else positions[wanted]
            found[1][torch.arange(len(at)), self._next_tokens[at]] += RAISED
        return found


class Engine:
    """A replica in this process, with speculation or without."""

    def __init__(self, model: Path, num_threads: int, *, speculates: bool) -> None:
        self._told: list[ToldModel] = []
        settings = WorkerSettings(
            model=model,
            num_threads=num_threads,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=NUM_AT_ONCE,
            num_blocks=NUM_AT_ONCE * MAX_MODEL_LEN // 16,
            speculative_config=json.dumps(CONFIG) if speculates else None,
        )
        self.composed = InProcess(settings, self._replace_model)

    def _replace_model(self, worker: Worker) -> None:
        runner = worker.runner
        if not isinstance(runner, ModelRunner):
            raise TypeError("this model is not run in steps of tokens")
        self._told.append(ToldModel(runner.model))
        runner.model = self._told[0]

    async def turn(self, text: Text, num_at_once: int) -> tuple[float, float]:
        """Milliseconds a token of each request, and tokens of each in a step after the first."""
        self._told[0].tell(text)
        arrivals = await asyncio.gather(*(self._arrivals(text) for _ in range(num_at_once)))
        began = max(times[0][0] for times in arrivals)
        seconds = max(times[-1][0] for times in arrivals) - began
        behind = [sum(count for at, count in times if at > began) for times in arrivals]
        num_steps = self._told[0].num_steps - 1
        return 1000 * seconds / statistics.mean(behind), (len(text.answer) - 1) / num_steps

    async def _arrivals(self, text: Text) -> list[tuple[float, int]]:
        """When tokens came, and how many."""
        pieces = self.composed.client.generate(text.prompt, len(text.answer))
        return [(time.perf_counter(), count) async for count in pieces]


def main() -> None:
    """Prints a table."""
    parser = make_parser("worker.speculation", (__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", default="135m", help="a directory, or the size of a random model"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each text")
    parser.add_argument("--quick", action="store_true", help="a few tokens of each text, once")
    arguments = parser.parse_args()
    show(machine_text(machine(), f"worker.speculation --model {arguments.model}"))
    model = find_model(arguments.model)
    num_tokens, num_rounds = (24, 1) if arguments.quick else (NUM_TOKENS, arguments.rounds)
    show(uvloop.run(measure(model, arguments.threads, num_rounds, num_tokens)))


async def measure(model: Path, num_threads: int, num_rounds: int, num_tokens: int) -> str:
    """The table, after a round that does not count: of answers of so many tokens."""
    lines = ["| text | at once | without, ms a token | with | speed-up | tokens a step |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    async with AsyncExitStack() as stack:
        engines = [Engine(model, num_threads, speculates=flag) for flag in (False, True)]
        for engine in engines:
            await stack.enter_async_context(engine.composed)
        gc.collect()
        gc.freeze()
        for text, num_at_once in loads(num_tokens):
            turns = [await _round(engines, text, num_at_once, at) for at in range(num_rounds + 1)]
            without, speculating = (
                statistics.median(turn[index][0] for turn in turns[1:]) for index in (0, 1)
            )
            gain = statistics.median(turn[0][0] / turn[1][0] for turn in turns[1:])
            tokens = turns[-1][1][1]
            lines.append(
                f"| {text.name} | {num_at_once} | {without:.2f} | {speculating:.2f} "
                f"| {gain:.2f} | {tokens:.2f} |"
            )
            log(lines[-1])
    return "\n".join(lines)


async def _round(
    engines: Sequence[Engine], text: Text, num_at_once: int, number: int
) -> list[tuple[float, float]]:
    """A turn of each engine, the other one first in every second round."""
    order = engines if number % 2 else engines[::-1]
    turns = [await engine.turn(text, num_at_once) for engine in order]
    return turns if number % 2 else turns[::-1]


def loads(num_tokens: int) -> list[tuple[Text, int]]:
    """What is written, and by how many requests at once."""
    every = texts(num_tokens)
    together = [replace(text, answer=text.answer[:NUM_TOKENS_EACH]) for text in every[::2]]
    return [*((text, 1) for text in every), *((text, NUM_AT_ONCE) for text in together)]


def texts(num_tokens: int) -> list[Text]:
    """An edit, an extraction, a continuation, random tokens, what misleads."""
    program = (ROOT / "services/worker/core/layout.py").read_text()
    records = [
        {"id": 1000 + 37 * number, "name": name, "city": city, "paid": number % 3 == 0}
        for number, (name, city) in enumerate(zip(_NAMES, _CITIES, strict=True))
    ]
    lines = "\n".join(map(json.dumps, records))
    found = "\n".join(json.dumps({"name": of["name"], "city": of["city"]}) for of in records)
    page = (ROOT / "docs/architecture.md").read_text().partition("## What fails how")[2]
    drawn = np.random.default_rng(7).permutation(4000)[:600].tolist()
    misleading = [token for own in drawn[:200] for token in (4001, 4002, own)]
    start = "class SamplingRequests"
    edited = program[program.index(start) :]
    edited = edited.replace("firsts", "beginnings").replace("counts", "numbers")
    prompt = program[program.index("@dataclass(frozen=True, slots=True)\nclass Sampling") :]
    third = len(page) // 3
    every = [
        Text("edit of a program", _tokens(prompt)[-LONGEST_PROMPT:], _tokens(edited)),
        Text("extraction from JSON", _tokens(lines), _tokens(found)),
        Text("continuation of prose", _tokens(page[:third]), _tokens(page[third:])),
        Text("random tokens", drawn[:300], drawn[300:]),
        Text("what misleads", misleading[:300], misleading[300:]),
    ]
    return [replace(text, answer=text.answer[:num_tokens]) for text in every]


def _tokens(text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(ROOT / "models/demo/tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


_NAMES = (
    *("Ada Byron", "Alan Kay", "Barbara Liskov", "Edsger Dijkstra", "Grace Hopper"),
    *("John Backus", "Ken Iverson", "Leslie Lamport", "Niklaus Wirth", "Radia Perlman"),
)
_CITIES = (
    *("London", "Springfield", "Los Angeles", "Rotterdam", "New York"),
    *("Philadelphia", "Camrose", "Brooklyn", "Winterthur", "Portsmouth"),
)

if __name__ == "__main__":
    main()
