"""Repeats requests concurrently. Each answer must equal the answer to the request sent alone."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from benchmarks.common.clients import greedy_request
from services.common.rpc.channel import open_channel

ANSWER_SECONDS = 120.0
_ASK_AGAIN_SECONDS = 0.05
_PREFIX_SHARE = 0.6


@dataclass(slots=True)
class Answer:
    """The part of an answer that has been received. `logprobs` has the log-probabilities of the
    sampled tokens, and is empty if none were requested.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""

    def add(self, piece: gateway_pb2.GenerateResponse) -> None:
        """Appends a message of the response stream."""
        self.token_ids += piece.token_ids
        self.text += piece.text
        if piece.logprobs.width:
            self.logprobs += piece.logprobs.logprobs[:: piece.logprobs.width]

    def difference(self, other: "Answer") -> str:
        """The first difference from another answer, as text. It is empty for equal answers."""
        pairs = zip(self.token_ids, other.token_ids, strict=False)
        for index, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                return f"token {index} is {ours}, not {theirs}"
        if len(self.token_ids) != len(other.token_ids):
            return f"{len(self.token_ids)} tokens, not {len(other.token_ids)}"
        if self.logprobs != other.logprobs:
            return "other log-probabilities"
        return "" if self.text == other.text else "another text"


@dataclass(slots=True)
class Counts:
    """The numbers of correct, failed and changed answers."""

    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    with_gateway: int = 0
    """The number of answers that failed because the campaign killed or ended their gateway."""
    silences: list[float] = field(default_factory=list)
    """For each correct answer, the longest time without a token, in seconds."""

    @property
    def are_good(self) -> bool:
        return not self.failed and not self.changed

    def __str__(self) -> str:
        return (
            f"{self.good} answers are right, {self.failed.total()} failed, {self.changed.total()} "
            f"changed, {self.with_gateway} ended because their gateway ended"
        )


class Streams:
    """Repeats a set of requests concurrently, over one channel to each gateway.

    Each request is a stream that is sent again when its answer ends. Half of the requests are
    greedy, and half are sampled with a seed. Some have penalties, and some ask for
    log-probabilities. Many prompts share a prefix.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        count: int,
        vocab_size: int,
        num_prompt_tokens: int,
        num_tokens: int,
    ) -> None:
        """`addresses` are host:port of the gateways, which the `count` streams use in rotation."""
        self.counts = Counts()
        self.expects_gateway_loss = False
        self._requests = [
            make_request(number, vocab_size, num_prompt_tokens, num_tokens)
            for number in range(count)
        ]
        self._channels = [open_channel(address) for address in addresses]
        self._stubs = [gateway_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._expected: list[Answer] = []
        self._stopping = False
        self._last_piece = 0.0
        self._since = 0.0
        self._last_pieces = [0.0] * count
        self._silence = self._longest_gap = 0.0
        self._progressed: set[int] = set()
        self.all_progressed = asyncio.Event()

    async def measure(self) -> None:
        """Sends each request alone and stores its answer, which all later answers must equal."""
        for number in range(len(self._requests)):
            answer = Answer()
            await self._ask(number, answer)
            self._expected.append(answer)

    async def run(self) -> None:
        """Repeats all requests until `stop` is called. Returns when the last answers have ended."""
        async with asyncio.TaskGroup() as streams:
            for number in range(len(self._requests)):
                streams.create_task(self._repeat(number))

    def stop(self) -> None:
        """Starts no more requests. Running requests continue to their ends."""
        self._stopping = True

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    def mark(self) -> None:
        """Starts to measure silences and gaps between tokens. Earlier ones are discarded."""
        self._since = time.monotonic()
        self._silence = self._longest_gap = 0.0
        self.expect_progress()

    def expect_progress(self) -> None:
        """Clears `all_progressed`, which is set when each stream has received another token."""
        self._progressed.clear()
        self.all_progressed.clear()

    @property
    def silence_seconds(self) -> float:
        """The longest time since `mark` in which no stream received a token, in seconds."""
        return max(self._silence, time.monotonic() - max(self._since, self._last_piece))

    @property
    def longest_gap_seconds(self) -> float:
        """The longest time since `mark` between two messages of one answer, in seconds."""
        return self._longest_gap

    async def _repeat(self, number: int) -> None:
        while not self._stopping:
            answer = Answer()
            try:
                silence = await self._ask(number, answer)
            except grpc.aio.AioRpcError as error:
                if self.expects_gateway_loss:
                    self.counts.with_gateway += 1
                else:
                    self.counts.failed[f"{error.code().name}: {error.details()}"] += 1
                await asyncio.sleep(_ASK_AGAIN_SECONDS)
                continue
            difference = answer.difference(self._expected[number])
            if difference:
                self.counts.changed[f"stream {number}: {difference}"] += 1
            else:
                self.counts.good += 1
                self.counts.silences.append(silence)

    async def _ask(self, number: int, answer: Answer) -> float:
        """Sends request `number`, and appends the response to `answer`. Returns the longest time
        without a token, in seconds.
        """
        begun, silence, last = False, 0.0, time.monotonic()
        stub = self._stubs[number % len(self._stubs)]
        call = stub.Generate(self._requests[number], timeout=ANSWER_SECONDS, wait_for_ready=True)
        async for piece in call:
            answer.add(piece)
            now = time.monotonic()
            self._came(number, begun, now)
            begun, silence, last = True, max(silence, now - last), now
        return silence

    def _came(self, number: int, begun: bool, now: float) -> None:
        self._silence = max(self._silence, now - max(self._last_piece, self._since))
        self._last_piece = now
        if begun and now > self._since:
            gap = now - max(self._last_pieces[number], self._since)
            self._longest_gap = max(self._longest_gap, gap)
        self._last_pieces[number] = now
        self._progressed.add(number)
        if len(self._progressed) == len(self._requests):
            self.all_progressed.set()


def make_request(
    number: int, vocab_size: int, num_prompt_tokens: int, num_tokens: int
) -> gateway_pb2.GenerateRequest:
    """The request of stream `number`. Equal arguments give equal requests."""
    draw, family = Random(f"stream/{number}"), Random(f"family/{number % 4}")
    length = draw.randrange(num_prompt_tokens // 2, num_prompt_tokens)
    common = int(_PREFIX_SHARE * length)
    prompt = [
        (family if position < common else draw).randrange(3, vocab_size)
        for position in range(length)
    ]
    request = greedy_request(prompt, num_tokens)
    sampling = request.sampling
    if number % 2:
        sampling.MergeFrom(common_pb2.SamplingParams(temperature=1.0, seed=number))
    if number % 8 == 3:
        sampling.MergeFrom(common_pb2.SamplingParams(top_p=0.9, top_k=50))
    if number % 8 == 5:
        sampling.frequency_penalty = 0.3
    if number % 4 < 2:
        sampling.logprobs = 0
    return request
