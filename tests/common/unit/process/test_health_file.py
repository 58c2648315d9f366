"""The health file that a service writes, and the shell script probe.sh that reads it."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import Unavailable
from services.common.rpc.server import GrpcServer
from tests.waiting import until

PROBE = Path(__file__).parents[4] / "deploy" / "docker" / "probe.sh"

# A server that is ready until it is killed.
SERVE = """
import asyncio, sys
from pathlib import Path
from services.common.rpc.server import GrpcServer
async def main():
    server = GrpcServer()
    await server.start(sys.argv[1], health_file=Path(sys.argv[2]))
    await server.set_ready(True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def probe(file: Path, seconds: int = 10) -> tuple[int, str]:
    """Runs probe.sh. Returns its exit status and output. PATH is empty, so that the shell can run
    only built-in commands.
    """
    ran = subprocess.run(
        ["/bin/sh", str(PROBE), str(file), str(seconds)],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not ran.stderr
    return ran.returncode, ran.stdout.strip()


def uptime() -> int:
    return int(Path("/proc/uptime").read_text().partition(".")[0])


async def test_the_file_says_what_grpc_health_says(tmp_path: Path) -> None:
    file, server = tmp_path / "health", GrpcServer()
    assert probe(file) == (1, f"the service has not yet written its health file {file}")
    await server.start(f"unix:{tmp_path}/pool", health_file=file)
    assert probe(file) == (1, "the service is not ready, its state is live")
    await server.set_ready(True)
    assert probe(file) == (0, "")
    await server.set_live(False)
    assert probe(file) == (1, "the service is not ready, its state is not-live")
    await server.set_live(True)
    await server.drain(0)
    assert probe(file) == (1, "the service is not ready, its state is live")


@pytest.mark.parametrize("age_seconds", [0, 100])
def test_a_probe_costs_a_few_milliseconds_of_a_processor(age_seconds: int, tmp_path: Path) -> None:
    """The probe is a shell script, because Python alone needs over ten milliseconds to start."""
    file = tmp_path / "health"

    def cost() -> float:
        file.write_text(f"ready {os.getpid()} {uptime() - age_seconds} 0 0\n")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        probe(file)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cost() for _ in range(10)) < 0.006


async def test_a_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"cannot write .*/none/health: No such file"):
        await GrpcServer().start(f"unix:{tmp_path}/pool", health_file=tmp_path / "none" / "health")


async def test_the_file_of_a_stopped_service_becomes_stale(tmp_path: Path) -> None:
    file = tmp_path / "health"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVE, f"unix:{tmp_path}/pool", str(file))
    )
    await until(lambda: probe(file, 1)[0] == 0)
    beat = file.read_text()
    await until(lambda: file.read_text() != beat and probe(file, 1)[0] == 0)
    process.send_signal(signal.SIGSTOP)
    await until(lambda: probe(file, 1)[0] == 1)
    assert probe(file, 1) == (1, "the process of the service is stopped (SIGSTOP)")
    process.kill()
    await process.wait()
    assert probe(file, 1) == (1, "the process of the service has ended")


@pytest.mark.parametrize(
    ("starved_seconds", "answer"),
    [(95, (0, "")), (50, (1, "the service hangs: it has not updated its health file for 100 s"))],
)
async def test_time_in_which_the_service_waited_for_a_processor_does_not_count(
    starved_seconds: int, answer: tuple[int, str], tmp_path: Path
) -> None:
    sleeping = await asyncio.create_subprocess_exec("sleep", "60")
    stat, times = (Path(f"/proc/{sleeping.pid}/{name}") for name in ("stat", "schedstat"))
    try:
        await until(lambda: ") S " in stat.read_text())
        ran, waited, _ = map(int, times.read_text().split())
        waited -= starved_seconds * 10**9
        file = tmp_path / "health"
        file.write_text(f"ready {sleeping.pid} {uptime() - 100} {ran} {waited}\n")
        assert probe(file) == answer
    finally:
        sleeping.kill()
        await sleeping.wait()
