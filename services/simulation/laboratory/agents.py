"""Loads of agents by their published statistics: turns, prompts, answers and tools.

`swe` and `web` follow the paper on Continuum (2025): SWE-bench with 10.9 turns and tools of 0.9 s,
and searches of the web with 6.3 turns and tools of 1.9 s. `smith` follows a replay of SWE-smith.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from services.simulation.laboratory.programs import Turn


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool and the time that it takes: lognormal, with a median in seconds."""

    name: str
    share: float
    median: float
    sigma: float

    def seconds(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.median), self.sigma)


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """The statistics of a load. Numbers of tokens are lognormal, given by median and sigma."""

    mean_turns: float
    deviation: float
    num_shared_tokens: int
    first_tokens: tuple[float, float]
    """Of the first prompt, after the shared ones."""
    later_tokens: tuple[float, float]
    """What a tool adds."""
    output_tokens: tuple[float, float]
    tools: tuple[Tool, ...]

    def turns(self, rng: random.Random, scale: float, longer: float = 1.0) -> tuple[Turn, ...]:
        """The turns of a program, `longer` times as many as usual."""
        number = max(1, round(longer * rng.gauss(self.mean_turns, self.deviation)))
        turns = []
        for place in range(number):
            (tool,) = rng.choices(self.tools, [tool.share for tool in self.tools])
            median, sigma = self.later_tokens if place else self.first_tokens
            new = scale * rng.lognormvariate(math.log(median), sigma)
            output = scale * rng.lognormvariate(
                math.log(self.output_tokens[0]), self.output_tokens[1]
            )
            pause = tool.seconds(rng)
            turns.append(Turn(max(1, round(new)), max(1, round(output)), pause, tool=tool.name))
        return tuple(turns)


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

Load = Callable[[random.Random, float], tuple[tuple[Turn, ...], int]]
"""Draws the turns of a program, and says how many tokens the application shares."""


def _of(load: AgentLoad) -> Load:
    return lambda rng, scale: (load.turns(rng, scale), round(scale * load.num_shared_tokens))


LOADS: dict[str, Load] = {"swe": _of(SWE), "web": _of(WEB), "smith": _of(SMITH)}
