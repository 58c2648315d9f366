"""Draws random faults. A fault is a set of signals to services at certain times."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

MOST_APART_SECONDS = 1.0
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
SUDDEN = (signal.SIGKILL, signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class Fault:
    """Signals to services. Each of `hits` is (seconds after the fault's start, service, signal)."""

    hits: tuple[tuple[float, str, signal.Signals], ...]

    @property
    def kind(self) -> str:
        """The name of the fault's row in the report's table."""
        names = sorted(name.partition("-")[0] for _, name, _ in self.hits)
        signals = sorted({number.name for _, _, number in self.hits})
        if len(names) == 1:
            return f"{names[0]}, {signals[0]}"
        return f"{len(names)} services, {signals[0] if len(signals) == 1 else 'several signals'}"

    def __str__(self) -> str:
        return ", ".join(f"{number.name} to {name}" for _, name, number in self.hits)


def draw_fault(draw: Random, names: Sequence[str]) -> Fault:
    """Draws a fault of one to three services. Often all get the same signal at the same time."""
    victims = draw.sample(list(names), min(draw.choice((1, 1, 1, 2, 3)), len(names)))
    first = draw.choice(SIGNALS)
    mixed, apart = draw.random() < 0.25, draw.random() < 0.5
    hits = [
        (
            draw.uniform(0, MOST_APART_SECONDS) if index and apart else 0.0,
            name,
            draw.choice(SIGNALS) if mixed else first,
        )
        for index, name in enumerate(victims)
    ]
    return Fault(tuple(sorted(hits)))


def draw_hit(draw: Random, names: Sequence[str]) -> Fault:
    """Draws a fault that kills or stops one service."""
    return Fault(((0.0, draw.choice(list(names)), draw.choice(SUDDEN)),))
