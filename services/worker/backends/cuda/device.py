"""One CUDA device: pinned copies that nobody waits for, and graphs."""

from collections.abc import Callable
from typing import Any

import torch

from services.worker.backends.device import Array, Download

_WARM_UPS = 2


class CudaDevice:
    """The current CUDA device, driven by one thread over its default stream.

    Copies lie in pinned memory, which torch's allocator hands out again once the device is done
    with it; so one may be queued for every step in flight.

    What is recorded through one instance lives and ends together: it shares a pool of memory, whose
    handle means nothing any more once the last graph in it is gone, and a stream, whose workspace
    for matrix products torch may free when any graph that was captured on it goes.
    """

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.num_processors = int(torch.cuda.get_device_properties(index).multi_processor_count)
        self._graph_memory: Any = torch.cuda.graph_pool_handle()
        self._aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def upload(self, array: Array) -> torch.Tensor:
        """See Device."""
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> Download:
        """See Device."""
        return _PinnedDownload(tensor)

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See Device. A CUDA graph: the first runs compile kernels, one more is captured.

        They run on the stream that the capture is on, so that its workspace for matrix products is
        there before and lies in no graph's memory. Graphs share all memory but their results.
        """
        current, aside = torch.cuda.current_stream(), self._aside
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._graph_memory, stream=aside, capture_error_mode="thread_local"
        ):
            result = work()
        return _Recording(graph, work, result)


class _Recording:
    """A captured graph. It keeps `work`, and with it the memory that the graph reads."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, work: Callable[[], torch.Tensor], result: torch.Tensor
    ) -> None:
        self._graph = graph
        self._work = work
        self._result = result

    def __call__(self) -> torch.Tensor:
        self._graph.replay()
        return self._result


class _PinnedDownload:
    """A copy to pinned memory, and the event behind it. Who waits sleeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._arrived.record()

    def wait(self) -> Array:
        self._arrived.synchronize()
        array: Array = self._copy.numpy()
        return array
