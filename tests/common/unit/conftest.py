"""What tests of servers need."""

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A TCP port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
