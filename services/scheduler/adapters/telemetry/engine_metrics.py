"""Prometheus metrics of an engine, collected from its counters at each scrape."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import (
    histogram_family,
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
        steps = histogram_family(replica.STEP_SECONDS)
        counts.step_seconds.add_to(steps)
        yield steps
        put_off = summary_family(replica.STEP_PUT_OFF_SECONDS)
        put_off.add_metric((), engine.planning.num_planned, engine.planning.seconds_put_off)
        yield put_off
        yield self._state()
        yield self._recoveries()
        yield self._cache_config()
        if scheduler.config.max_loras is not None:
            yield self._adapters(scheduler.config.max_loras)
        yield from self._wait_reasons(engine.num_waiting)

    def _state(self) -> Metric:
        states = value_family(replica.ENGINE_STATE)
        for state in EngineState:
            states.add_metric([state.value], self.engine.state is state)
        return states

    def _recoveries(self) -> Metric:
        recoveries, losses = value_family(replica.RECOVERIES), self.engine.losses
        recoveries.add_metric(["pool"], losses.num_of_pool)
        recoveries.add_metric(["workers"], losses.num_of_workers)
        return recoveries

    def _cache_config(self) -> Metric:
        config, shape = self.engine.scheduler.config, value_family(vllm.CACHE_CONFIG)
        values = (
            config.block_size,
            config.num_blocks,
            self.cache_dtype,
            config.enable_prefix_caching,
        )
        shape.add_metric([str(value) for value in values], 1)
        return shape

    def _adapters(self, max_loras: int) -> Metric:
        scheduler, info = self.engine.scheduler, value_family(vllm.LORA_REQUESTS)
        running = {one.adapter_name for one in scheduler.running}
        unfinished = (one for one in self.engine.unfinished if one not in scheduler.running)
        waiting = {one.adapter_name for one in unfinished}
        named = (",".join(sorted(of - {""})) for of in (waiting, running))
        info.add_metric([str(max_loras), *named], time.time())
        return info

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
        theirs = value_family(vllm.NUM_REQUESTS_WAITING_BY_REASON)
        num_deferred = num_waiting if reasons.current in _DEFERRED else num_passed_over
        theirs.add_metric(["capacity"], num_waiting - num_deferred)
        theirs.add_metric(["deferred"], num_deferred)
        seconds = value_family(replica.WAIT_SECONDS)
        for name, nanos in list(self.counts.wait_nanos.items()):
            seconds.add_metric([name], nanos / 1e9)
        yield from (ours, steps, seconds, theirs)


class ResumableSessionsCollector(Collector):
    def __init__(self, client_sessions: ResumableSessions) -> None:
        self._client_sessions = client_sessions

    def collect(self) -> Iterator[Metric]:
        sessions, num_waiting = self._client_sessions, self._client_sessions.num_between_turns
        family = value_family(replica.CLIENT_SESSIONS)
        family.add_metric(["turn"], len(sessions.open) - num_waiting)
        family.add_metric(["waiting_for_chunk"], num_waiting)
        yield family
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
        positions = value_family(vllm.SPEC_DECODE_ACCEPTED_TOKENS_PER_POS)
        for position, num_accepted in enumerate(self._num_accepted_at):
            positions.add_metric([str(position)], num_accepted)
        yield positions
