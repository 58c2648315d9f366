"""Draws the requests of a run from a seed.

Prompts are beginnings of a few documents, so that requests share prefixes. There are few different
requests, so that their undisturbed answers are computed once for many seeds.
"""

import random
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

from services.common.request.program import DeclaredProgram

MODEL = "demo"
ADAPTERS = ("first-adapter", "second-adapter", "third-adapter")
_NUM_DOCUMENTS = 4
_DOCUMENT_TOKENS = 350
_LONG_PROMPT = 345
_LONG_ANSWER = 60
"""The number of tokens of a long answer."""
_PROMPTS = 3, 16, 17, 40, 100, 200
"""The numbers of tokens of prompts. The last one is too long for a small pool."""
_LENGTHS, _CROWDED_LENGTHS = (1, 5, 24, _LONG_ANSWER), (24, _LONG_ANSWER)
"""The numbers of tokens of answers: usually, and if pools are small."""
_PROGRAMS = "one", "two", "three"
_LOWEST_TOKEN, _HIGHEST_TOKEN = 300, 4000
_TOKEN_SECONDS = 0.0045
"""The device's approximate time per token."""
_FOCUSED = 0.6
"""In a run that focuses on one kind of requests, the fraction of these requests."""
_CROWDED_REQUESTS = 8
"""The largest number of requests if pools are small."""
_LEAVES, _FOCUSED_LEAVES = 0.15, 0.5
"""The fraction of clients that leave before their answers end: usually, and if leaving is in focus.
"""
_LEAVE_SECONDS = 0.5, 0.5, 0.1, 0.002, 0.0005
_FOCUSED_LEAVE_SECONDS = 0.5, 0.1, 0.03, 0.03, 0.0005
"""Limits of the times after which clients leave. In 0.03 s, a long prompt is computed."""
_MANY_SPACES = 17_000
"""A body with so many spaces is so large that a gateway reads it in two turns of its event loop."""
_WEIGHTS = {
    "several": 15,
    "random": 15,
    "grammar": 10,
    "adapter": 10,
    "call": 7,
    "turns": 12,
    "talk": 7,
    "stop": 7,
    "logprobs": 7,
    "long": 4,
    "wrong": 2.5,
    "plain": 6.5,
}
"""The kinds of requests and the weights with which they are drawn."""
LEAVING = "leaving"
FOCI = *_WEIGHTS, LEAVING
"""What many requests of a run may have in common: their kind, or that their clients leave."""
CROWDED_FOCI = "random", "grammar", "turns", "talk", LEAVING
"""The same in small pools: kinds with state that a preemption or another request's wait affects."""
WRONGS = "cut", "json", "model", "length", "temperature"
"""Ways in which a request is wrong: half of it is missing, it is not JSON, or a field is wrong."""


class Edge(Enum):
    """The protocol over which a request reaches the gateway."""

    GRPC = "gRPC"
    COMPLETION = "HTTP"
    STREAM = "HTTP, streamed"


class Kind(Enum):
    """What a client asks for."""

    TEXT = "text"
    TURNS = "the turns of a session"
    TALK = "turns, each with the whole conversation"
    CALL = "a call of a tool"
    VECTOR = "an embedding"
    WRONG = "something that is refused"


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request. Its answer depends only on these fields."""

    edge: Edge
    prompt: tuple[int, ...]
    max_tokens: int
    """0 means that as many tokens are generated as fit in the pool's blocks."""
    kind: Kind = Kind.TEXT
    model: str = MODEL
    n: int = 1
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignores_end: bool = False
    """Whether only `max_tokens` or a stop string ends the answer, and no end-of-sequence token."""
    num_logprobs: int = 0
    """The number of likely tokens with log-probabilities, for the prompt and the answer."""
    salt: str = ""
    """The cache salt. The request hits only blocks with this salt. The answer does not change."""
    regex: str = ""
    more_prompts: tuple[tuple[int, ...], ...] = ()
    """Further prompts of the same request. Each one has its own answer."""
    later_prompts: tuple[tuple[int, ...], ...] = ()
    """In a session (a conversation of several turns), the prompts after the first."""
    pause_seconds: float = 0.0
    """The time between two turns. It does not change the answer."""
    breaks_after_seconds: float | None = None
    """The time after which the client leaves during the last turn of its HTTP session, of which it
    has sent only half of the input. It then sends this turn with its whole input, so that the
    answer does not change.
    """
    ends_in_turn: bool = False
    """Whether the client ends its HTTP session in the last turn, whose answer still completes."""
    key: str = ""
    """The idempotency key. It does not change the answer."""
    num_spaces: int = 0
    """The number of spaces after the body of an HTTP request. They do not change the answer."""
    wrong: str = ""
    """What is wrong with the request (one of WRONGS). Empty if it is valid."""
    program: DeclaredProgram | None = None
    """The program (an agent's session) of this request. It does not change the answer. If the
    request is a conversation, the program can end with the last turn.
    """
    priority: int = 0
    """It does not change the answer."""

    def sampling(self) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "seed": self.seed}
        if self.max_tokens:
            sampling["max_tokens"] = self.max_tokens
        if self.num_logprobs:
            sampling |= {"logprobs": self.num_logprobs, "prompt_logprobs": self.num_logprobs}
        return sampling

    @property
    def wants_vector(self) -> bool:
        return self.kind is Kind.VECTOR

    def usual(self) -> "Request":
        """Returns the plainest request that has the same answer."""
        is_http = self.kind in (Kind.CALL, Kind.WRONG) or self.more_prompts
        return replace(
            self,
            edge=Edge.COMPLETION if is_http else Edge.GRPC,
            pause_seconds=0.0,
            breaks_after_seconds=None,
            ends_in_turn=False,
            salt="",
            key="",
            num_spaces=0,
            program=None,
            priority=0,
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at a point in time, and whether its client leaves before the answer ends."""

    number: int
    at_seconds: float
    request: Request
    gateway: int
    leaves_after_seconds: float | None = None


def draw_arrivals(
    rng: random.Random,
    count: int,
    seconds: float,
    num_gateways: int,
    *,
    pools: bool,
    is_crowded: bool,
    comes_at_once: bool,
    has_priorities: bool,
    focus: str | None = None,
    prompts: tuple[int, ...] = (),
) -> list[Arrival]:
    """Draws requests that arrive within `seconds`, some of them in bursts. If `pools`, they ask for
    embeddings. If `is_crowded`, each of them fits in a small pool. If `comes_at_once`, most of them
    arrive in bursts. If `has_priorities`, they have different priorities. `focus` is one of FOCI.
    `prompts` are the possible numbers of tokens of prompts, if they are not the usual ones.
    """
    arrivals: list[Arrival] = []
    at, leave, leave_seconds = 0.0, _LEAVES, _LEAVE_SECONDS
    if focus == LEAVING:
        leave, leave_seconds = _FOCUSED_LEAVES, _FOCUSED_LEAVE_SECONDS
    new_burst = rng.choice((0.2, 0.6, 0.6))
    if is_crowded:
        count = min(count, _CROWDED_REQUESTS)
    if comes_at_once:
        new_burst = 0.2
    for number in range(count):
        if rng.random() < new_burst:
            at += rng.expovariate(new_burst * count / seconds)
        gateway, leaves = rng.randrange(num_gateways), None
        if rng.random() < leave:
            leaves = rng.random() * rng.choice(leave_seconds)
        request = draw_vector(rng) if pools else draw_request(rng, focus, is_crowded, prompts)
        if request.kind in (Kind.TEXT, Kind.CALL, Kind.TALK):
            request = replace(request, program=_draw_program(rng, request.kind))
        if has_priorities and request.kind is not Kind.WRONG:
            request = replace(request, priority=rng.randint(-1, 1))
        if request.edge is not Edge.GRPC and rng.random() < (0.05 if leaves is None else 0.5):
            request = replace(request, num_spaces=_MANY_SPACES)
        if request.kind is Kind.TEXT and leaves is not None and request.max_tokens:
            request = replace(request, max_tokens=_LONG_ANSWER, ignores_end=True)
        elif _may_have_salt(request) and rng.random() < 0.1:
            request = replace(request, edge=Edge.GRPC, salt=f"salt {number}")
        elif request.kind in (Kind.TEXT, Kind.CALL) and rng.random() < 0.1:
            request = replace(request, key=f"key {number}")
            again = at + rng.random() * rng.choice((0.0, 0.02, 1.0))
            arrivals.append(Arrival(count + number, again, request, rng.randrange(num_gateways)))
        arrivals.append(Arrival(number, at, request, gateway, leaves))
    return arrivals


def _draw_program(rng: random.Random, kind: Kind) -> DeclaredProgram | None:
    if rng.random() < (0.2 if kind is Kind.TALK else 0.6):
        return None
    name, parent = rng.sample(_PROGRAMS, 2)
    if rng.random() >= 0.2:
        parent = ""
    elif _PROGRAMS.index(parent) > _PROGRAMS.index(name):
        name, parent = parent, name  # no program is the parent of its parent
    tool, keep_seconds = rng.choice(("", "sed")), rng.choice((0, 0, 1, 3))
    return DeclaredProgram(name, parent, tool, rng.random() < 0.3, keep_seconds)


def _may_have_salt(request: Request) -> bool:
    return request.kind is Kind.TEXT and request.n == 1 and not request.more_prompts


def draw_vector(rng: random.Random) -> Request:
    edge = rng.choice((Edge.GRPC, Edge.COMPLETION))
    return Request(edge, _draw_prompt(rng), 1, Kind.VECTOR)


def draw_request(
    rng: random.Random,
    focus: str | None = None,
    is_crowded: bool = False,
    prompts: tuple[int, ...] = (),
) -> Request:
    kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if focus in _WEIGHTS and rng.random() < _FOCUSED:
        kind = focus
    edge, prompt = rng.choice(list(Edge)), _draw_prompt(rng, is_crowded, prompts)
    length = rng.choice(_CROWDED_LENGTHS if is_crowded else _LENGTHS)
    request = Request(edge, prompt, length, ignores_end=length == _LONG_ANSWER)
    match kind:
        case "several":
            request = replace(request, n=rng.choice((2, 3)))
        case "random" if not is_crowded:
            request = replace(request, temperature=1.0, seed=rng.randrange(3))
        case "grammar" | "random":
            regex, most = rng.choice((("(yes|no|maybe){2,5}", 24), ("(yes|no|maybe){9,12}", 90)))
            temperature = 1.0 if kind == "random" else 0.0  # only a grammar leaves a choice
            request = Request(Edge.GRPC, prompt, most, regex=regex, temperature=temperature)
        case "adapter":
            request = replace(request, model=rng.choice(ADAPTERS))
        case "call":
            edge = rng.choice((Edge.COMPLETION, Edge.STREAM))
            request = Request(edge, prompt[: rng.choice((1, 3))], 48, Kind.CALL)
        case "turns" | "talk":
            request = _draw_turns(rng, is_crowded, is_talk=kind == "talk")
        case "stop":
            stop = (rng.choice("aeiou"),)
            request = replace(request, max_tokens=_LONG_ANSWER, stop=stop, ignores_end=True)
            if edge is not Edge.GRPC:
                more = _draw_prompt(rng, is_crowded), _draw_prompt(rng, is_crowded)
                request = replace(request, more_prompts=more)
        case "logprobs":
            prompt = prompt if is_crowded else _document(0)[: rng.choice((40, 100, 200))]
            num_logprobs = rng.choice((1, 3))
            request = replace(request, edge=Edge.GRPC, prompt=prompt, num_logprobs=num_logprobs)
        case "long" if not is_crowded:
            request = LONG
        case "wrong":
            request = Request(Edge.COMPLETION, prompt, 1, Kind.WRONG, wrong=rng.choice(WRONGS))
    return request


def _draw_turns(rng: random.Random, is_crowded: bool, *, is_talk: bool) -> Request:
    """Draws a conversation. The first turn with 47 + 1 tokens ends where a block ends. In a small
    pool, the longest prompt leaves too few blocks for most other requests.
    """
    prompt = _document(0)[: rng.choice((47, 100) if is_crowded else (3, 40, 47))]
    later = _LATER_PROMPTS[: rng.choice((1,) if is_crowded else (1, 2))]
    pause = rng.choice((0.0, 0.05, 1.5, 7.0)) * rng.random()
    edge, max_tokens = rng.choice(list(Edge)), rng.choice((1, 5, 24))
    turns = Request(
        edge,
        prompt,
        max_tokens,
        Kind.TURNS,
        ignores_end=rng.random() < 0.5,
        later_prompts=later,
        pause_seconds=pause,
    )
    if is_talk:
        return replace(turns, edge=Edge.GRPC, kind=Kind.TALK)
    if edge is Edge.GRPC or rng.random() < 0.3:
        return turns
    if rng.random() < 0.3:
        return replace(turns, ends_in_turn=True)
    breaks = (1 + max_tokens) * _TOKEN_SECONDS * 1.3 * rng.random() ** 0.5
    return replace(turns, breaks_after_seconds=breaks)


def _draw_prompt(
    rng: random.Random, is_crowded: bool = False, prompts: tuple[int, ...] = ()
) -> tuple[int, ...]:
    document = _document(rng.randrange(_NUM_DOCUMENTS))
    return document[: rng.choice(prompts or (_PROMPTS[:-1] if is_crowded else _PROMPTS))]


@cache
def _document(number: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(_LOWEST_TOKEN, _HIGHEST_TOKEN) for _ in range(_DOCUMENT_TOKENS))


LONG = Request(Edge.GRPC, _document(2)[:_LONG_PROMPT], 0, ignores_end=True)
"""A request whose prompt and answer fill all blocks of a replica."""
_LATER_PROMPTS = _document(1)[:16], _document(2)[:48]

PROBE = Request(
    Edge.GRPC,
    _document(3)[:40],
    8,
    Kind.TALK,
    ignores_end=True,
    later_prompts=(_document(1)[:9], _document(2)[:16]),
    pause_seconds=0.05,
)
"""A conversation that checks whether a fleet serves. The first turn ends where a block ends, so
that the last token of this block is not computed. The second turn ends one token after the end of a
block, so that this block is complete.
"""
PROBE_HITS = 160, 96
"""The numbers of tokens that the conversation hits in the cache: after an earlier run of the same
conversation, and with only its own earlier turns.
"""
PROBE_KEPT = 47 + 64
"""The numbers of tokens that a replica keeps after the first two turns, if the conversation is a
session.
"""
PROBE_VECTOR = Request(Edge.GRPC, _document(3)[:40], 1, Kind.VECTOR)
"""The request that checks whether a fleet of embedding models serves."""
