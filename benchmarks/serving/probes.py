"""Sends the load whose traces show the cost of each hop (part) of a step."""

import secrets
import time

from benchmarks.common.clients import HttpClient, SessionClient
from benchmarks.common.hops import HopRun
from benchmarks.common.load import Load, run_load
from benchmarks.common.stack import Stack

PROBE_EVERY = 8
_SAMPLED, _UNSAMPLED = 1, 0


async def run_hops(stack: Stack, load: Load) -> HopRun:
    """Sends a load over HTTP, then a similar one over a session (a gateway's stream) with the
    scheduler.

    Every eighth request of the HTTP load is traced. These requests are called probes.
    """
    run = HopRun(load.concurrency, time.time_ns())
    total = load.concurrency * load.requests_each
    trace_ids = [secrets.token_bytes(16) for _ in range(total)]
    is_probe = [number % PROBE_EVERY == min(total, PROBE_EVERY) // 2 for number in range(total)]
    traceparents = [
        f"00-{trace_id.hex()}-{secrets.token_hex(8)}-{_SAMPLED if probe else _UNSAMPLED:02x}"
        for trace_id, probe in zip(trace_ids, is_probe, strict=True)
    ]
    client = HttpClient(stack.http)
    await client.open(load.concurrency)
    times = await run_load(client, load, traceparents)
    await client.close()
    run.probes = {
        trace_id: taken
        for trace_id, taken, probe in zip(trace_ids, times, is_probe, strict=True)
        if probe
    }
    session = SessionClient(stack.scheduler)
    prompts = [load.prompt(total + number) for number in range(load.concurrency)]
    async for deltas in session.deltas(prompts, load.output_tokens):
        run.session.append((deltas.step, time.time_ns()))
    await session.close()
    run.ended = time.time_ns()
    return run
