"""The replica's numbers at the time of a request for them: RPC GetStats, and Prometheus."""

from collections import deque
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from stepwell.scheduler.v1 import scheduler_pb2

from services.common import names
from services.common.proto_enum import ProtoEnum
from services.scheduler.adapters.sessions import Sessions
from services.scheduler.adapters.wait_reasons import WaitReasons
from services.scheduler.core.engine_core import EngineCore, EngineState
from services.scheduler.core.output import WaitReason
from services.scheduler.core.step_costs import StepCosts

_STATES = ProtoEnum(EngineState, scheduler_pb2.EngineState, "ENGINE_STATE_")
_WAIT_REASONS = ProtoEnum(WaitReason, scheduler_pb2.WaitReason, "WAIT_REASON_")

_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily

RECENT_STEPS = 100


class StepCounts:
    """Running totals over steps, which the engine's observer adds to."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_lost_tokens = 0
        """Tokens that were computed and given up by preemptions."""
        self.wait_reasons = WaitReasons()
        self.step_nanos: deque[int] = deque(maxlen=RECENT_STEPS)
        self.step_costs = StepCosts()

    @property
    def mean_step_nanos(self) -> int:
        """Mean time of recent steps, without their overlap; 0 before the first."""
        return sum(self.step_nanos) // len(self.step_nanos) if self.step_nanos else 0


class Statistics(Collector):
    """Numbers of an engine, its sessions and its steps."""

    def __init__(
        self,
        engine: EngineCore,
        sessions: Sessions,
        counts: StepCounts,
        incarnation: str,
        model_name: str,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._counts = counts
        self._incarnation = incarnation
        self._model_name = model_name

    def message(self) -> scheduler_pb2.GetStatsResponse:
        """The numbers as the answer to GetStats."""
        engine, scheduler, counts = self._engine, self._engine.scheduler, self._counts
        reason = counts.wait_reasons.current if engine.num_waiting else None
        return scheduler_pb2.GetStatsResponse(
            incarnation=self._incarnation,
            model_name=self._model_name,
            state=_STATES.to_proto(engine.state),
            state_reason=engine.state_reason,
            num_running=len(scheduler.running),
            num_waiting=engine.num_waiting,
            max_num_seqs=scheduler.config.max_running,
            max_num_batched_tokens=scheduler.config.token_budget,
            num_usable_blocks=scheduler.config.num_blocks - 1,
            num_free_blocks=scheduler.num_free_blocks,
            block_size=scheduler.config.block_size,
            num_steps=counts.num_steps,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            num_generated_tokens=self._sessions.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_finished=self._sessions.num_finished,
            num_sessions=len(self._sessions),
            mean_step_nanos=counts.mean_step_nanos,
            wait_reason=_WAIT_REASONS.to_proto(reason)
            if reason is not None
            else scheduler_pb2.WAIT_REASON_UNSPECIFIED,
            num_lost_tokens=counts.num_lost_tokens,
        )

    def collect(self) -> Iterator[Metric]:
        """The numbers as Prometheus reads them."""
        stats = self.message()
        usage = 1 - stats.num_free_blocks / stats.num_usable_blocks
        for create, name, text, value in (
            (_GAUGE, names.METRIC_NUM_REQUESTS_RUNNING, "Requests that run.", stats.num_running),
            (_GAUGE, names.METRIC_NUM_REQUESTS_WAITING, "Requests that wait.", stats.num_waiting),
            (_GAUGE, names.METRIC_KV_CACHE_USAGE, "Share of the KV cache in use; 1 is all.", usage),
            (
                _GAUGE,
                names.METRIC_STEP_SECONDS,
                "Mean of recent steps.",
                stats.mean_step_nanos / 1e9,
            ),
            (_COUNTER, names.METRIC_NUM_PREEMPTIONS, "Preemptions.", stats.num_preemptions),
            (
                _COUNTER,
                names.METRIC_LOST_TOKENS,
                "Computed tokens that preemptions gave up.",
                stats.num_lost_tokens,
            ),
            (
                _COUNTER,
                names.METRIC_CORRUPTED_REQUESTS,
                "Requests that ended because the model's logits held NaN.",
                self._sessions.num_corrupted,
            ),
            (
                _COUNTER,
                names.METRIC_ITERATION_TOKENS,
                "Tokens computed in steps.",
                self._counts.num_scheduled_tokens,
            ),
        ):
            family = create(name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        yield self._recoveries()
        yield from self._wait_reasons(stats)
        yield InfoMetricFamily(
            names.METRIC_CACHE_CONFIG.removesuffix("_info"),
            "Shape of the cache.",
            {
                "block_size": str(stats.block_size),
                "num_gpu_blocks": str(stats.num_usable_blocks + 1),
            },
        )

    def _recoveries(self) -> Metric:
        recoveries = CounterMetricFamily(
            names.METRIC_RECOVERIES,
            "Generations that were begun because the pool or the workers were lost, or hung.",
            labels=["model_name", "lost"],
        )
        losses = self._engine.losses
        for lost, count in (("pool", losses.num_of_pool), ("workers", losses.num_of_workers)):
            recoveries.add_metric([self._model_name, lost], count)
        return recoveries

    def _wait_reasons(self, stats: scheduler_pb2.GetStatsResponse) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            names.METRIC_NUM_REQUESTS_WAITING_BY_REASON,
            "Requests that wait, by the reason.",
            labels=["model_name", "reason"],
        )
        steps = CounterMetricFamily(
            names.METRIC_WAIT_STEPS,
            "Steps after which requests still waited, by the reason.",
            labels=["model_name", "reason"],
        )
        reasons = self._counts.wait_reasons
        for reason in WaitReason:
            labels = [self._model_name, reason.value]
            waiting.add_metric(labels, stats.num_waiting if reason is reasons.current else 0)
            steps.add_metric(labels, reasons.num_steps[reason])
        yield waiting
        yield steps
