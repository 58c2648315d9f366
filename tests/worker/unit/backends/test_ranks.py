"""The collectives of ranks that share memory, and of ranks that are connected by gloo."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from services.worker.backends.kernels import Kernels
from services.worker.backends.native.shared_ranks import NativeRanks
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.parallel.collectives import GlooRanks
from services.worker.parallel.group import Timeouts
from services.worker.parallel.shared_memory import made_memory, mapped_memory
from tests.worker.rank_threads import TIMEOUTS, RankThread, free_port, native_kernels, on_ranks


@pytest.fixture(params=["shared memory", "gloo"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels() if request.param == "shared memory" else TorchKernels()


def parts(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [(torch.randn(shape) * 1e3).to(dtype) for _ in range(size)]


def summed(of_ranks: list[torch.Tensor]) -> torch.Tensor:
    total = of_ranks[0].float()
    for other in of_ranks[1:]:
        total = total + other.float()
    return total.to(of_ranks[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_same_bits_on_all_ranks_and_in_any_batch(
    kernels: Kernels, size: int, dtype: torch.dtype
) -> None:
    given = parts(size, 700, 1024, dtype=dtype)  # several rounds

    def work(thread: RankThread) -> tuple[torch.Tensor, torch.Tensor]:
        own, ranks = given[thread.ranks.rank], thread.ranks
        alone = torch.cat([ranks.sum(row.clone()) for row in own[-5:].split(1)])
        return ranks.sum(own.clone()), alone

    expected = summed(given)
    for together, alone in on_ranks(size, work, kernels=kernels):
        assert torch.equal(together, expected)
        assert torch.equal(alone, expected[-5:])


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (3, 300_000)])
def test_rows_are_gathered_side_by_side(kernels: Kernels, rows: int, width: int) -> None:
    given = parts(3, rows, width)
    whole = on_ranks(3, lambda t: t.ranks.gather(given[t.ranks.rank]), kernels=kernels)
    for gathered in whole:
        assert torch.equal(gathered, torch.cat(given, dim=1))


def test_numbers_are_exchanged(kernels: Kernels) -> None:
    numbers = [[2**63 - 1, 0, -1], [1, 2, 3]]
    exchanged = on_ranks(2, lambda t: t.ranks.exchange(numbers[t.ranks.rank]), kernels=kernels)
    assert exchanged == [numbers, numbers]


def test_a_fast_rank_does_not_overwrite_slots_that_others_read() -> None:
    """A rank that waits must still read the data of its own collective, not of a later one."""
    random = np.random.default_rng(0)
    widths, waits = random.integers(1, 5000, 1500), random.integers(0, 8, 1500)

    def work(thread: RankThread) -> None:
        rank = thread.ranks.rank
        for number, (width, waiting) in enumerate(zip(widths, waits, strict=True)):
            if waiting == rank:
                time.sleep(0.0002)
            own = torch.full((1, width), float(number + rank))
            assert torch.equal(thread.ranks.sum(own), torch.full((1, width), 2.0 * number + 1))

    on_ranks(2, work)


def test_no_rank_shares_memory_that_one_rank_cannot_map() -> None:
    port, done = free_port(), threading.Barrier(2)

    def joined(rank: int) -> tuple[type, list[list[int]]]:
        kernels = TorchKernels() if rank else native_kernels()
        thread = RankThread(rank, 2, port, TIMEOUTS, kernels)
        exchanged = thread.ranks.exchange([rank])
        done.wait(60)
        thread.group.close()
        return type(thread.ranks), exchanged

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(joined, range(2))) == [(GlooRanks, [[0], [1]])] * 2


def test_the_end_of_a_rank_ends_the_waits_of_others() -> None:
    left = threading.Event()

    def work(thread: RankThread) -> float:
        assert isinstance(thread.ranks, NativeRanks)
        if thread.ranks.rank == 1:
            assert left.wait(60)
            time.sleep(0.2)
            thread.group.close()
            return 0
        left.set()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 of the 2 ranks of this stage"):
            thread.ranks.sum(torch.ones(1, 1))
        with pytest.raises(RuntimeError):  # later collectives fail too
            thread.ranks.exchange([1])
        return time.monotonic() - began

    assert max(on_ranks(2, work)) < TIMEOUTS.collective_seconds / 2


def test_a_missing_rank_is_named_after_the_timeout(kernels: Kernels) -> None:
    def work(thread: RankThread) -> None:
        if thread.ranks.rank == 0:
            with pytest.raises(RuntimeError, match=r"within 0\.5 s|[Tt]imed? ?out"):
                thread.ranks.sum(torch.ones(1, 1))

    on_ranks(2, work, Timeouts(join_seconds=20, collective_seconds=0.5), kernels)


def test_memory_is_mapped_by_its_address_as_long_as_it_is_offered() -> None:
    with made_memory(5000) as (memory, address):
        assert memory[:5000] == bytes(5000)
        path, token = address.split()
        mapped = mapped_memory(address, 5000)
        assert mapped is not None
        mapped[4999] = 7
        assert memory[4999] == 7
        assert mapped_memory(f"{path} {'0' * len(token)}", 5000) is None
        assert mapped_memory(address, 6000) is None
    assert mapped_memory(address, 5000) is None
