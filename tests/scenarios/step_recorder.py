"""Records one step of a scenario, in the format of vLLM's recorded decisions."""

import hashlib
from typing import Any

from services.kvpool.core.kv_pool import KVPool
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.encoder_cache_manager import EncoderCacheManager
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request
from tests.scenarios.group_record import GroupRecord
from tests.scenarios.record import Record, request_ids
from tests.scenarios.transfer_record import begun_loads


class StepRecorder:
    """Records the steps of a scheduler, and the state of `core`, the pool that serves it."""

    def __init__(self, scheduler: Scheduler, core: KVPool, config: SchedulerConfig) -> None:
        self._scheduler = scheduler
        self._core = core
        self._config = config
        self._groups = GroupRecord(core) if config.groups else None

    def before_step(self, record: Record) -> None:
        """Records the queues before a step."""
        scheduler = self._scheduler
        record["kv_waiting"] = request_ids(scheduler.queues.kv_waiting)
        record["waiting"] = request_ids(scheduler.queues.waiting)
        record["running"] = request_ids(scheduler.running)

    def before_plan(self, record: Record) -> None:
        """Records the number of computed tokens of each running request."""
        running = self._scheduler.running
        record["computed_before"] = {
            request.request_id: request.num_computed_tokens for request in running
        }
        if self._groups is not None:
            self._groups.before_plan(running)

    def planned(self, plan: SchedulerOutput, record: Record) -> None:
        """Records the plan of a step, and the pool's state after it."""
        ids = request_ids(plan.requests)
        start = dict(zip(ids, plan.num_computed_tokens, strict=True))
        record["scheduled"] = [
            list(pair) for pair in zip(ids, plan.num_scheduled_tokens, strict=True)
        ]
        record["start"] = plan.num_computed_tokens
        record["new"] = request_ids(plan.new)
        record["spec"] = _by_id(plan.draft_token_ids)
        record["resumed"] = request_ids(plan.resumed)
        record["encoder"] = _by_id(plan.encoder_inputs)
        record["encoder_evicted"] = list(plan.evicted_encoder_inputs)
        record["preempted"] = request_ids(plan.preempted)
        record["cached"] = {
            request.request_id: start[request.request_id] for request in plan.new + plan.resumed
        }
        record["blocks"] = {
            request.request_id: blocks[0] if self._groups is None else list(blocks)
            for table in (plan.appended_blocks, plan.block_tables)
            for request, blocks in table.items()
        }
        if plan.loads:
            record["loads"] = begun_loads(plan, self._config)
        if self._groups is not None:
            self._groups.record_plan(plan, self._scheduler.running, record)
        self._record_pool(record, "_sched")

    def before_update(self) -> None:
        """Must be called before the scheduler processes the output of a step."""
        if self._groups is not None:
            self._groups.before_update()

    def after_step(self, record: Record) -> None:
        """Records the pool, the encoder cache and the queues after a step."""
        scheduler = self._scheduler
        if self._groups is not None:
            self._groups.record_update(record)
        self._record_pool(record, "")
        if self._config.encoder_cache_size:
            record["encoder_cache"] = _encoder_cache(scheduler.encoder_cache)
        record["running_after"] = request_ids(scheduler.running)
        record["kv_waiting_after"] = request_ids(scheduler.queues.kv_waiting)
        record["waiting_after"] = request_ids(scheduler.queues.waiting)
        record["deferred_after"] = sorted(request_ids(scheduler.queues.passed_over))

    def _record_pool(self, record: Record, suffix: str) -> None:
        core = self._core
        free = core.free_block_ids()
        digest = hashlib.sha256(",".join(map(str, free)).encode()).hexdigest()
        record["free" + suffix] = len(free)
        record["free_head" + suffix] = list(free[:4])
        record["free_sha" + suffix] = digest[:12]
        record["num_cached_hashes" + suffix] = core.num_cached_hashes
        core.check()


def _by_id(values: dict[Request, Any]) -> Record:
    return {request.request_id: value for request, value in values.items()}


def _encoder_cache(cache: EncoderCacheManager) -> Record:
    return {
        "free": cache.num_free,
        "freeable": cache.num_freeable,
        "unused": list(cache.unused),
        "used": {
            identifier: sorted(request_ids(users)) for identifier, users in cache.used.items()
        },
    }
