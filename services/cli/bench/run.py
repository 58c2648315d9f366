"""Runs a load once: builds the load and the client, sends the requests, and measures them."""

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from services.cli.bench.adapters.address import Address
from services.cli.bench.adapters.loop_lag import GeneratorUsage, LoopLag
from services.cli.bench.adapters.openai_server import (
    CHAT,
    OpenAIServer,
    RequestForm,
    fit_form,
    vocabulary_by_usage,
)
from services.cli.bench.adapters.progress import Progress
from services.cli.bench.core.load_run import LoadRun, Run
from services.cli.bench.core.ports import Observer
from services.cli.bench.core.record import RequestRecord
from services.cli.bench.core.session import Session
from services.cli.bench.core.session_run import Budget, SessionRun
from services.cli.bench.core.vocabulary import Vocabulary
from services.cli.bench.loads import (
    MAX_TOKENS,
    arrivals,
    dataset_load,
    program_load,
    synthetic_load,
    trace_lines,
    trace_load,
)
from services.cli.bench.settings import BenchSettings


class RunClock:
    """A monotonic `Clock`. It starts at 0 when it is created, and `start` sets it to 0 again."""

    def __init__(self) -> None:
        self._start = 0.0
        self.start()

    def start(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def sleep_until(self, seconds: float) -> None:
        while (left := seconds - self.now()) > 0:  # noqa: ASYNC110 - only time passes
            await asyncio.sleep(left)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The records and circumstances of a run. `left_out` names optional request fields that the
    server rejected. `vocabulary` is None for a dataset.
    """

    settings: BenchSettings
    url: str
    model: str
    started_at: datetime
    left_out: list[str]
    vocabulary: Vocabulary | None
    records: list[RequestRecord]
    usage: GeneratorUsage
    is_interrupted: bool

    @property
    def headline(self) -> str:
        """The model, the server and the load in one line."""
        return f"{self.model} at {self.url}: {self.settings.load_text}"

    @property
    def lengths_text(self) -> str:
        """How prompt lengths were determined, and whether they are exact."""
        if self.vocabulary is None:
            return "as in the dataset"
        exactly = "exact" if self.vocabulary.is_exact else "about right"
        return f"{exactly}, by {self.vocabulary.source}"


@dataclass(eq=False)
class BenchRun:
    """Sends the load of `settings`. Without `vocabulary`, tokens per word are estimated."""

    settings: BenchSettings
    address: Address
    model: str
    vocabulary: Vocabulary | None
    warn: Callable[[str], None]
    max_tokens: int = MAX_TOKENS
    """Limit on the tokens of a program (an agent's session), prompts and answers together."""
    _clock: RunClock = field(init=False, default_factory=RunClock)

    async def run(self) -> Outcome:
        """Runs the load. Raises CommandError if the load cannot begin."""
        async with aclosing(self._server()) as server:
            return await self._run(server)

    async def _run(self, server: OpenAIServer) -> Outcome:
        settings = self.settings
        left_out = await fit_form(server)
        if left_out:
            self.warn(
                f"the server refuses {', '.join(left_out)}: the requests are sent without these "
                "fields"
            )
        if self.vocabulary is None and settings.dataset is None:
            self.vocabulary = await vocabulary_by_usage(server)
        budget = Budget(settings.num_requests, settings.duration_seconds, settings.num_warmups)
        progress = Progress(settings.num_expected)
        records: list[RequestRecord] = []
        sending = self._sending(server, budget, progress, records)
        # Later garbage collections would delay the load if they visited the objects created at
        # startup. Frozen objects are never freed, but the process ends after the run.
        gc.collect()
        gc.freeze()
        async with progress, LoopLag() as lag:
            started_at = datetime.now(UTC)
            self._clock.start()
            is_interrupted = await _until_interrupted(sending)
        return Outcome(
            settings=settings,
            url=self.address.url,
            model=self.model,
            started_at=started_at,
            left_out=left_out,
            vocabulary=self.vocabulary,
            records=records,
            usage=lag.usage(),
            is_interrupted=is_interrupted,
        )

    def _server(self) -> OpenAIServer:
        settings = self.settings
        form = RequestForm(
            api=settings.api,
            model=self.model,
            stream=settings.stream,
            ignore_eos=settings.ignore_eos,
            min_tokens=settings.ignore_eos,
            stream_usage=settings.stream,
            extra_body=settings.extra_body,
        )
        key = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        return OpenAIServer(
            self.address,
            form,
            {**key, **settings.headers},
            self._clock.now,
            settings.timeout_seconds,
            settings.tls.context() if self.address.is_https else None,
        )

    def _sending(
        self, server: OpenAIServer, budget: Budget, observer: Observer, records: list[RequestRecord]
    ) -> Coroutine[Any, Any, None]:
        settings, load = self.settings, LoadRun(self._clock, budget)
        at_most = settings.max_concurrency if settings.is_open else None
        limit = None if at_most is None else asyncio.Semaphore(at_most)
        is_chat = settings.api == CHAT

        def run(session: Session) -> Run:
            return SessionRun(
                session, server, self._clock, budget, observer, limit, records, is_chat=is_chat
            ).run

        sessions = self._sessions()
        if not settings.is_open:
            return load.closed_loop(map(run, sessions), settings.max_concurrency or 1)
        timed = arrivals(sessions, settings.rate, settings.burstiness, settings.seed)
        return load.open_loop((seconds, run(session)) for seconds, session in timed)

    def _sessions(self) -> Iterable[Session]:
        settings = self.settings
        if settings.dataset is not None:
            return dataset_load(settings, settings.dataset)
        assert self.vocabulary is not None
        if settings.programs is not None:
            return program_load(settings, settings.programs, self.vocabulary, self.max_tokens)
        if settings.trace is not None:
            return trace_load(settings, trace_lines(settings.trace), self.vocabulary)
        return synthetic_load(settings, self.vocabulary)


async def _until_interrupted(sending: Coroutine[Any, Any, None]) -> bool:
    """Awaits the load. Returns True if SIGINT or SIGTERM interrupted the load."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(sending)
    signals = (signal.SIGINT, signal.SIGTERM)
    for signum in signals:
        loop.add_signal_handler(signum, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)
    if task.cancelled():
        return True
    task.result()
    return False
