"""Prometheus metrics of a worker. Each scrape reads the counters."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.histogram import Histogram
from services.common.telemetry.metric_specs import replica, single, summary_family
from services.worker.core.worker import WorkerDescription


class WorkerMetrics(Collector):
    """Counts steps and streams. Before the model is loaded, only streams are reported."""

    def __init__(self) -> None:
        self._description: WorkerDescription | None = None
        self._num_streams = 0
        self._num_tokens = 0
        self._execute = Histogram(replica.WORKER_STEP_SECONDS)
        self._num_waits = 0
        self._wait_nanos = 0

    def loaded(self, description: WorkerDescription) -> None:
        self._description = description

    def stream_opened(self) -> None:
        self._num_streams += 1

    def stepped(self, num_tokens: int, queue_nanos: int, execute_nanos: int) -> None:
        """Counts a completed step of `num_tokens` tokens, its wait and its execution."""
        self._num_tokens += num_tokens
        self._num_waits += 1
        self._wait_nanos += queue_nanos
        self._execute.observe(execute_nanos / 1e9)

    def collect(self) -> Iterator[Metric]:
        yield single(replica.WORKER_STREAMS, self._num_streams)
        if self._description is None:
            return
        size = self._description.num_blocks * self._description.bytes_per_block
        yield single(replica.WORKER_KV_CACHE_BYTES, size)
        yield single(replica.WORKER_TOKENS, self._num_tokens)
        known = self._description
        yield single(replica.WORKER_KERNELS, 1, known.kernels, known.dtype, known.kv_cache_dtype)
        yield self._execute.metric()
        waits = summary_family(replica.WORKER_STEP_WAIT_SECONDS)
        waits.add_metric((), self._num_waits, self._wait_nanos / 1e9)
        yield waits
