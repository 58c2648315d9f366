"""Builds the sessions of a load and their arrival times from the settings."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from services.cli.bench.core.dataset import DatasetError, DatasetLoad, read_dataset
from services.cli.bench.core.program_load import ProgramLoad
from services.cli.bench.core.rate import RequestRate, unit_arrivals
from services.cli.bench.core.session import Session
from services.cli.bench.core.synthetic import SyntheticLoad
from services.cli.bench.core.trace import TraceError, TraceLine, TraceLoad, read_trace
from services.cli.bench.core.vocabulary import Vocabulary
from services.cli.bench.settings import BenchSettings
from services.cli.errors import CommandError
from services.simulation.laboratory.workloads import Traffic, generate

MAX_TOKENS = 1 << 20
"""Limit on the tokens of a program (an agent's session) if the server does not report
`max_model_len`.
"""


def trace_lines(path: Path) -> list[TraceLine]:
    try:
        lines = read_trace(_text(path).splitlines())
    except TraceError as error:
        raise CommandError(f"--trace {path}: {error}") from None
    if not lines:
        raise CommandError(f"--trace {path} holds no request")
    return lines


def dataset_load(settings: BenchSettings, path: Path) -> DatasetLoad:
    try:
        items = read_dataset(_text(path))
    except DatasetError as error:
        raise CommandError(f"--dataset {path}: {error}") from None
    return DatasetLoad(
        items, settings.turns, settings.output_len, settings.think_seconds, settings.seed
    )


def synthetic_load(settings: BenchSettings, vocabulary: Vocabulary) -> SyntheticLoad:
    return SyntheticLoad(
        vocabulary=vocabulary,
        input_len=settings.input_len,
        output_len=settings.output_len,
        prefix_len=settings.prefix_len,
        num_prefixes=settings.num_prefixes,
        turns=settings.turns,
        think_seconds=settings.think_seconds,
        seed=settings.seed,
    )


def program_load(
    settings: BenchSettings, name: str, vocabulary: Vocabulary, max_tokens: int
) -> ProgramLoad:
    """The programs of a workload. Each ends before its next prompt would exceed `max_tokens`."""
    traffic = Traffic(
        settings.num_programs, 1.0, settings.seed, settings.token_scale, max_tokens=max_tokens
    )
    return ProgramLoad(
        generate(name, traffic),
        vocabulary,
        seed=settings.seed,
        says_names=not settings.anonymous,
    )


def trace_load(
    settings: BenchSettings, lines: list[TraceLine], vocabulary: Vocabulary
) -> TraceLoad:
    return TraceLoad(
        lines,
        vocabulary,
        time_scale=settings.time_scale,
        token_scale=settings.token_scale,
        seed=settings.seed,
    )


def arrivals(
    sessions: Iterable[Session], rate: RequestRate | None, burstiness: float, seed: int
) -> Iterator[tuple[float, Session]]:
    """Yields each session with its arrival time in seconds after the start. `rate` determines the
    times. Without a rate, the sessions' own arrival times are used.
    """
    if rate is None:
        for session in sessions:
            yield session.arrival_seconds or 0.0, session
        return
    draw = random.Random(f"{seed}/arrivals")
    times = rate.times(unit_arrivals(burstiness, draw))
    yield from zip(times, sessions, strict=False)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CommandError(f"cannot read {path}: {why}", exit_status=2) from None
