"""The probe of a container's health, against a real server."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.probe import probed_address, why_not_ready
from services.common.server import GrpcServer

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"STEPWELL_KVPOOL_ADDRESS": "0.0.0.0:9002"}, "127.0.0.1:9002"),
        ({"STEPWELL_KVPOOL_ADDRESS": "[::]:9002"}, "127.0.0.1:9002"),
        ({"STEPWELL_KVPOOL_ADDRESS": "10.0.0.8:9002"}, "10.0.0.8:9002"),
        ({"STEPWELL_KVPOOL_ADDRESS": "unix:/run/pool"}, "unix:/run/pool"),
        (
            {
                "STEPWELL_KVPOOL_ADDRESS": "0.0.0.0:9002",
                "STEPWELL_KVPOOL_HEALTH_ADDRESS": "127.0.0.1:9902",
            },
            "127.0.0.1:9902",
        ),
    ],
)
def test_a_service_is_asked_where_its_variables_say(environ: dict[str, str], address: str) -> None:
    assert probed_address("kvpool", environ) == address


def test_without_an_address_the_variables_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        probed_address("worker", {"STEPWELL_KVPOOL_ADDRESS": "0.0.0.0:9002"})
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "one of STEPWELL_WORKER_HEALTH_ADDRESS and STEPWELL_WORKER_ADDRESS must be set\n"
    )


async def _probe(address: str) -> subprocess.CompletedProcess[str]:
    """Runs the program as an image does."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "services.common.probe", "kvpool"],
        env={"STEPWELL_KVPOOL_ADDRESS": address},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


async def test_the_status_follows_readiness(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/pool"
    assert why_not_ready(address) == "UNAVAILABLE"
    server = GrpcServer()
    await server.start(address)
    try:
        starting = await _probe(address)
        await server.set_ready(True)
        ready = await _probe(address)
    finally:
        await server.drain(0)
    said = f"stepwell kvpool at {address} is not ready: it says that it is not\n"
    assert (starting.returncode, starting.stderr) == (1, said)
    assert (ready.returncode, ready.stderr) == (0, "")
