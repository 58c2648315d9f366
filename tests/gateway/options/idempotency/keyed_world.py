"""Gateways in one process that share the answers to requests with idempotency keys. Each is a
gateway's core with a fake engine.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import StepwellError
from services.common.request.finish import Finish, FinishReason
from services.common.request.sampling import SamplingParams
from services.gateway.adapters.grammars.judge import GrammarJudge
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer
from services.gateway.core.caller import Caller
from services.gateway.core.ports import Clock
from services.gateway.core.request.delivery import Answers
from services.gateway.core.request.delta import Progress
from services.gateway.core.request.generation import Answer
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.inflight import Inflight, Mailbox
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import ClientRequest, EngineRequest, Prompt
from services.gateway.core.request.sampling_defaults import SamplingDefaults
from services.gateway.options.idempotency.core.journal import Journal
from services.gateway.options.idempotency.core.key import IdempotencyKey
from services.gateway.options.idempotency.core.keyed_requests import KeyedRequests, KeyLimits
from services.gateway.options.idempotency.core.sharing import Sharing, SharingTimes
from tests.gateway.fake_scheduler import VOCAB_SIZE, formula

LIMITS = KeyLimits(
    linger_seconds=10.0, max_detached=4, retention_seconds=100.0, max_answers=8, max_bytes=1_000_000
)
TIMES = SharingTimes(
    flush_seconds=0.005,
    lease_seconds=1.0,
    open_seconds=2.0,
    again_seconds=0.005,
    first_backoff_seconds=0.01,
    max_backoff_seconds=0.05,
)
WAIT_SECONDS = 60.0


class StepEngine:
    """The engine port of a gateway's core. The test runs its steps. In each step every sequence
    gets the token of `token_at`.
    """

    def __init__(self) -> None:
        self.capacity = 1000
        self.started: list[tuple[Sequence[EngineRequest], Sequence[Progress]]] = []
        self.open: list[Inflight] = []
        self._numbers = itertools.count()

    def limits(self) -> ModelLimits:
        return ModelLimits(
            1000, self.capacity, VOCAB_SIZE, (), priority_scheduling=False, hidden_size=4
        )

    async def until_limits(self, on_wait: Callable[[str], None]) -> None: ...

    def check_room(self, caller: Caller, deadline: float | None) -> None: ...

    def model_fingerprint(self) -> bytes:
        return b"model"

    def start(
        self, requests: Sequence[EngineRequest], progress: Sequence[Progress] = ()
    ) -> Mailbox:
        self.started.append((requests, progress))
        mailbox = Mailbox(requests, self._numbers, self._drop, time.perf_counter_ns)
        self.open += mailbox.resume(progress) if progress else mailbox.inflights
        for inflight in self.open:
            inflight.admitted(0)
        return mailbox

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            for inflight in list(self.open):
                self._advance(inflight)

    def fail(self, error: StepwellError) -> None:
        for inflight in self.open:
            inflight.failed(error)
        self.open.clear()

    def _advance(self, inflight: Inflight) -> None:
        request, output = inflight.request, inflight.output_token_ids
        token = token_at(request, len(output))
        inflight.tokens([token])
        if request.sampling.logprobs is not None:
            rank = len(inflight.output_token_ids)
            inflight.logprobs(LogprobRows.of(1, [token], [-token / 8], [rank]))
        if len(inflight.output_token_ids) == request.sampling.max_tokens:
            inflight.finished(Finish(FinishReason.LENGTH))
            self.open.remove(inflight)

    def _drop(self, inflight: Inflight) -> None:
        if inflight in self.open:
            self.open.remove(inflight)


def token_at(request: EngineRequest, position: int) -> int:
    return formula(request.prompt_token_ids, request.sampling.seed or 0, position)


@dataclass
class Client:
    task: "asyncio.Task[None]"
    answers: list[Answer] = field(default_factory=list)
    request_id: str = ""
    created: int = 0
    is_replay: bool = False

    @property
    def token_ids(self) -> list[list[int]]:
        return [list(answer.token_ids) for answer in self.answers]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    async def leave(self) -> None:
        """Simulates a broken connection to the gateway."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def result(self) -> list[list[int]]:
        """All tokens, once the answers are complete. Raises the error that the client receives."""
        async with asyncio.timeout(WAIT_SECONDS):
            await self.task
        return self.token_ids


class KeyedGateway:
    def __init__(
        self,
        tokenizer: HfTokenizer,
        clock: Clock,
        journal: Journal | None = None,
        *,
        limits: KeyLimits = LIMITS,
        name: str = "gateway",
    ) -> None:
        self.engine = StepEngine()
        self.sharing = None if journal is None else Sharing(journal, name, clock, TIMES)
        self._seeds = itertools.count(1000 * ord(name[0]))
        self.inference = Inference(
            "tiny",
            tokenizer,
            self.engine,
            GrammarJudge(tokenizer.to_json),
            defaults=SamplingDefaults(),
            max_choices=8,
            max_items=1000,
            max_logprobs=1000,
            draw_seed=self._seeds.__next__,
            unix_nanos=lambda: 10**9 * next(self._seeds),
        )
        self.keyed = KeyedRequests(self.inference, self.engine, clock, limits, self.sharing)
        self._names = itertools.count()
        self._name = name
        self._run: asyncio.Task[None] | None = None
        if self.sharing is not None:
            self._run = asyncio.create_task(self.sharing.run())

    def ask(self, key: str = "k", *, caller: str = "", **fields: Any) -> Client:
        client: Client
        client = Client(asyncio.create_task(self._serve(lambda: client, key, caller, fields)))
        client.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return client

    async def _serve(self, client_of: Any, key: str, caller: str, fields: dict[str, Any]) -> None:
        client: Client = client_of()
        prompts, deadline = fields.pop("prompts", ([5, 6],)), fields.pop("deadline", None)
        options = {name: fields.pop(name) for name in ("n", "stop") if name in fields}
        sampling = SamplingParams(**{"max_tokens": 6, **fields})
        request = ClientRequest(
            f"{self._name}-{next(self._names)}", tuple(map(Prompt, prompts)), sampling, **options
        )
        generation = await self.inference.prepare(request, deadline=deadline)
        generation = await self.keyed.attach(generation, IdempotencyKey(caller, key), "test")
        client.request_id = generation.request.request_id
        client.created = generation.identity.created
        client.is_replay = generation.is_replay
        sink = Answers(generation)
        client.answers = sink.answers
        await self.inference.delivery(generation, sink, stream=True).run()

    async def stop(self) -> None:
        """Cancels the gateway's tasks, as if its process were killed. Its leases remain."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)


async def settle() -> None:
    """Runs 30 iterations of the event loop, so that all tasks run until they wait for something."""
    for _ in range(30):
        await asyncio.sleep(0)
