"""Conversations of several turns that share system prompts, sent through the gateway's gRPC API.

All conversations are open at the same time, each at another turn, and `at_once` clients each take
the next turn of a random one that waits for none. The prompt is the whole conversation as token
ids. One that had its last turn is replaced by a new one. Half as many system prompts as
conversations are used in turn.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from services.common.channel import open_channel


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent. The same workload has the same system prompts, turns and order of turns; the
    answers are the model's.
    """

    num_conversations: int
    num_turns: int
    system_tokens: int
    user_tokens: int
    answer_tokens: int
    num_warm_up: int
    """The first requests, which fill the caches and are not measured."""
    num_requests: int
    """Requests that are measured."""
    vocab_size: int
    seed: str

    @property
    def num_system_prompts(self) -> int:
        """Each is shared by two of the open conversations."""
        return max(1, self.num_conversations // 2)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that all open conversations have after a turn, on average, each system prompt
        counted once.
        """
        turn = self.user_tokens + self.answer_tokens
        own = self.num_conversations * turn * (self.num_turns + 1) / 2
        return round((own + self.num_system_prompts * self.system_tokens) / block_size)


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """What one request showed."""

    num_prompt_tokens: int
    num_cached_tokens: int
    first_token_seconds: float


@dataclass(slots=True, eq=False)
class _Conversation:
    """Its tokens so far, and how many turns are left."""

    token_ids: list[int]
    num_turns_left: int
    draw: random.Random


class _Open:
    """The open conversations, and how many requests were sent."""

    def __init__(self, workload: Workload) -> None:
        self.num_sent = 0
        self._workload = workload
        self._idle: list[_Conversation] = []
        self._num_begun = 0
        self._draw = random.Random(f"{workload.seed}/order")
        for number in range(workload.num_conversations):
            self.begin(number % workload.num_turns)

    def begin(self, num_turns_before: int = 0) -> None:
        """Opens a conversation, which has had so many turns."""
        load = self._workload
        system = random.Random(f"{load.seed}/system/{self._num_begun % load.num_system_prompts}")
        draw = random.Random(f"{load.seed}/conversation/{self._num_begun}")
        before = num_turns_before * (load.user_tokens + load.answer_tokens)
        tokens = self.tokens(system, load.system_tokens) + self.tokens(draw, before)
        self._idle.append(_Conversation(tokens, load.num_turns - num_turns_before, draw))
        self._num_begun += 1

    def take(self) -> _Conversation:
        """A random conversation that waits for no answer, with the next turn of its user."""
        chosen = self._idle.pop(self._draw.randrange(len(self._idle)))
        chosen.token_ids += self.tokens(chosen.draw, self._workload.user_tokens)
        chosen.num_turns_left -= 1
        self.num_sent += 1
        return chosen

    def answered(self, conversation: _Conversation, answer: Sequence[int]) -> None:
        """The answer of a turn came."""
        conversation.token_ids += answer
        if conversation.num_turns_left:
            self._idle.append(conversation)
        else:
            self.begin()

    def tokens(self, draw: random.Random, count: int) -> list[int]:
        """Random token ids."""
        return draw.choices(range(self._workload.vocab_size), k=count)


class ConversationClient:
    """`Inference.Generate` of the gateway, all requests over one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = gateway_pb2_grpc.InferenceStub(self._channel)

    async def run(self, workload: Workload, at_once: int) -> list[TurnFigures]:
        """Sends the workload with so many requests at once; the figures of those measured."""
        conversations = _Open(workload)
        total = workload.num_warm_up + workload.num_requests
        taken: list[TurnFigures] = []

        async def one_client() -> None:
            while (number := conversations.num_sent) < total:
                conversation = conversations.take()
                figures, answer = await self._ask(conversation.token_ids, workload.answer_tokens)
                conversations.answered(conversation, answer)
                if number >= workload.num_warm_up:
                    taken.append(figures)

        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(one_client())
        return taken

    async def _ask(self, prompt: list[int], num_tokens: int) -> tuple[TurnFigures, list[int]]:
        request = gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=num_tokens),
            ignore_eos=True,
        )
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
        """Closes the channel."""
        await self._channel.close()
