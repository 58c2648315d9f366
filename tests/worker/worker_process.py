"""The worker as a separate process."""

import asyncio
import os
import sys
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.channel import open_channel

DEADLINE_SECONDS = 60
ROOT = Path(__file__).parents[2]


async def start(
    *flags: str, module: str = "services.worker", **environ: str
) -> asyncio.subprocess.Process:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("STEPWELL_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--num-threads", "1", *flags),
        cwd=ROOT,
        env={**clean, "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}", **environ},
        stderr=asyncio.subprocess.PIPE,
    )


async def outcome(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_SECONDS)
    assert process.returncode is not None
    return process.returncode, errors.decode().splitlines()


async def until_serving(address: str) -> None:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service="ready"), wait_for_ready=True
            )
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            await asyncio.sleep(0.05)
