"""Helpers shared by the scheduler's integration tests."""

import pytest

from services.cli.processes.ports import claim_port


@pytest.fixture
def free_port() -> int:
    """A TCP port on which no process listens."""
    return claim_port("127.0.0.1", 0, "--port")
