"""All ranks of a model as processes of one container."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model
from tests.worker.rank_threads import free_port
from tests.worker.worker_process import DEADLINE_SECONDS, outcome, start, until_serving


async def start_all(directory: Path, size: int) -> asyncio.subprocess.Process:
    save_tiny_model(directory / "model", "llama")
    return await start(
        *("--model", str(directory / "model"), "--tensor-parallel-size", str(size)),
        *("--address", f"unix:{directory}/{{rank}}.sock", "--master-port", str(free_port())),
        module="services.worker.local_ranks",
        HOSTNAME="replica-5",  # the number of a replica, not of a rank
        STEPWELL_WORKER_HEALTH_ADDRESS=f"unix:{directory}/health.sock",
        STEPWELL_WORKER_HEALTH_FILE=f"{directory}/health",
    )


def pids_of_ranks(process: asyncio.subprocess.Process) -> list[int]:
    return [
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


async def test_all_ranks_serve_and_end_with_the_container(tmp_path: Path) -> None:
    process = await start_all(tmp_path, 2)
    for name in ("0", "1", "health"):
        await asyncio.wait_for(until_serving(f"unix:{tmp_path}/{name}.sock"), DEADLINE_SECONDS)
    assert (tmp_path / "health").read_text().startswith("ready ")
    process.send_signal(signal.SIGTERM)
    status, lines = await outcome(process)
    assert status == 0, lines
    assert sum("exchange tensors through shared memory" in line for line in lines) == 2


async def test_a_killed_rank_ends_the_others_before_they_have_joined(tmp_path: Path) -> None:
    process = await start_all(tmp_path, 2)
    async with asyncio.timeout(DEADLINE_SECONDS):
        while len(pids := pids_of_ranks(process)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    os.kill(pids[1], signal.SIGKILL)
    status, lines = await outcome(process)
    assert status == 128 + signal.SIGKILL, lines
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_signal_at_the_start_of_a_rank_reaches_this_rank(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    done = subprocess.run(
        [
            *(sys.executable, "-c", _SIGNAL_AT_START, "--model", str(tmp_path / "model")),
            *("--tensor-parallel-size", "2", "--address", f"unix:{tmp_path}/{{rank}}.sock"),
        ],
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    # The signal ends a rank that still imports its modules. Later, it would be killed instead.
    assert done.returncode == 128 + signal.SIGTERM


_SIGNAL_AT_START = """
import os, signal
from services.worker import local_ranks

def start(*arguments, start=os.posix_spawn):
    pid = start(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.posix_spawn = start
local_ranks.main()
"""


async def test_ranks_that_cannot_start_end_with_their_reason(tmp_path: Path) -> None:
    process = await start_all(tmp_path, 3)
    status, lines = await outcome(process)
    assert status == 1
    assert any("cannot be divided over 3 ranks" in line for line in lines)
