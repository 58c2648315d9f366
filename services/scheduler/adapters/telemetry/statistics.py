"""Implements the RPC GetStats, which returns a replica's counters and present numbers."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.rpc.proto import ProtoEnum
from services.common.telemetry import names
from services.common.telemetry.histogram import Histogram
from services.common.telemetry.metric_specs import replica
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.telemetry.wait_reasons import WaitReasons
from services.scheduler.core.engine.engine_core import EngineCore, EngineState
from services.scheduler.core.output import WaitReason
from services.scheduler.core.step_costs import StepCosts

_STATES = ProtoEnum(EngineState, scheduler_pb2.EngineState, "ENGINE_STATE_")
WAIT_REASONS = ProtoEnum(WaitReason, scheduler_pb2.WaitReason, "WAIT_REASON_")

RECENT_STEPS = 100
_REASONS = (
    *(reason.value for reason in WaitReason),
    *(names.WAIT_NEXT_STEP, names.WAIT_LOST_STEP, names.WAIT_HASHING),
)
_SHARE_OF_NEWEST = 0.1
"""Weight of the newest prompt in the decaying mean `mean_uncached_tokens`."""


class StepCounts:
    """Totals over steps, which the engine's observer updates."""

    def __init__(self, step_costs: StepCosts | None = None) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.mean_uncached_tokens = 0.0
        """Mean number of uncached tokens in recently admitted prompts."""
        self.num_scheduled_tokens = 0
        self.num_lost_tokens = 0
        """Number of computed tokens that preemptions discarded."""
        self.wait_reasons = WaitReasons()
        self.wait_nanos: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))
        """Maps each wait reason to the total nanoseconds that requests waited for it."""
        self.step_nanos: deque[int] = deque(maxlen=RECENT_STEPS)
        self.step_seconds = Histogram(replica.STEP_SECONDS)
        self.step_costs = step_costs or StepCosts()

    def admitted(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens
        num_uncached = num_prompt_tokens - num_cached_tokens
        share = _SHARE_OF_NEWEST if self.mean_uncached_tokens else 1.0
        self.mean_uncached_tokens += share * (num_uncached - self.mean_uncached_tokens)

    @property
    def mean_step_nanos(self) -> int:
        """Mean duration of recent steps, without their overlaps. 0 before the first step."""
        return sum(self.step_nanos) // len(self.step_nanos) if self.step_nanos else 0


@dataclass(eq=False)
class Statistics:
    """Numbers of an engine, its gateways' sessions and its steps."""

    engine: EngineCore
    sessions: Sessions
    counts: StepCounts
    incarnation: str
    model_name: str
    kernels: Callable[[], str]

    def message(self) -> scheduler_pb2.GetStatsResponse:
        engine, scheduler, counts = self.engine, self.engine.scheduler, self.counts
        reason = counts.wait_reasons.current if engine.num_waiting else None
        return scheduler_pb2.GetStatsResponse(
            incarnation=self.incarnation,
            model_name=self.model_name,
            state=_STATES.to_proto(engine.state),
            state_reason=engine.state_reason,
            num_running=len(scheduler.running),
            num_waiting=engine.num_waiting,
            max_num_seqs=scheduler.config.max_running,
            max_num_batched_tokens=scheduler.config.token_budget,
            num_usable_blocks=scheduler.config.num_blocks - 1,
            num_free_blocks=scheduler.kv_cache_manager.num_free_blocks,
            block_size=scheduler.config.block_size,
            num_steps=counts.num_steps,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            num_generated_tokens=self.sessions.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_finished=self.sessions.num_finished,
            num_sessions=len(self.sessions),
            mean_step_nanos=counts.mean_step_nanos,
            wait_reason=WAIT_REASONS.to_proto(reason)
            if reason is not None
            else scheduler_pb2.WAIT_REASON_UNSPECIFIED,
            num_lost_tokens=counts.num_lost_tokens,
            paused=scheduler.pause_mode is not None,
            kernels=self.kernels(),
        )
