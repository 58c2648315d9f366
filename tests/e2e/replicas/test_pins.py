"""All services with the policy `continuum-fixed`, which pins the blocks of an agent's turn."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.simulated_agents import simulated_stack, turn
from tests.e2e.stack import Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory: Path = tmp_path_factory.mktemp("pins")
    with closing(simulated_stack(directory, policy="continuum-fixed", num_blocks=21)) as running:
        yield running


@pytest.mark.parametrize(("tool", "num_cached"), [("sed", 64), (None, 0)])
def test_only_a_context_with_a_tool_is_kept_from_others(
    stack: Stack, tool: str | None, num_cached: int
) -> None:
    first = 3 if tool else 30
    fields = {"job_id": str(tool), "this_func_call": tool} if tool else {}
    context, _ = turn(stack.url, [*range(first, first + 60)], **fields)
    for other in range(3):  # each request needs nearly all blocks that are not pinned
        if tool is None:
            time.sleep(0.6)  # the previous turn's blocks are pinned for half a second
        turn(stack.url, [7 + (number * (other + 2)) % 90 for number in range(220)])
    assert turn(stack.url, [*context, 21, 22], **fields)[1] == num_cached
    stack.wait_until_nothing_is_held()
