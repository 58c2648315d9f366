"""Requests with structured outputs run beside a measured load, and their errors are reported."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.common.load import Load
from benchmarks.serving.structured_neighbors import SAMPLED, NeighborTarget
from tests.gateway.fake_scheduler import FIRST_ORDINARY, NUM_WHOLE_CHARACTERS
from tests.gateway.serving import Serving, serving
from tests.gateway.tiny_tokenizer import write_tokenizer

LOAD = Load(2, 3, 8, 5, FIRST_ORDINARY + NUM_WHOLE_CHARACTERS, "load")


@dataclass(frozen=True)
class Served:
    serving: Serving

    @property
    def http(self) -> str:
        return self.serving.base_url.removeprefix("http://")

    @property
    def grpc(self) -> str:
        return self.serving.grpc_address

    def pids(self) -> dict[str, int]:
        return {}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(write_tokenizer(tmp_path / "tiny")) as running:
        yield Served(running)


async def test_the_result_is_of_the_load_alone(served: Served) -> None:
    times = await NeighborTarget(served, SAMPLED).run(LOAD)
    assert [one.num_tokens for one in times] == [5] * 6
    seeds = [add.sampling.seed for add in served.serving.scheduler.adds]
    assert sum(seed != SAMPLED["seed"] for seed in seeds) == 6
    assert SAMPLED["seed"] in seeds


async def test_a_request_beside_the_load_that_fails_ends_it(served: Served) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await NeighborTarget(served, {"temperature": -1}).run(LOAD)
    assert all("400" in str(error) for error in failed.value.exceptions)
    assert "temperature" in str(failed.value.exceptions[0])
