"""A CUDA device: asynchronous copies through pinned memory, and CUDA graphs."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from services.worker.backends.device import Array, Download

_WARM_UPS = 2


class CudaDevice:
    """The current CUDA device, used by one thread over its default stream.

    Copies use pinned memory. torch's allocator reuses this memory only after the device has read or
    written it, so copies of several steps may be queued.

    All graphs recorded through one instance must be freed together, for two reasons. They share a
    memory pool, whose handle becomes invalid when its last graph is freed. They share a stream,
    whose workspace for matrix products torch may free when any graph captured on it is freed.
    """

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.num_processors = int(torch.cuda.get_device_properties(index).multi_processor_count)
        self._graph_memory: Any = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def upload(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> Download:
        return _PinnedDownload(tensor)

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Runs `work` to compile kernels, then captures one more run as a CUDA graph.

        All runs are on the capture's stream, so that the stream's workspace for matrix products is
        allocated before the capture, outside of the graph's memory. Graphs share all memory except
        their results.
        """
        current, stream = torch.cuda.current_stream(), self._stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # so that the graph's memory can be allocated
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(self._graph_memory, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError):  # it would hide the error of `work`
                    graph.capture_end()
                raise
            graph.capture_end()
        # The partial keeps `work` alive, and thereby the memory that the graph reads.
        return partial(_replay, graph, result, work)


def _replay(graph: torch.cuda.CUDAGraph, result: torch.Tensor, *_: object) -> torch.Tensor:
    graph.replay()
    return result


class _PinnedDownload:
    """A copy to pinned memory, and an event after it. A thread that waits for the event sleeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._arrived.record()

    def wait(self) -> Array:
        self._arrived.synchronize()
        array: Array = self._copy.numpy()
        return array
