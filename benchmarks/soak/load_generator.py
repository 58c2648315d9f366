"""Sends completions over HTTP from a separate process, which `overload --tenants` starts.

The process first reads a line of JSON with the fields of `Sending`. It begins to send when it reads
a second line. At the end it prints a line of JSON with the fields of `Sent`. With `--sink` the
process is a server that refuses every request at once. Requests to this server show the cost of
sending requests without the cost of serving them.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

import uvloop

from benchmarks.common.clients import completion_request
from benchmarks.soak.attack.exchanges import Connections, Ended

VOCAB_SIZE = 256
"""Token ids of prompts are below this number. Every model's vocabulary is at least as large."""
_NOT_REFUSED_AT_ONCE = ("queue_timeout", "deadline_exceeded")
_TICK_SECONDS = 0.002


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
        """Yields requests with random prompts without end. The first ones are built in advance."""
        draw = random.Random(self.seed)
        headers = f"Authorization: Bearer {self.key}\r\n"
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
    """Number of requests that were done before sending ended. Goodput is computed from it."""
    first_token_millis: list[float] = field(default_factory=list)
    refusal_millis: list[float] = field(default_factory=list)
    """Milliseconds from sending to the answer of each request that was refused before any work.

    Refusals have status 429, 503 or an immediate 504.
    """
    other: dict[str, int] = field(default_factory=dict)
    """Maps each error to the number of requests that were neither done nor refused."""
    processor_seconds: float = 0.0
    """Processor seconds that the process used while it sent."""


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
    )


async def send(sending: Sending, until_told: asyncio.Event | None = None) -> Sent:
    """Sends the requests and waits for every answer. If `until_told` is given, sending begins when
    it is set.
    """
    requests, connections = sending.requests(), Connections(sending.address)
    next(requests)  # this builds the first requests in advance
    if until_told is not None:
        await until_told.wait()
    sent, other = Sent(), Counter[str]()
    processor, began = time.process_time(), time.monotonic()
    until = began + sending.seconds

    def count(ended: Ended) -> None:
        if ended.first_token is not None:
            sent.first_token_millis.append(1000 * (ended.first_token - ended.sent))
        if ended.is_done:
            sent.num_done += 1
            sent.num_done_in_time += ended.ended <= until
        elif ended.status != 200 and ended.error not in _NOT_REFUSED_AT_ONCE:
            sent.refusal_millis.append(1000 * (ended.ended - ended.sent))
        else:
            other[ended.error] += 1

    async def one(request: bytes) -> None:
        sent.num_sent += 1
        count(await connections.exchange(request))

    async def one_after_another() -> None:
        while time.monotonic() < until:
            await one(next(requests))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(sending.concurrency):
            tasks.create_task(one_after_another())
        num_begun = 0
        while sending.rate and (passed := time.monotonic() - began) < sending.seconds:
            while num_begun < int(passed * sending.rate):
                num_begun += 1
                tasks.create_task(one(next(requests)))
            await asyncio.sleep(_TICK_SECONDS)
    connections.close()
    sent.other, sent.processor_seconds = dict(other), time.process_time() - processor
    return sent


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
    sending = Sending(**json.loads(sys.stdin.readline()))
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
