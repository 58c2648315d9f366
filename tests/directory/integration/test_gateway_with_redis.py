"""A gateway process whose Redis refuses the connection."""

import asyncio
import os
import sys
from pathlib import Path

from tests.redis_servers import needs_redis, redis_server

MODEL = Path(__file__).parents[3] / "models" / "demo"


@needs_redis
async def test_a_wrong_password_ends_the_start(tmp_path):
    with redis_server(tmp_path, "--requirepass", "right") as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.gateway", "--model", str(MODEL)),
            *("--http-address", "127.0.0.1:0", "--address", "127.0.0.1:0"),
            *("--redis-url", f"redis://:wrong@127.0.0.1:{server.port}"),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
    assert process.returncode == 2
    last = errors.decode().splitlines()[-1]
    assert last.startswith(f"stepwell gateway: --redis-url {server.url}: Redis refuses user or ")
