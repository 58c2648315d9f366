"""Sums and gathers of tensors over ranks, with torch.distributed: gloo on CPUs, NCCL on GPUs."""

import datetime
from collections import deque
from typing import Any

import torch
import torch.distributed

from services.worker.backends.ranks import GatheringRanks, Ranks
from services.worker.parallel.membership import Membership

dist: Any = torch.distributed
_RING_BYTES = 2**18
_TAG = 0


class GlooRanks(GatheringRanks):
    """Exchanges tensors on the CPU between ranks. A call raises RuntimeError if it exceeds the
    timeout, or if another rank has ended.

    All parts of a sum are gathered and then added in rank order. gloo's own sum (a ring) adds the
    parts in an order that depends on the position in the tensor, so that a row's last bit would
    depend on the row's index in the step. With two ranks the order does not matter, so the ring is
    used for large tensors. The ring takes half the time for 4 MiB, and twice the time for 2 KiB.
    """

    def __init__(
        self, store: Any, rank: int, size: int, host: str, timeout: datetime.timedelta
    ) -> None:
        super().__init__(rank, size)
        self._group = gloo_group(dist.PrefixStore("gloo", store), rank, size, host, timeout)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        if self.size == 2 and part.nbytes >= _RING_BYTES:
            ring = part.contiguous()
            self._group.allreduce([ring]).wait()
            return ring
        return super().sum(part)

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        parts = torch.empty((self.size, *part.shape), dtype=part.dtype)
        self._group.allgather([list(parts)], [part.contiguous()]).wait()
        return parts


def gloo_group(store: Any, rank: int, size: int, host: str, timeout: datetime.timedelta) -> Any:
    """Creates a gloo process group over the network interface with the address `host`."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


class NcclRanks:
    """Exchanges tensors on GPUs between ranks. Operations are queued on the GPU. `host` exchanges
    numbers that are not on a GPU.

    NCCL adds each element on one rank and sends the result, so that all ranks get the same bits.
    """

    def __init__(self, store: Any, host: Ranks, timeout: datetime.timedelta) -> None:
        self.rank = host.rank
        self.size = host.size
        self._host = host
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        store = dist.PrefixStore("nccl", store)
        self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        total = part.contiguous()
        self._group.allreduce([total]).wait()
        return total

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        rows, width = part.shape
        parts = part.new_empty((self.size * rows, width))
        self._group._allgather_base(parts, part.contiguous()).wait()
        return parts.view(self.size, rows, width).transpose(0, 1).flatten(1)

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        return self._host.exchange(numbers)


class StageLink:
    """Sends tensors to the next pipeline stage, and receives tensors from the previous one, over
    gloo. A rank sends to, and receives from, the ranks that have its index in the neighbouring
    stages. Tensors arrive unchanged, in the order in which they were sent. The receiver must know
    their shapes.

    A call raises RuntimeError if it exceeds the timeout, or if the other rank has ended.
    """

    def __init__(
        self, store: Any, membership: Membership, host: str, timeout: datetime.timedelta
    ) -> None:
        self._before = membership.rank - membership.tensor_parallel_size
        self._behind = membership.rank + membership.tensor_parallel_size
        self._group = gloo_group(
            dist.PrefixStore("stages", store), membership.rank, membership.size, host, timeout
        )
        self._most_unsent = 2 * (membership.pipeline_parallel_size + 1)
        self._unsent: deque[tuple[Any, torch.Tensor]] = deque()
        """The sends in progress and their tensors, which gloo may still read."""

    def send(self, tensor: torch.Tensor) -> None:
        """Begins to send a tensor, which the caller must not change afterwards. Waits while 2 *
        (stages + 1) sent tensors were not received yet. That is room for the steps in flight,
        because a step sends two tensors.
        """
        while len(self._unsent) >= self._most_unsent:
            work, _ = self._unsent.popleft()
            work.wait()
        self._unsent.append((self._group.send([tensor], self._behind, _TAG), tensor))

    def receive(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], self._before, _TAG).wait()
