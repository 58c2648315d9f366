"""Conversations of several turns that share system prompts, sent over the gateway's gRPC API.

All conversations are open at the same time and have had different numbers of turns. At any time,
`at_once` of them have a running request. After an answer a conversation pauses, like a user who
reads the answer and writes the next question. So the pause is the sum of two exponentially
distributed times. It is measured in turns of other conversations, so that the load and the order of
turns do not depend on the machine's speed. The prompt of a turn is the whole conversation as token
ids. After its last turn a conversation is replaced by a new one.
"""

import asyncio
import heapq
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from benchmarks.common.clients import greedy_request
from services.common.rpc.channel import open_channel


@dataclass(frozen=True, slots=True)
class Workload:
    """The parameters of the load: numbers of conversations and requests, lengths in tokens.

    Equal workloads have the same system prompts and the same user turns in the same order. The
    answers depend on the model.
    """

    num_conversations: int
    num_turns: int
    num_system_prompts: int
    system_tokens: int
    user_tokens: int
    answer_tokens: int
    num_warm_up: int
    """Number of requests that are sent first, to fill the caches. They are not measured."""
    num_requests: int
    """Number of measured requests."""
    vocab_size: int
    seed: str

    def num_blocks(self, block_size: int) -> int:
        """The mean number of blocks of all open conversations. Shared system prompts count once."""
        turn = self.user_tokens + self.answer_tokens
        own = self.num_conversations * turn * (self.num_turns + 1) / 2
        return round((own + self.num_system_prompts * self.system_tokens) / block_size)


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """A request's prompt tokens, its cached prompt tokens, and the seconds to its first token."""

    num_prompt_tokens: int
    num_cached_tokens: int
    first_token_seconds: float


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation: its tokens so far, and the number of its remaining turns."""

    token_ids: list[int]
    num_turns_left: int
    draw: random.Random


class OpenConversations:
    """The open conversations, and the number of turns that have been sent."""

    def __init__(self, workload: Workload, at_once: int) -> None:
        self.num_sent = 0
        self._workload = workload
        self._mean_rest = workload.num_conversations - at_once
        self._resting: list[tuple[float, int, Conversation]] = []
        self._numbers = itertools.count()
        self._num_begun = 0
        self._draw = random.Random(f"{workload.seed}/rests")
        for number in range(workload.num_conversations):
            self.begin(number % workload.num_turns)

    def begin(self, num_turns_before: int = 0) -> None:
        """Opens a conversation as if it already had `num_turns_before` turns."""
        load = self._workload
        system = random.Random(f"{load.seed}/system/{self._num_begun % load.num_system_prompts}")
        draw = random.Random(f"{load.seed}/conversation/{self._num_begun}")
        before = num_turns_before * (load.user_tokens + load.answer_tokens)
        tokens = self.tokens(system, load.system_tokens) + self.tokens(draw, before)
        self._num_begun += 1
        self._rest(Conversation(tokens, load.num_turns - num_turns_before, draw))

    def take(self) -> Conversation:
        """Returns the conversation whose pause ends next, with the user's next turn appended."""
        _, _, chosen = heapq.heappop(self._resting)
        chosen.token_ids += self.tokens(chosen.draw, self._workload.user_tokens)
        chosen.num_turns_left -= 1
        self.num_sent += 1
        return chosen

    def answered(self, conversation: Conversation, answer: Sequence[int]) -> None:
        """Appends an answer. The conversation then pauses, or is replaced after its last turn."""
        conversation.token_ids += answer
        if conversation.num_turns_left:
            self._rest(conversation)
        else:
            self.begin()

    def _rest(self, conversation: Conversation) -> None:
        until = self.num_sent + self._mean_rest * self._draw.gammavariate(2, 0.5)
        heapq.heappush(self._resting, (until, next(self._numbers), conversation))

    def tokens(self, draw: random.Random, count: int) -> list[int]:
        return draw.choices(range(self._workload.vocab_size), k=count)


class ConversationClient:
    """Calls the gateway's `Inference.Generate`. All requests use one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = gateway_pb2_grpc.InferenceStub(self._channel)

    async def run(
        self, workload: Workload, at_once: int, cache_salt: str = ""
    ) -> list[TurnFigures]:
        """Sends the workload with `at_once` concurrent requests. Returns the figures of the
        measured requests. Runs with different `cache_salt` do not find each other's blocks in the
        cache.
        """
        conversations = OpenConversations(workload, at_once)
        total = workload.num_warm_up + workload.num_requests
        taken: list[TurnFigures] = []

        async def one_client() -> None:
            while (number := conversations.num_sent) < total:
                conversation = conversations.take()
                prompt, num_tokens = conversation.token_ids, workload.answer_tokens
                figures, answer = await self._ask(prompt, num_tokens, cache_salt)
                conversations.answered(conversation, answer)
                if number >= workload.num_warm_up:
                    taken.append(figures)

        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(one_client())
        return taken

    async def _ask(
        self, prompt: list[int], num_tokens: int, cache_salt: str
    ) -> tuple[TurnFigures, list[int]]:
        request = greedy_request(prompt, num_tokens)
        request.cache_salt = cache_salt
        answer: list[int] = []
        began = time.perf_counter()
        first_token_seconds = 0.0
        usage = gateway_pb2.Usage()
        async for response in self._stub.Generate(request):
            if response.token_ids and not answer:
                first_token_seconds = time.perf_counter() - began
            answer += response.token_ids
            if response.HasField("usage"):
                usage = response.usage
        if len(answer) != num_tokens:
            raise RuntimeError(f"{len(answer)} tokens came of {num_tokens}")
        cached = usage.num_cached_tokens
        return TurnFigures(usage.num_prompt_tokens, cached, first_token_seconds), answer

    async def close(self) -> None:
        await self._channel.close()
