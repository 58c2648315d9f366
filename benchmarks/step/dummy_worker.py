"""A worker that computes nothing: the real process, server and thread around an empty step.

    python -m benchmarks.step.dummy_worker --address unix:PATH --max-num-seqs 256
                                           --num-blocks 10000

The worker runs one step after another. After a fixed time it replies to a step with made-up tokens.
The rest of a step's time is overhead. Commands are lines of JSON on standard input:

* `{"step_millis": 5, "bare_steps": 100}` sets the time of a step, and runs 100 steps without
  requests in the compute thread. The reply lists the times at which these steps ended.
* `{}` asks for the steps since the last command. The reply lists the end time and the number of
  requests of each step.

Times are nanoseconds of the monotonic clock.
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import uvloop
from stepwell.worker.v1 import worker_pb2_grpc

from benchmarks.step.dummy_replica import BLOCK_SIZE
from services.common.rpc.server import GrpcServer
from services.common.telemetry.tracing import configure_tracing
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.servicer import WorkerServicer
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import StepInput, StepOutput
from services.worker.core.worker import Worker, WorkerDescription

SERVICE = "stepwell.worker.v1.Worker"
MAX_MODEL_LEN = 4096
MAX_NUM_BATCHED_TOKENS = 8192
VOCAB_SIZE = 32_000
_MADE_UP_TOKEN = 5


class DummyRunner:
    """Replaces a `ModelRunner`. It records the end time and the number of requests of each step in
    which every request computes one token.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.step_seconds = 0.0
        self.served: list[tuple[int, int]] = []
        self._num_known = np.zeros(max_num_seqs, np.int32)

    def reset(self) -> None: ...

    def begin(self, step: StepInput) -> StepOutput:
        """Waits for a step's time. Makes up a token for each request whose prompt is computed."""
        begun = time.perf_counter()
        for request in step.new_requests:
            self._num_known[request.row] = len(request.token_ids)
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        num_tokens = (ends >= self._num_known[step.rows]).astype(np.int32)
        made_up = np.full(num_tokens.sum(), _MADE_UP_TOKEN, np.int32)
        output = StepOutput(step.generation, step.step, num_tokens, made_up)
        is_decode = step.num_scheduled_tokens.sum() == len(step.rows)
        self._wait_since(begun)
        if is_decode:
            self.served.append((time.perf_counter_ns(), len(step.rows)))
        return output

    def run_bare(self, num_steps: int) -> list[int]:
        """Waits for a step's time, `num_steps` times. Returns each wait's end in nanoseconds."""
        ended = []
        for _ in range(num_steps):
            self._wait_since(time.perf_counter())
            ended.append(time.perf_counter_ns())
        return ended

    def _wait_since(self, begun: float) -> None:
        """Waits until `step_seconds` have passed since `begun`."""
        left = begun + self.step_seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def take(self) -> list[tuple[int, int]]:
        """Returns the steps that were recorded since the last call."""
        served, self.served = self.served, []
        return served


def description(max_num_seqs: int, num_blocks: int) -> WorkerDescription:
    """The answer to Describe, for an invented model."""
    return WorkerDescription(
        incarnation=uuid.uuid4().hex,
        model_name="dummy",
        fingerprint=bytes(32),
        tokenizer_fingerprint=b"",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        hidden_size=1,
        eos_token_ids=(),
        groups=(LayerGroup(None, (0,)),),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        bytes_per_block=0,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        kv_cache_sizing="as set",
        dtype="none",
        kv_cache_dtype="none",
        kernels="none",
    )


async def serve(address: str, max_num_seqs: int, num_blocks: int, endpoint: str) -> None:
    """Serves steps and executes commands until standard input ends."""
    tracing = configure_tracing("worker", endpoint, 1.0)
    compute, runner = ComputeThread(), DummyRunner(max_num_seqs)
    servicer = WorkerServicer(compute, tracing, WorkerMetrics())
    server = GrpcServer(has_local_streams=True)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, SERVICE)
    try:
        await server.start(address)
        servicer.open(Worker(cast(ModelRunner, runner), description(max_num_seqs, num_blocks)))
        await server.set_ready(True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer = await _answer(runner, compute, json.loads(line))
            print(json.dumps(answer), flush=True)
    finally:
        servicer.close()
        await server.drain(0)
        compute.close()
        tracing.shutdown()


async def _answer(
    runner: DummyRunner, compute: ComputeThread, command: dict[str, Any]
) -> Sequence[Any]:
    if "step_millis" not in command:
        return runner.take()
    runner.step_seconds = command["step_millis"] / 1e3
    runner.take()
    return await compute.submit(lambda: runner.run_bare(command["bare_steps"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step.dummy_worker")
    parser.add_argument("--address", required=True, help="where to listen")
    parser.add_argument("--max-num-seqs", type=int, required=True, help="requests at once")
    parser.add_argument("--num-blocks", type=int, required=True, help="blocks of the KV cache")
    parser.add_argument("--otlp-endpoint", default="", help="where traces go; empty: nowhere")
    parsed = parser.parse_args()
    uvloop.run(serve(parsed.address, parsed.max_num_seqs, parsed.num_blocks, parsed.otlp_endpoint))


if __name__ == "__main__":
    main()
