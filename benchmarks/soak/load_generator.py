"""Sends completions over HTTP from a separate process, which `overload --tenants` starts.

For each load the process first reads a line of JSON with the fields of `Sending`. It begins to send
when it reads a second line. At the end it prints a line of JSON with the fields of `Sent`. The
process ends with its standard input. With `--sink` the process is a server that refuses every
request at once. Requests to this server show the cost of sending requests without the cost of
serving them.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import cast

import uvloop

from benchmarks.common.clients import OK, TokenStream, completion_request, connections_to
from services.cli.bench.adapters.connection import Connections
from services.cli.bench.core.load_run import LoadRun, Run
from services.cli.bench.core.session_run import Budget
from services.cli.bench.run import RunClock

VOCAB_SIZE = 256
"""Token ids of prompts are below this number. Every model's vocabulary is at least as large."""
_NOT_REFUSED_AT_ONCE = ("queue_timeout", "deadline_exceeded")


@dataclass(frozen=True, slots=True)
class Sending:
    """The load that one process sends.

    If `concurrency` is 0, it is an open loop of `rate` evenly spaced requests per second. Otherwise
    it is a closed loop of `concurrency` concurrent requests.
    """

    address: str
    key: str
    seconds: float
    prompt_tokens: int
    output_tokens: int
    rate: float = 0.0
    concurrency: int = 0
    deadline_seconds: float | None = None
    seed: int = 0

    def requests(self) -> Iterator[bytes]:
        """Yields requests with random prompts without end. The first are built in advance."""
        draw = random.Random(self.seed)
        headers = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        if self.deadline_seconds is not None:
            headers += f"X-Request-Timeout: {self.deadline_seconds}\r\n"

        def one() -> bytes:
            prompt = draw.choices(range(VOCAB_SIZE), k=self.prompt_tokens)
            return completion_request(self.address, prompt, self.output_tokens, headers)

        ahead = [one() for _ in range(int(self.rate * self.seconds))]
        yield from ahead
        while True:
            yield one()


@dataclass(slots=True)
class Sent:
    """The outcomes of the requests of one process, or of several."""

    num_sent: int = 0
    num_done: int = 0
    num_done_in_time: int = 0
    """How many requests were done before sending ended. Goodput is computed from this number."""
    first_token_millis: list[float] = field(default_factory=list)
    refusal_millis: list[float] = field(default_factory=list)
    """For each request that was refused before any work, milliseconds from sending to the answer.

    Refusals have status 429, 503 or an immediate 504.
    """
    other: dict[str, int] = field(default_factory=dict)
    """Maps each error to the number of requests that were neither done nor refused."""
    processor_seconds: float = 0.0
    """Processor seconds that the process used while it sent."""
    seconds: float = 0.0
    """Seconds until the last answer ended."""


def sum_sent(parts: Sequence[Sent]) -> Sent:
    """Adds up the outcomes of several processes or rounds."""
    return Sent(
        num_sent=sum(part.num_sent for part in parts),
        num_done=sum(part.num_done for part in parts),
        num_done_in_time=sum(part.num_done_in_time for part in parts),
        first_token_millis=[millis for part in parts for millis in part.first_token_millis],
        refusal_millis=[millis for part in parts for millis in part.refusal_millis],
        other=dict(sum((Counter(part.other) for part in parts), Counter())),
        processor_seconds=sum(part.processor_seconds for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


async def send(sending: Sending, until_told: asyncio.Event | None = None) -> Sent:
    """Waits for the event `until_told`, if given. Sends the requests, and waits for the answers."""
    clock, requests = RunClock(), sending.requests()
    first = next(requests)  # this builds the first requests in advance
    if until_told is not None:
        await until_told.wait()
    async with aclosing(connections_to(sending.address)) as connections:
        outcomes = _Outcomes(connections, clock, sending.seconds)
        runs = map(outcomes.run_of, itertools.chain((first,), requests))
        load = LoadRun(clock, Budget(None, sending.seconds, 0))
        processor = time.process_time()
        clock.start()
        if sending.concurrency:
            await load.closed_loop(runs, sending.concurrency)
        elif sending.rate:
            await load.open_loop((number / sending.rate, run) for number, run in enumerate(runs))
    sent = outcomes.sent
    sent.seconds, sent.processor_seconds = clock.now(), time.process_time() - processor
    return sent


class _Outcomes:
    """Sends requests and counts their outcomes in `sent`."""

    def __init__(self, connections: Connections, clock: RunClock, seconds: float) -> None:
        self.sent = Sent()
        self._connections, self._clock, self._seconds = connections, clock, seconds

    def run_of(self, request: bytes) -> Run:
        """Returns the function that sends a request. The measured time includes connecting."""

        async def run(_number: int, _intended: float) -> bool:
            sent, began, arrivals = self.sent, self._clock.now(), []
            sent.num_sent += 1
            tokens = TokenStream(lambda _: arrivals.append(self._clock.now()))
            failure = await self._connections.exchange(request, tokens)
            ended = self._clock.now()
            if arrivals:
                sent.first_token_millis.append(1000 * (arrivals[0] - began))
            code = failure.kind if failure is not None else str(tokens.error.get("code"))
            if failure is None and tokens.is_done:
                sent.num_done += 1
                sent.num_done_in_time += ended <= self._seconds
            elif failure is None and tokens.status != OK and code not in _NOT_REFUSED_AT_ONCE:
                sent.refusal_millis.append(1000 * (ended - began))
            else:
                sent.other[code] = sent.other.get(code, 0) + 1
            return True

        return run


class _Sink(asyncio.Protocol):
    """Refuses each request when its body has arrived."""

    _BODY = b'{"error":{"message":"full","type":"rate_limit_error","param":null,"code":"full"}}'
    _ANSWER = (
        b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):
            self._transport.write(self._ANSWER)


async def _sink() -> None:
    server = await asyncio.get_running_loop().create_server(_Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    server.close()


async def _generate() -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        await _send_when_told(Sending(**json.loads(line)))


async def _send_when_told(sending: Sending) -> None:
    told = asyncio.Event()

    async def listen() -> None:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        told.set()

    listening = asyncio.create_task(listen())
    sent = await send(sending, told)
    await listening
    print(json.dumps(asdict(sent)), flush=True)


if __name__ == "__main__":
    uvloop.run(_sink() if "--sink" in sys.argv else _generate())
