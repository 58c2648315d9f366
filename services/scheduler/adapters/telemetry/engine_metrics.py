"""Prometheus metrics of an engine, collected from its counters at each scrape."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import (
    by_label,
    replica,
    single,
    summary_family,
    value_family,
    vllm,
)
from services.scheduler.adapters.gateways.queue_watch import QueueWatch
from services.scheduler.adapters.gateways.resumable_sessions import ResumableSessions
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.telemetry.statistics import StepCounts
from services.scheduler.core.engine.engine_core import EngineCore, EngineState
from services.scheduler.core.output import EngineCoreOutputs, WaitReason

_DEFERRED = frozenset({WaitReason.HELD_BACK, WaitReason.PAUSED, WaitReason.RECOVERY})
"""Wait reasons that vLLM's metric counts as "deferred", because more capacity would not help."""


class StartingCollector(Collector):
    """Reports the state `starting` of a replica whose pool or workers are not open yet."""

    def collect(self) -> Iterator[Metric]:
        yield by_label(replica.ENGINE_STATE, {"starting": 1})


@dataclass(eq=False)
class EngineCollector(Collector):
    """Collects metrics of an engine's queues, steps and losses."""

    engine: EngineCore
    sessions: Sessions
    counts: StepCounts
    watch: QueueWatch
    cache_dtype: str

    def collect(self) -> Iterator[Metric]:
        engine, scheduler, counts = self.engine, self.engine.scheduler, self.counts
        num_usable = scheduler.config.num_blocks - 1
        for name, value in (
            (vllm.NUM_REQUESTS_RUNNING, len(scheduler.running)),
            (vllm.NUM_REQUESTS_WAITING, engine.num_waiting),
            (vllm.KV_CACHE_USAGE, 1 - scheduler.kv_cache_manager.num_free_blocks / num_usable),
            (vllm.NUM_PREEMPTIONS, scheduler.num_preemptions),
            (replica.STEP_LATE_SECONDS, engine.planning.seconds_late),
            (replica.LOST_TOKENS, counts.num_lost_tokens),
            (vllm.CORRUPTED_REQUESTS, self.sessions.num_corrupted),
            (replica.QUEUE_ESTIMATE, self.watch.estimated_wait_seconds),
            (replica.SESSIONS, len(self.sessions)),
        ):
            yield single(name, value)
        yield counts.step_seconds.metric()
        put_off = summary_family(replica.STEP_PUT_OFF_SECONDS)
        put_off.add_metric((), engine.planning.num_planned, engine.planning.seconds_put_off)
        yield put_off
        yield by_label(
            replica.ENGINE_STATE, {state.value: engine.state is state for state in EngineState}
        )
        losses = {"pool": engine.losses.num_of_pool, "workers": engine.losses.num_of_workers}
        yield by_label(replica.RECOVERIES, losses)
        yield self._cache_config()
        if scheduler.config.max_loras is not None:
            yield self._adapters(scheduler.config.max_loras)
        yield from self._wait_reasons(engine.num_waiting)

    def _cache_config(self) -> Metric:
        config = self.engine.scheduler.config
        sizes = map(str, (config.block_size, config.num_blocks))
        caching = str(config.enable_prefix_caching)
        return single(vllm.CACHE_CONFIG, 1, *sizes, self.cache_dtype, caching)

    def _adapters(self, max_loras: int) -> Metric:
        scheduler = self.engine.scheduler
        running = {one.adapter_name for one in scheduler.running}
        unfinished = (one for one in self.engine.unfinished if one not in scheduler.running)
        waiting = {one.adapter_name for one in unfinished}
        named = (",".join(sorted(of - {""})) for of in (waiting, running))
        return single(vllm.LORA_REQUESTS, time.time(), str(max_loras), *named)

    def _wait_reasons(self, num_waiting: int) -> Iterator[Metric]:
        reasons = self.counts.wait_reasons
        ours, steps = (value_family(replica.WAITING_BY_REASON), value_family(replica.WAIT_STEPS))
        passed_over = reasons.passed_over
        num_passed_over = min(passed_over.total(), num_waiting)
        num_others = num_waiting - num_passed_over
        for reason in WaitReason:
            num_ours = passed_over[reason] + (num_others if reason is reasons.current else 0)
            ours.add_metric([reason.value], min(num_ours, num_waiting))
            steps.add_metric([reason.value], reasons.num_steps[reason])
        num_deferred = num_waiting if reasons.current in _DEFERRED else num_passed_over
        yield from (ours, steps)
        waits = list(self.counts.wait_nanos.items())
        yield by_label(replica.WAIT_SECONDS, {name: nanos / 1e9 for name, nanos in waits})
        theirs = {"capacity": num_waiting - num_deferred, "deferred": num_deferred}
        yield by_label(vllm.NUM_REQUESTS_WAITING_BY_REASON, theirs)


class ResumableSessionsCollector(Collector):
    def __init__(self, client_sessions: ResumableSessions) -> None:
        self._client_sessions = client_sessions

    def collect(self) -> Iterator[Metric]:
        sessions, num_waiting = self._client_sessions, self._client_sessions.num_between_turns
        by_state = {"turn": len(sessions.open) - num_waiting, "waiting_for_chunk": num_waiting}
        yield by_label(replica.CLIENT_SESSIONS, by_state)
        yield single(replica.CLIENT_SESSIONS_GIVEN_UP, sessions.num_given_up)


class SpeculationMetrics(Collector):
    """Counts draft tokens. Exports no metrics if workers propose none. Draft tokens from a
    request's last token on count as rejected, even if the workers accepted them.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_at = [0] * num_speculative_tokens

    def done(self, update: EngineCoreOutputs) -> None:
        """Counts the drafts of a step whose tokens have arrived."""
        self._num_draft_tokens += sum(update.num_draft_tokens)
        for num_accepted in update.num_accepted:
            self._num_drafts += 1
            for position in range(num_accepted):
                self._num_accepted_at[position] += 1

    def collect(self) -> Iterator[Metric]:
        if not self._num_accepted_at:
            return
        yield single(vllm.SPEC_DECODE_DRAFTS, self._num_drafts)
        yield single(vllm.SPEC_DECODE_DRAFT_TOKENS, self._num_draft_tokens)
        yield single(vllm.SPEC_DECODE_ACCEPTED_TOKENS, sum(self._num_accepted_at))
        accepted = {str(position): number for position, number in enumerate(self._num_accepted_at)}
        yield by_label(vllm.SPEC_DECODE_ACCEPTED_TOKENS_PER_POS, accepted)
