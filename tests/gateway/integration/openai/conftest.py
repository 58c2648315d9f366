"""Fixtures shared by the tests of OpenAI's and Anthropic's doors."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.serving import Serving, serving_with


@pytest.fixture
async def hermes(calling: Path) -> AsyncIterator[Serving]:
    """A gateway that parses tool calls and reasoning, with the model of the test's module."""
    async with serving_with(calling, "hermes", "qwen3") as served:
        yield served
