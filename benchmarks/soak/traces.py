"""Traces every request while services are paused and killed. A trace must explain all its time.

    python -m benchmarks.soak traces [--requests 200] [--kills 6] [--pauses 6] [--model DIR]

A tenth of the requests are sent alone, and the rest sixteen at a time, over HTTP or gRPC. The KV
cache is too small for sixteen, so that requests wait and are preempted. During the run the engine
is paused, and pool, worker and scheduler are killed in rotation. The supervisor of `stepwell up`
restarts them.

Then the spans of all services are checked (benchmarks/soak/trace_checks.py). The durations of the
leaf spans below the gateway's span of a request must add up to its duration. Each wait must have a
reason, and each span must have its parent and end within it. The table shows the numbers of spans,
and compares the gateway's spans with the times that clients measured.
"""

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from benchmarks.common.arguments import add_model, count, make_parser
from benchmarks.common.clients import GrpcClient, HttpClient
from benchmarks.common.console import log
from benchmarks.common.models import vocab_size
from benchmarks.common.runs import run_program
from benchmarks.common.spans import SpanReceiver
from benchmarks.soak.replicas import RECOVERY_SECONDS, Replicas
from benchmarks.soak.trace_checks import TracedRequest, TraceReport, check_traces
from services.cli.processes.supervisor import RestartPolicy
from services.cli.settings import UpSettings
from services.common.rpc.channel import open_channel

NUM_AT_ONCE = 16
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 150, 60
HTTP_SHARE = 0.5
PAUSE_SECONDS, POLL_SECONDS = 0.2, 0.01
REQUEST_SECONDS = 120.0
EXPORT_DELAY_MILLIS = "100"
"""Milliseconds between two exports of spans. A killed service loses the spans in between."""
VICTIMS = ("kvpool", "worker", "scheduler")


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the run."""

    model: Path
    num_requests: int
    num_kills: int
    num_pauses: int
    seed: int


@dataclass(slots=True)
class Requests:
    """Sends random requests. Each request has its own trace."""

    grpc: GrpcClient
    http: str
    """host:port of the HTTP API."""
    draw: Random
    vocab_size: int
    num_sent: int = 0
    done: list[TracedRequest] = field(default_factory=list)
    progressed: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self) -> None:
        """Sends one request and reads its answer. Raises if it fails."""
        prompt = self.draw.choices(
            range(3, self.vocab_size), k=self.draw.randint(1, MAX_PROMPT_TOKENS)
        )
        num_tokens = self.draw.randint(1, MAX_OUTPUT_TOKENS)
        over_http = self.draw.random() < HTTP_SHARE
        trace, span = secrets.token_bytes(16), secrets.token_bytes(8)
        received: list[int] = []
        self.num_sent += 1
        async with asyncio.timeout(REQUEST_SECONDS), self._client(over_http) as client:
            sent = time.time_ns()
            traceparent = f"00-{trace.hex()}-{span.hex()}-01"
            await client.generate(prompt, num_tokens, received.append, traceparent)
            answered = time.time_ns()
        if sum(received) != num_tokens:
            raise RuntimeError(f"{sum(received)} of {num_tokens} tokens came")
        self.done.append(TracedRequest(trace, span, sent, answered))
        self.progressed.set()

    @property
    def num_done(self) -> int:
        return len(self.done)

    @asynccontextmanager
    async def _client(self, over_http: bool) -> AsyncIterator[GrpcClient | HttpClient]:
        if not over_http:
            yield self.grpc
            return
        client = HttpClient(self.http)
        await client.open(1)
        try:
            yield client
        finally:
            await client.close()

    async def until_done(self, number: int) -> None:
        while self.num_done < number:
            self.progressed.clear()
            await self.progressed.wait()


async def run(options: Options, directory: Path) -> TraceReport:
    """Runs the test. Raises RuntimeError if the services do not start or a request fails."""
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = EXPORT_DELAY_MILLIS
    async with SpanReceiver() as receiver:
        receiver.keep()
        settings = UpSettings(
            model=options.model,
            num_threads=1,
            num_blocks=24,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            otlp_endpoint=receiver.endpoint,
            trace_sample_ratio=1.0,
            trace_step_sample_ratio=1.0,
        )
        async with Replicas(settings, directory, RestartPolicy(steady_seconds=1.0)) as replicas:
            client = GrpcClient(replicas.grpc)
            draw = Random(options.seed)
            requests = Requests(client, replicas.http, draw, vocab_size(options.model))
            kills = await _campaign(options, replicas, requests, directory)
            await client.close()
        # Services send their remaining spans when they stop.
        return check_traces(receiver.take(), requests.done, kills)


async def _campaign(
    options: Options, replicas: Replicas, requests: Requests, directory: Path
) -> list[int]:
    """Sends all requests while services are paused and killed. Returns the times of the kills."""
    num_alone = max(1, options.num_requests // 10)
    for _ in range(num_alone):
        await requests.send()
    log(f"{num_alone} requests came alone")
    left = iter(range(options.num_requests - num_alone))

    async def client() -> None:
        for _ in left:
            await requests.send()

    async with asyncio.TaskGroup() as tasks:
        disturbing = tasks.create_task(_disturb(options, replicas, requests, directory))
        for _ in range(NUM_AT_ONCE):
            tasks.create_task(client())
    log(f"{requests.num_done} requests were answered")
    return disturbing.result()


async def _disturb(
    options: Options, replicas: Replicas, requests: Requests, directory: Path
) -> list[int]:
    """Pauses the engine and kills services in random order, spread evenly over the requests.
    Returns the times of the kills, in nanoseconds since the epoch.
    """
    events = ["kill"] * options.num_kills + ["pause"] * options.num_pauses
    requests.draw.shuffle(events)
    first = requests.num_done
    kills: list[int] = []
    each = (options.num_requests - first) / (len(events) + 1)
    for number, event in enumerate(events, start=1):
        await requests.until_done(first + int(number * each))
        if event == "pause":
            await _pause(requests, directory)
        else:
            name = VICTIMS[len(kills) % len(VICTIMS)]
            log(f"{requests.num_done} answered: {name} is killed")
            kills.append(time.time_ns())
            await replicas.kill(name)
    return kills


async def _pause(requests: Requests, directory: Path) -> None:
    """Pauses the engine briefly while requests run."""
    channel = open_channel(f"unix:{directory / 'scheduler'}.sock")
    try:
        scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        async with asyncio.timeout(RECOVERY_SECONDS):
            while not await _is_running(scheduler) and requests.num_done < requests.num_sent:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
        admin = scheduler_pb2_grpc.SchedulerAdminStub(channel)
        mode = scheduler_pb2.PAUSE_MODE_KEEP
        await admin.Pause(scheduler_pb2.PauseRequest(mode=mode), timeout=RECOVERY_SECONDS)
        await asyncio.sleep(PAUSE_SECONDS)
        await admin.Resume(scheduler_pb2.ResumeRequest(), timeout=RECOVERY_SECONDS)
    finally:
        await channel.close()


async def _is_running(scheduler: "scheduler_pb2_grpc.SchedulerAsyncStub") -> bool:
    with suppress(grpc.aio.AioRpcError):  # it was killed and has not restarted
        stats = await scheduler.GetStats(scheduler_pb2.GetStatsRequest(), timeout=1)
        return bool(stats.num_running)
    return False


def main(argv: Sequence[str]) -> int:
    """Runs the test and prints the report. Returns 1 if it failed."""
    parser = make_parser("soak traces", __doc__)
    add_model(parser)
    parser.add_argument(
        "--requests", type=count, default=200, help="number of requests (default: 200)"
    )
    parser.add_argument(
        "--kills", type=int, default=6, help="number of times that a service is killed (default: 6)"
    )
    parser.add_argument(
        "--pauses",
        type=int,
        default=6,
        help="number of times that the engine is paused (default: 6)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default: 0)")
    parsed = parser.parse_args(argv)
    options = Options(parsed.model, parsed.requests, parsed.kills, parsed.pauses, parsed.seed)
    with tempfile.TemporaryDirectory(prefix="stepwell-traces-") as directory:
        report = run_program(run(options, Path(directory)))
    print(report.text())
    return 0 if report.is_good else 1
