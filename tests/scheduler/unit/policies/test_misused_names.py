"""A tenant that misnames its programs (agents' sequences of requests) does not slow others down."""

from collections.abc import Callable
from itertools import count
from statistics import fmean

import pytest

from services.common.request.program import DeclaredProgram
from services.scheduler.core.request import Request
from tests.scheduler.agents import Agents
from tests.scheduler.story import prompt

NUM_PROGRAMS, NUM_TURNS, TOOL_SECONDS = 8, 6, 0.1
Naming = Callable[[int, int], DeclaredProgram | None]
"""Maps the numbers of a program and of a turn to the name that the client sends with the turn."""


async def mean_end(naming: Naming) -> float:
    """The mean end time of a tenant's programs, while a second tenant runs as many programs and
    names them by `naming`. The pool has blocks for about half of all contexts (KV blocks that
    programs would reuse).
    """
    agents = Agents(num_blocks=81, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    names, ends = count(), list[float]()

    def begin(tenant: bytes, program: int, turn: int, tokens: list[int]) -> None:
        named = naming(program, turn) if tenant == b"bad" else DeclaredProgram(f"job {program}")
        fields = {"tenant": tenant, "cache_salt": tenant.decode(), "program": named}
        request = agents.story.add(f"{next(names)}", tokens, max_tokens=4, **fields)
        running[request] = tenant, program, turn

    running = dict[Request, tuple[bytes, int, int]]()
    paused = list[tuple[float, bytes, int, int, list[int]]]()
    for program in range(NUM_PROGRAMS):
        for tenant in (b"bad", b"good"):
            begin(tenant, program, 0, prompt(40, first=100 * program + 1))
    while running or paused:
        await agents.step()
        for request in [one for one in running if one.is_finished]:
            tenant, program, turn = running.pop(request)
            if turn + 1 < NUM_TURNS:
                tokens = [*request.token_ids, *prompt(8, first=900)]
                paused.append((agents.now + TOOL_SECONDS, tenant, program, turn + 1, tokens))
            elif tenant == b"good":
                ends.append(agents.now)
        for one in [one for one in paused if one[0] <= agents.now]:
            paused.remove(one)
            begin(*one[1:])
    assert len(ends) == NUM_PROGRAMS
    return fmean(ends)


@pytest.mark.parametrize(
    "naming",
    [
        lambda _program, turn: DeclaredProgram("the only one", tool=f"tool {turn}"),
        lambda program, turn: DeclaredProgram(f"{program} {turn}"),
        lambda program, _turn: DeclaredProgram(f"job {program}"),
        lambda program, _turn: DeclaredProgram(f"job {program}", ends=True),
        lambda program, _turn: DeclaredProgram(f"own {program}", parent_id=f"job {program}"),
        lambda program, _turn: DeclaredProgram(f"own {program}", keep_seconds=3600),
    ],
    ids=[
        "one name, another tool each time",
        "another name for each turn",
        "names of the other tenant",
        "each turn is the last",
        "children of the other tenant",
        "everything is to be kept",
    ],
)
async def test_wrong_names_do_not_slow_other_tenants(naming: Naming) -> None:
    without_names = await mean_end(lambda _program, _turn: None)
    assert await mean_end(naming) <= 1.1 * without_names
