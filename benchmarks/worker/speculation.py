"""Measures gains and costs of speculation on the CPU: runs with and without it alternate.

    python -m benchmarks.worker.speculation --model 135m --threads 2 --rounds 5
    python -m benchmarks.worker.speculation --model 135m --text "random tokens" --rounds 15
    python -m benchmarks.worker.speculation --model 1.1b --draft-model 135m --num-tokens 32

Several engines run in one process, each with a model runner, a scheduler and a pool. One engine
runs without speculation. By default, a second engine drafts tokens with n-grams and a third one
with suffix trees. If --draft-model is given, the only other engine drafts tokens with that model.
All engines use one copy of the model's weights, because two copies at different memory locations
can differ in speed by more than the drafts cost. The output of a model with random weights is
unpredictable. Therefore the model is forced to write a given text: before sampling, the logit of
the text's next token is raised. Everything else is computed normally. Texts are tokenized for the
demo model.

Without a draft model, the gain depends on the text:

* an edit of a program: the prompt is a source file, and the answer is the file with names changed;
* an extraction: the prompt is lines of JSON, and the answer has some fields of each line;
* a continuation: the prompt is the beginning of a page in prose, and the answer is the next part;
* random tokens without repetition;
* a misleading text: the same pair of tokens recurs, each time followed by a different token;
* a step of an agent: a sentence and a tool call. The answers to earlier requests are steps
  of the same structure, with other files, names and lines.

The engines draft from the outputs of earlier requests, too. Before each measurement these outputs
are cleared, so that only the agent's step can use earlier steps.

With a draft model, the gain depends on the fraction of draft tokens that are right. The draft model
is forced to write the same text, with some randomly chosen tokens replaced. If the draft model is
given as a size, a random model of that size with the target model's vocabulary is used.

Times are measured from the first token to the last, and figures are medians of rounds. Tokens per
step are measured in the runs with speculation. On a machine with other load, use --processor-time
with one thread, which excludes the other programs' time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.common.arguments import add_sized_model, make_parser
from benchmarks.common.console import log, show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model, vocab_size
from benchmarks.worker.texts import Text, agent_steps, texts
from benchmarks.worker.told_engine import MAX_NUM_SEQS, ToldEngine

NUM_AT_ONCE, NUM_TOKENS_EACH = MAX_NUM_SEQS, 64
"""Number of concurrent requests, and number of tokens per request, in the loads without a draft
model that have several requests.
"""
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}
SUFFIX = {"method": "suffix"}
NUM_DRAFTS = 5
SHARES_RIGHT = (0.95, 0.8, 0.6, 0.3)
FEW_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Load:
    """A text that `num_at_once` concurrent requests write.

    The texts in `before` are written first, one after another. `share_right` is the fraction of the
    draft model's tokens that are right.
    """

    text: Text
    num_at_once: int
    share_right: float = 1
    before: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True)
class Gain:
    """The figures of one kind of speculation.

    They are the milliseconds per token without and with speculation, their ratio, the tokens per
    step, and the milliseconds per step of the draft model and of the target model. The target
    model's step is measured without speculation.
    """

    without: float
    speculating: float
    times: float
    tokens_a_step: float
    draft_step: float
    step: float


def main() -> None:
    parser = make_parser("worker.speculation", __doc__)
    add_sized_model(parser)
    parser.add_argument(
        "--draft-model", help="a directory or a size (default: n-grams and suffix trees)"
    )
    parser.add_argument("--text", help="measure this text alone (without --draft-model)")
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count processor time in place of wall time; with one thread",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each text")
    parser.add_argument("--num-tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--quick", action="store_true", help="a few tokens of each text, once")
    arguments = parser.parse_args()
    size, draft, num_threads = arguments.model, arguments.draft_model, arguments.threads
    if arguments.processor_time and num_threads > 1:
        parser.error("argument --processor-time: needs --threads 1")
    if arguments.text is not None and draft is not None:
        parser.error("argument --text: a draft model writes one text only")
    if arguments.text is not None and arguments.text not in _names(repetition_loads(1)):
        parser.error(f"argument --text: {arguments.text!r} is not one of the texts")
    clock = time.process_time if arguments.processor_time else time.perf_counter
    title = f"worker.speculation --model {size}"
    show(machine_text(machine(), title if draft is None else f"{title} --draft-model {draft}"))
    model = find_model(size)
    num_tokens, num_rounds = arguments.num_tokens, arguments.rounds
    if arguments.quick:
        num_tokens, num_rounds = 24, 1
    if draft is None:
        table = measure_repetition(
            model, num_threads, num_rounds, num_tokens, arguments.text, clock
        )
    else:
        directory = find_model(draft, vocab_size(model))
        table = measure_draft_model(model, directory, num_threads, num_rounds, num_tokens, clock)
    show(uvloop.run(table))


async def measure_repetition(
    model: Path,
    num_threads: int,
    num_rounds: int,
    num_tokens: int,
    text: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Measures n-grams and suffix trees, and returns their table.

    Answers have `num_tokens` tokens. If `text` is given, only the text with that name is measured.
    `clock` returns seconds.
    """
    lines = ["| text | at once | without, ms a token |"]
    lines[0] += " n-grams | speed-up | tokens a step | suffix trees | speed-up | tokens a step |"
    lines.append("| --- |" + 8 * " ---: |")
    wanted = [load for load in repetition_loads(num_tokens) if text in (None, load.text.name)]
    measured = await measure(model, num_threads, (NGRAM, SUFFIX), wanted, num_rounds, clock)
    for load, gains in zip(wanted, measured, strict=True):
        line = f"| {load.text.name} | {load.num_at_once} | {gains[0].without:.2f} |"
        for gain in gains:
            line += f" {gain.speculating:.2f} | {gain.times:.2f} | {gain.tokens_a_step:.2f} |"
        lines.append(line)
    return "\n".join(lines)


async def measure_draft_model(
    model: Path,
    draft: Path,
    num_threads: int,
    num_rounds: int,
    num_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Measures a draft model, and returns its table.

    Answers have `num_tokens` tokens. `clock` returns seconds.
    """
    lines = ["| right | at once | without, ms a token | with | speed-up | tokens a step |"]
    lines[0] += " step of the draft model, of the model's |"
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    wanted = draft_model_loads(num_tokens)
    measured = await measure(model, num_threads, (config,), wanted, num_rounds, clock)
    for load, (gain,) in zip(wanted, measured, strict=True):
        lines.append(
            f"| {load.share_right} | {load.num_at_once} | {gain.without:.2f} | "
            f"{gain.speculating:.2f} | {gain.times:.2f} | {gain.tokens_a_step:.2f} | "
            f"{gain.draft_step / gain.step:.3f} |"
        )
    return "\n".join(lines)


async def measure(
    model: Path,
    num_threads: int,
    configs: Sequence[Mapping[str, object]],
    loads: Sequence[Load],
    num_rounds: int,
    clock: Callable[[], float],
) -> list[list[Gain]]:
    """Measures the gains of each load with each kind of speculation.

    The first round is a warm-up and is discarded.
    """
    async with AsyncExitStack() as stack:
        engines = [ToldEngine(model, num_threads, config, clock) for config in (None, *configs)]
        for engine in engines:
            await stack.enter_async_context(engine.composed)
        for engine in engines[1:]:
            engine.model.share_weights(engines[0].model)
        gc.collect()
        gc.freeze()
        gains = []
        for load in loads:
            turns = [await _round(engines, load, at) for at in range(num_rounds + 1)]
            gains.append([_gain(engines, turns, at) for at in range(1, len(engines))])
            log(f"{load.text.name}, {load.num_at_once} at once: {gains[-1]}")
    return gains


def _gain(
    engines: Sequence[ToldEngine], turns: Sequence[Sequence[tuple[float, float]]], which: int
) -> Gain:
    without, speculating = (
        statistics.median(turn[index][0] for turn in turns[1:]) for index in (0, which)
    )
    draft = engines[which].draft_model
    return Gain(
        without=without,
        speculating=speculating,
        times=statistics.median(turn[0][0] / turn[which][0] for turn in turns[1:]),
        tokens_a_step=turns[-1][which][1],
        draft_step=0 if draft is None else 1000 * statistics.median(draft.seconds),
        step=1000 * statistics.median(engines[0].model.seconds),
    )


async def _round(
    engines: Sequence[ToldEngine], load: Load, number: int
) -> list[tuple[float, float]]:
    """Runs a load once on each engine. Every second round runs the engines in reverse order."""
    turns = []
    for engine in engines if number % 2 else engines[::-1]:
        engine.forget()
        for text in load.before:
            await engine.turn(text, 1)
        turns.append(await engine.turn(load.text, load.num_at_once, load.share_right))
    return turns if number % 2 else turns[::-1]


def repetition_loads(num_tokens: int) -> list[Load]:
    """The loads without a draft model: one request for every text, many requests for some texts."""
    every = texts(num_tokens)
    together = [replace(text, answer=text.answer[:NUM_TOKENS_EACH]) for text in every[::2]]
    *before, step = agent_steps(num_tokens)
    return [
        *(Load(text, 1) for text in every),
        Load(step, 1, before=tuple(before)),
        *(Load(text, NUM_AT_ONCE) for text in together),
    ]


def _names(loads: Sequence[Load]) -> set[str]:
    return {load.text.name for load in loads}


def draft_model_loads(num_tokens: int) -> list[Load]:
    """The loads with a draft model. One request or a few requests continue prose, with different
    fractions of right draft tokens.
    """
    prose = texts(num_tokens)[2]
    return [Load(prose, count, share) for count in (1, FEW_AT_ONCE) for share in SHARES_RIGHT]


if __name__ == "__main__":
    main()
