"""The link between pipeline stages: tensors over gloo, from each stage to the one behind it."""

import datetime
from collections import deque
from typing import Any

import torch

from services.worker.parallel.collectives import dist, gloo_group
from services.worker.parallel.membership import Membership

_TAG = 0


class StageLink:
    """Sends to the rank of the next stage that has the same place in it, and receives from that of
    the stage before. Tensors arrive in the order in which they were sent, each as it was; what
    receives must know their shapes.

    A call raises RuntimeError if it takes longer than the timeout, or if the other rank has ended.
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
        """What gloo may still read."""

    def send(self, tensor: torch.Tensor) -> None:
        """Begins to send a tensor, which must not be changed any more, and returns. Waits if those
        of as many steps as there are stages were not received yet.
        """
        while len(self._unsent) >= self._most_unsent:
            work, _ = self._unsent.popleft()
            work.wait()
        self._unsent.append((self._group.send([tensor], self._behind, _TAG), tensor))

    def receive(self, tensor: torch.Tensor) -> None:
        """Waits for the next tensor of the stage before, and fills `tensor` with it."""
        self._group.recv([tensor], self._before, _TAG).wait()
