"""Real runs: clients send conversations to the services, which serve a real model."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import openai

from benchmarks.accuracy.conversations import RealContext
from benchmarks.common.clients import TokenStream, completion_request, connections_to
from benchmarks.common.models import vocab_size
from benchmarks.common.stack import Stack
from services.cli.bench.adapters.connection import Connections
from services.cli.settings import UpSettings
from services.simulation.laboratory.programs import Program, Turn

_TOKEN_IDS = re.compile(rb'"token_ids":\s*\[([^\]]+)\]')
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d+)')
_WARM_UP = Program(1 << 20, 0.0, (Turn(40, 16), Turn(8, 16)))
_LOG_SECONDS = 1.5
"""The wait at the end of a run, in seconds, in which the scheduler completes its step log."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and its answer. Times are in seconds."""

    prompt: tuple[int, ...]
    token_ids: list[int]
    num_cached: int
    sent: float
    first: float
    """Arrival time of the first token."""
    last: float


@dataclass(slots=True)
class RealRun:
    """The job time of each conversation, and all requests with their answers."""

    job_seconds: list[float] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)

    @property
    def first_token_seconds(self) -> list[float]:
        return [one.first - one.sent for one in self.answered]

    @property
    def hit_rate(self) -> float:
        """The fraction of all prompt tokens that was cached."""
        prompts = sum(len(one.prompt) for one in self.answered)
        return sum(one.num_cached for one in self.answered) / prompts


class Client(Protocol):
    async def send(self, prompt: list[int], turn: Turn, fields: dict[str, Any]) -> Answered:
        """Sends a turn's request. `fields` are added to its body. Raises an exception if the answer
        is an error or incomplete.
        """

    async def close(self) -> None: ...


async def run_conversations(
    settings: UpSettings,
    programs: Sequence[Program],
    step_log: Path,
    make_client: Callable[[str], Client],
) -> RealRun:
    """Starts the services, and sends all conversations. The scheduler writes `step_log`.
    `make_client` gets the gateway's address, host:port.
    """
    variables = {
        "STEPWELL_SCHEDULER_STEP_LOG": str(step_log),
        "STEPWELL_SCHEDULER_MAX_QUEUE_SECONDS": "0",
        "STEPWELL_SCHEDULER_MAX_NUM_WAITING": "100000",
        "STEPWELL_GATEWAY_MAX_CONCURRENT_REQUESTS": "100000",
    }
    async with Stack(settings, variables) as stack:
        client = make_client(stack.http)
        conversations = _Conversations(client, vocab_size(settings.model))
        for number in range(4):
            await conversations.send(replace(_WARM_UP, number=_WARM_UP.number + number), 0.0)
        conversations.run = RealRun()
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for program in programs:
                tasks.create_task(conversations.send(program, began + program.arrival_seconds))
        await client.close()
        await asyncio.sleep(_LOG_SECONDS)
    return conversations.run


class _Conversations:
    def __init__(self, client: Client, size: int) -> None:
        self.run = RealRun()
        self._client, self._vocab_size = client, size
        self._clock = asyncio.get_running_loop().time

    async def send(self, program: Program, arrival: float) -> None:
        """Sends the turns of a conversation. The first is sent at the time `arrival`."""
        context = RealContext(program, self._vocab_size)
        due = arrival
        for number, turn in enumerate(program.turns):
            due += turn.pause_seconds if number else 0.0
            await asyncio.sleep(max(0.0, due - self._clock()))
            fields = {"priority": program.priority} if program.priority else {}
            fields |= _names(program, number)
            answer = await self._client.send(context.prompt(turn), turn, fields)
            context.token_ids += answer.token_ids
            self.run.answered.append(answer)
            due = answer.last
        self.run.job_seconds.append(due - arrival)


def _names(program: Program, number: int) -> dict[str, Any]:
    """The request fields with the program of a turn, the tool that follows the turn, and whether
    the turn is the program's last.
    """
    if number + 1 == len(program.turns):
        return {"job_id": f"{program.number}", "is_last_step": True}
    return {"job_id": f"{program.number}", "this_func_call": program.turns[number + 1].tool}


class HttpClient:
    """Sends requests over connections of its own, for little processor time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connections: Connections = connections_to(address)
        self._clock = asyncio.get_running_loop().time

    async def send(self, prompt: list[int], turn: Turn, fields: dict[str, Any]) -> Answered:
        fields = {"stream_options": {"include_usage": True}, **fields}
        request = completion_request(self._address, prompt, turn.num_output_tokens, fields=fields)
        reply = _Reply(self._clock)
        sent = self._clock()
        failure = await self._connections.exchange(request, reply)
        if failure is not None or not reply.is_done:
            raise RuntimeError(f"the gateway answered {reply.status} {failure or reply.error}")
        return reply.answered(prompt, sent)

    async def close(self) -> None:
        await self._connections.aclose()


class OpenaiClient:
    """Sends requests by the package `openai`."""

    def __init__(self, address: str) -> None:
        self._openai = openai.AsyncOpenAI(
            base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=None
        )
        self._model = ""
        self._clock = asyncio.get_running_loop().time

    async def send(self, prompt: list[int], turn: Turn, fields: dict[str, Any]) -> Answered:
        if not self._model:
            self._model = (await self._openai.models.list()).data[0].id
        times, token_ids, num_cached = [], [], 0
        sent = self._clock()
        stream = await self._openai.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=turn.num_output_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "return_token_ids": True, **fields},
        )
        async for chunk in stream:
            if chunk.choices and (ids := chunk.choices[0].model_extra["token_ids"]):
                times.append(self._clock())
                token_ids += ids
            if chunk.usage is not None:
                num_cached = chunk.usage.prompt_tokens_details.cached_tokens
        return Answered(tuple(prompt), token_ids, num_cached, sent, times[0], times[-1])

    async def close(self) -> None:
        await self._openai.close()


CLIENTS: dict[str, Callable[[str], Client]] = {"http": HttpClient, "openai": OpenaiClient}


class _Reply(TokenStream):
    """Stores the body of the answer and the arrival time of each token."""

    def __init__(self, clock: Any) -> None:
        super().__init__(self._note)
        self._clock = clock
        self._times: list[float] = []
        self._raw = b""

    def _note(self, _count: int) -> None:
        self._times.append(self._clock())

    def body(self, data: bytes, now: float) -> None:
        super().body(data, now)
        self._raw += data

    def answered(self, prompt: list[int], sent: float) -> Answered:
        token_ids = [int(one) for ids in _TOKEN_IDS.findall(self._raw) for one in ids.split(b",")]
        (num_cached,) = map(int, _CACHED_TOKENS.findall(self._raw))
        first, last = self._times[0], self._times[-1]
        return Answered(tuple(prompt), token_ids, num_cached, sent, first, last)
