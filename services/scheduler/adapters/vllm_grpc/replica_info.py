"""A replica's description and present load in messages of vllm.grpc.engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.adapters.telemetry.statistics import Statistics
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine.engine_core import EngineCore

_SERVER_TYPE = "stepwell"


class GenerationRate:
    """Measures the rate of generated tokens per second, over at least `SECONDS`."""

    SECONDS = 0.5

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._num_tokens = 0
        self._rate = 0.0

    def at(self, num_tokens: int) -> float:
        """The present rate. `num_tokens` is the total number of tokens generated so far."""
        elapsed = self._clock() - self._at
        if elapsed >= self.SECONDS:
            self._rate = (num_tokens - self._num_tokens) / elapsed
            self._at, self._num_tokens = self._clock(), num_tokens
        return self._rate


@dataclass(eq=False)
class ReplicaInfo:
    """Builds the messages that describe one replica."""

    shape: ReplicaShape
    config: SchedulerConfig
    engine: EngineCore
    statistics: Statistics
    _rate: GenerationRate = field(init=False, default_factory=GenerationRate)
    _started: float = field(init=False, default_factory=time.monotonic)
    _received_unix_seconds: float = field(init=False, default=0.0)

    def received(self) -> None:
        self._received_unix_seconds = time.time()

    def model(self) -> vllm_engine_pb2.GetModelInfoResponse:
        built = self.shape.description
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=built.model_name,
            served_model_name=built.model_name,
            is_generation=self.shape.pooler is None,
            max_context_length=self.config.max_model_len,
            vocab_size=built.vocab_size,
            eos_token_ids=built.eos_token_ids,
            max_req_input_len=self.config.max_model_len - 1,
        )

    def server(self) -> vllm_engine_pb2.GetServerInfoResponse:
        scheduler = self.engine.scheduler
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=len(scheduler.running) + self.engine.num_waiting,
            is_paused=scheduler.pause_mode is not None,
            last_receive_timestamp=self._received_unix_seconds,
            uptime_seconds=time.monotonic() - self._started,
            server_type=_SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype=self.shape.description.kv_cache_dtype,
            model_dtype=self.shape.description.dtype,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_running,
        )

    def loads(self, rank: int) -> vllm_engine_pb2.GetLoadsResponse:
        """The load of data-parallel rank `rank`. Empty for ranks other than 0."""
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            dp_rank_count=1,
            loads=[] if rank else [self._load()],
        )

    def engine_load(self) -> common_pb2.EngineLoad:
        load = self._load()
        return common_pb2.EngineLoad(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            token_usage=load.token_usage,
            active_token_usage=load.token_usage,
            gen_throughput=load.gen_throughput,
            max_running_requests=load.max_running_requests,
            cache_hit_rate=load.cache_hit_rate,
            num_used_tokens=load.num_used_tokens,
            max_total_num_tokens=load.max_total_num_tokens,
        )

    def _load(self) -> vllm_engine_pb2.SchedulerLoad:
        stats = self.statistics.message()
        size, num_blocks = stats.block_size, stats.num_usable_blocks
        num_used = num_blocks - stats.num_free_blocks
        unscheduled = self.engine.unscheduled()
        return vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=num_used * size,
            max_total_num_tokens=num_blocks * size,
            token_usage=num_used / num_blocks,
            gen_throughput=self._rate.at(stats.num_generated_tokens),
            cache_hit_rate=stats.num_cached_tokens / max(1, stats.num_prompt_tokens),
            utilization=stats.num_running / stats.max_num_seqs,
            max_running_requests=stats.max_num_seqs,
            num_waiting_uncached_tokens=sum(request.num_tokens for request in unscheduled),
        )
