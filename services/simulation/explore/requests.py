"""The requests of a run, drawn from a seed.

Prompts are the beginnings of a few documents, so that requests share prefixes. There are not many
different requests, so that their answers alone are computed once for many seeds.
"""

import random
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

_NUM_DOCUMENTS = 4
_DOCUMENT_TOKENS = 120
_LOWEST_TOKEN, _HIGHEST_TOKEN = 300, 4000


class Edge(Enum):
    """How a request enters the gateway."""

    GRPC = "gRPC"
    COMPLETION = "HTTP"
    STREAM = "HTTP, streamed"


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client. Its answer depends on nothing else."""

    edge: Edge
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    regex: str = ""

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": self.seed, "max_tokens": self.max_tokens}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at a time, from a client that may go away before the answer ends."""

    number: int
    at_seconds: float
    request: Request
    gateway: int
    leaves_after_seconds: float | None = None


def draw_arrivals(
    rng: random.Random, count: int, seconds: float, num_gateways: int
) -> list[Arrival]:
    """Requests that arrive within some seconds, some of them in bursts."""
    arrivals, at = [], 0.0
    for number in range(count):
        if rng.random() < 0.6:
            at += rng.expovariate(count / seconds)
        leaves = rng.random() * 0.5 if rng.random() < 0.1 else None
        arrivals.append(Arrival(number, at, draw_request(rng), rng.randrange(num_gateways), leaves))
    return arrivals


def draw_request(rng: random.Random) -> Request:
    document = _document(rng.randrange(_NUM_DOCUMENTS))
    prompt = document[: rng.choice((3, 16, 17, 40, 100))]
    request = Request(rng.choice(list(Edge)), prompt, rng.choice((1, 5, 24)))
    kind = rng.random()
    if kind < 0.15:
        return replace(request, n=rng.choice((2, 3)))
    if kind < 0.3:
        return replace(request, temperature=1.0, seed=rng.randrange(3))
    if kind < 0.4:
        return replace(request, edge=Edge.GRPC, regex="(yes|no|maybe){2,5}")
    return request


def _document(number: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(_LOWEST_TOKEN, _HIGHEST_TOKEN) for _ in range(_DOCUMENT_TOKENS))
