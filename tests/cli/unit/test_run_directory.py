"""The private directory of one run of `stepwell up`, which contains its sockets."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.errors import CommandError
from services.cli.processes.ports import claim_port
from services.cli.processes.run_directory import run_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def test_the_directory_is_private_and_removed_at_the_end() -> None:
    with run_directory() as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "scheduler.sock").touch()
    assert not path.exists()


@pytest.mark.parametrize("num_bytes", [71, 150], ids=["for streams alone", "for all"])
def test_a_long_path_would_not_fit_an_address(directory: Path, num_bytes: int) -> None:
    long = directory / ("x" * (num_bytes - len(f"{directory}/")))
    long.mkdir()
    code = """
from services.cli.processes.run_directory import run_directory
with run_directory() as path:
    print(path)
"""
    path = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(long)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert len(f"{path}/scheduler-63.sock.streams") <= 107
    assert list(long.iterdir()) == []


def test_port_zero_is_a_free_one_that_no_other_process_is_given() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        port = claim_port("127.0.0.1", 0, "--http-port")
        assert 1024 <= port < first
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(CommandError, match=f"port {port} of 127.0.0.1 is taken"),
        ):
            claim_port("127.0.0.1", port, "--http-port")
