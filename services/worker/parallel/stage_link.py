"""The link between pipeline stages: sends tensors to the next stage over gloo."""

import datetime
from collections import deque
from typing import Any

import torch

from services.worker.parallel.collectives import dist, gloo_group
from services.worker.parallel.membership import Membership

_TAG = 0


class StageLink:
    """Sends tensors to the next stage, and receives tensors from the previous stage. It connects
    ranks with the same index in their stages. Tensors arrive unchanged, in the order in which they
    were sent. The receiver must know their shapes.

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
        """Sends in progress, with their tensors, which gloo may still read."""

    def send(self, tensor: torch.Tensor) -> None:
        """Begins to send a tensor, which the caller must not change afterwards. A step sends two
        tensors. Waits while 2 * (stages + 1) sent tensors have not been received.
        """
        while len(self._unsent) >= self._most_unsent:
            work, _ = self._unsent.popleft()
            work.wait()
        self._unsent.append((self._group.send([tensor], self._behind, _TAG), tensor))

    def receive(self, tensor: torch.Tensor) -> None:
        """Waits for the next tensor from the previous stage, and copies it into `tensor`."""
        self._group.recv([tensor], self._before, _TAG).wait()
