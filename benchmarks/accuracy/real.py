"""Real runs: clients send conversations to the services, which serve a real model."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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


async def run_conversations(
    settings: UpSettings, programs: Sequence[Program], step_log: Path
) -> RealRun:
    """Starts the services, and sends all conversations. The scheduler writes `step_log`."""
    variables = {
        "STEPWELL_SCHEDULER_STEP_LOG": str(step_log),
        "STEPWELL_SCHEDULER_MAX_QUEUE_SECONDS": "0",
        "STEPWELL_SCHEDULER_MAX_NUM_WAITING": "100000",
    }
    async with Stack(settings, variables) as stack:
        clients = _Clients(stack.http, vocab_size(settings.model))
        for number in range(4):
            await clients.converse(replace(_WARM_UP, number=_WARM_UP.number + number), 0.0)
        clients.run = RealRun()
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for program in programs:
                tasks.create_task(clients.converse(program, began + program.arrival_seconds))
        await clients.connections.aclose()
        await asyncio.sleep(_LOG_SECONDS)
    return clients.run


class _Clients:
    def __init__(self, address: str, size: int) -> None:
        self.connections: Connections = connections_to(address)
        self.run = RealRun()
        self._address, self._vocab_size = address, size
        self._clock = asyncio.get_running_loop().time

    async def converse(self, program: Program, arrival: float) -> None:
        """Sends the turns of a conversation. The first is sent at the time `arrival`."""
        context = RealContext(program, self._vocab_size)
        due = arrival
        for number, turn in enumerate(program.turns):
            due += turn.pause_seconds if number else 0.0
            await asyncio.sleep(max(0.0, due - self._clock()))
            fields = {"priority": program.priority} if program.priority else {}
            fields |= _names(program, number)
            answer = await self._send(context.prompt(turn), turn, fields)
            context.token_ids += answer.token_ids
            self.run.answered.append(answer)
            due = answer.last
        self.run.job_seconds.append(due - arrival)

    async def _send(self, prompt: list[int], turn: Turn, fields: dict[str, Any]) -> Answered:
        fields = {"stream_options": {"include_usage": True}, **fields}
        request = completion_request(self._address, prompt, turn.num_output_tokens, fields=fields)
        reply = _Reply(self._clock)
        sent = self._clock()
        failure = await self.connections.exchange(request, reply)
        if failure is not None or not reply.is_done:
            raise RuntimeError(f"the gateway answered {reply.status} {failure or reply.error}")
        return reply.answered(prompt, sent)


def _names(program: Program, number: int) -> dict[str, Any]:
    """The request fields with the program of a turn, the tool that follows the turn, and whether
    the turn is the program's last.
    """
    if number + 1 == len(program.turns):
        return {"job_id": f"{program.number}", "is_last_step": True}
    return {"job_id": f"{program.number}", "this_func_call": program.turns[number + 1].tool}


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
