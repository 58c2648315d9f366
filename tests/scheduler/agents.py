"""Runs turns of agents' programs on a scheduler, for tests of the scheduling policy `program`."""

from typing import Any

from services.common.request.sampling import SamplingParams
from services.scheduler.core.policies.program.retention import ProgramRetention
from services.scheduler.core.request import Request
from tests.scheduler.story import Story


class Agents:
    """Runs turns of programs (an agent's requests) on a scheduler whose clock the test sets."""

    def __init__(self, *, policy: str = "program", **config: Any) -> None:
        self.story = Story(policy=policy, **config)
        self.now = 0.0
        retention = self.story.scheduler.retention
        assert retention is not None
        retention._clock = lambda: self.now
        if isinstance(retention, ProgramRetention):
            retention._due_times.continuing = 1.0  # as if the programs before had many turns
        self.retention: ProgramRetention = retention
        for number in range(1, 40):
            self.story.scheduler.step_costs.observe(number, number, 1.0 + 0.001 * number)
            self.story.scheduler.step_costs.observe(1, 101, 11.0)

    async def turn(
        self, name: str, token_ids: list[int], max_tokens: int = 4, **fields: Any
    ) -> list[int]:
        """Runs a request to its end. Returns prompt and answer, with which the next turn begins."""
        request = self.story.add(name, token_ids, max_tokens=max_tokens, **fields)
        while not request.is_finished:
            await self.step()
        await self.step()
        return list(request.token_ids)

    async def step(self) -> None:
        await self.story.step()
        self.now += 0.01

    def cached(self, token_ids: list[int]) -> int:
        request = Request("probe", 0, token_ids, len(token_ids), SamplingParams())  # type: ignore[arg-type]
        request.hash_full_blocks(b"", self.story.config.block_size)
        indexes = self.story.pool.core._blocks.indexes
        sizes = [one in set(indexes[0].hashes()) for one in request.block_hashes]
        return self.story.config.block_size * [*sizes, False].index(False)
