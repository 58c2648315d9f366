"""Workloads of agents, drawn from published statistics of turns, prompts, answers and tools.

`swe` and `web` follow the Continuum paper (2025): SWE-bench with 10.9 turns and tools of 0.9 s, and
web searches with 6.3 turns and tools of 1.9 s. `swe-50` spreads the tokens of `swe` over 50 turns.
`smith` follows a replay of SWE-smith. `chat` has conversations of people. `mixed` consists of 45 %
`swe`, 45 % `chat`, and 10 % `swe` with four times as many turns.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.simulation.laboratory.programs import Turn


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. The time that it takes is lognormal, with a median in seconds."""

    name: str
    share: float
    median: float
    sigma: float

    def seconds(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.median), self.sigma)


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """The statistics of a workload. Numbers of tokens are lognormal, given by median and sigma."""

    mean_turns: float
    deviation: float
    num_shared_tokens: int
    first_tokens: tuple[float, float]
    """The tokens of the first prompt after those that all programs of an application share."""
    later_tokens: tuple[float, float]
    """The tokens that a tool adds to each later prompt."""
    output_tokens: tuple[float, float]
    tools: tuple[Tool, ...]

    def turns(self, rng: random.Random, scale: float, longer: float = 1.0) -> tuple[Turn, ...]:
        """Draws the turns (requests) of an agent's program, `longer` times as many as usual."""
        number = max(1, round(longer * rng.gauss(self.mean_turns, self.deviation)))
        turns = []
        for place in range(number):
            (tool,) = rng.choices(self.tools, [tool.share for tool in self.tools])
            new = _tokens(rng, scale, self.later_tokens if place else self.first_tokens)
            output = _tokens(rng, scale, self.output_tokens)
            turns.append(Turn(new, output, tool.seconds(rng), tool=tool.name))
        return tuple(turns)


def _tokens(rng: random.Random, scale: float, of: tuple[float, float]) -> int:
    median, sigma = of
    return max(1, round(scale * rng.lognormvariate(math.log(median), sigma)))


SWE = AgentLoad(
    10.9,
    2.1,
    1536,
    (1200, 0.6),
    (270, 1.0),
    (144, 0.6),
    (Tool("sed", 0.7, 0.15, 0.8), Tool("python", 0.22, 0.8, 1.0), Tool("pytest", 0.08, 3.0, 1.2)),
)
WEB = AgentLoad(
    6.3,
    2.3,
    1024,
    (640, 0.6),
    (1080, 1.0),
    (176, 0.6),
    (Tool("search", 0.6, 1.2, 0.5), Tool("fetch", 0.4, 1.8, 0.9)),
)
SMITH = AgentLoad(
    17.9, 6.0, 1536, (1464, 0.001), (500, 0.9), (30, 0.6), (Tool("bash", 1.0, 1.0, 0.001),)
)
SWE_50 = replace(
    SWE,
    mean_turns=50.0,
    deviation=9.6,
    later_tokens=(270 / 4.6, 1.0),
    output_tokens=(144 / 4.6, 0.6),
)

Load = Callable[[random.Random, float], tuple[tuple[Turn, ...], int]]
"""Draws a program. Returns its turns and the number of tokens that the application shares."""


def _of(load: AgentLoad, longer: float = 1.0) -> Load:
    return lambda rng, scale: (
        load.turns(rng, scale, longer),
        round(scale * load.num_shared_tokens),
    )


def _chat(rng: random.Random, scale: float) -> tuple[tuple[Turn, ...], int]:
    """Draws a conversation. Before each turn, a person reads the previous answer."""
    number = 1 if rng.random() < 0.5 else rng.randint(2, 4)
    turns = [
        Turn(
            _tokens(rng, scale, (400, 1.0)),
            _tokens(rng, scale, (200, 0.6)),
            8 + rng.expovariate(1 / 30),
        )
        for _ in range(number)
    ]
    return tuple(turns), 0


def _mixed(rng: random.Random, scale: float) -> tuple[tuple[Turn, ...], int]:
    (load,) = rng.choices((_of(SWE), _chat, _of(SWE, longer=4)), (0.45, 0.45, 0.1))
    return load(rng, scale)


LOADS: dict[str, Load] = {
    "swe": _of(SWE),
    "swe-50": _of(SWE_50),
    "web": _of(WEB),
    "smith": _of(SMITH),
    "chat": _chat,
    "mixed": _mixed,
}
