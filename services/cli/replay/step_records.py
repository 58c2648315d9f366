"""Records of steps, in the format of a fork of vLLM for agents, for scripts that read that format.

There are three kinds of records. Each record is a JSON object, whose `event` is the kind and whose
`step` is the step's number.

* `step_snapshot`: the queues and the pool before the step.
* `prefix_cache_event`: the admission of a request, with the numbers of cached tokens.
* `step_decision`: the requests and tokens that the step computes.

The fork pins requests that have ended: their blocks are not free. Continuum's policies in Stepwell
also pin requests. The policy `program` retains contexts instead: free blocks of ended requests that
are reused last. Retained contexts count as pinned. A log does not show which blocks are offloaded
to host memory, so the fields `cpu_...` are null with a KV connector, and 0 without a KV connector.
"""

from collections.abc import Callable
from typing import Any

from services.common.pool.ids import NULL_BLOCK, ContextId
from services.kvpool.core.kv_pool import KVPool
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request

Record = dict[str, Any]
Write = Callable[[Record], None]


class StepRecords:
    """Passes the records of a scheduler's steps to `write`."""

    def __init__(self, scheduler: Scheduler, requests: dict[Any, Request], write: Write) -> None:
        """`requests` has all requests that were added to the scheduler, by key."""
        self._scheduler = scheduler
        self._requests = requests
        self._write = write
        self._snapshot: Record = {}
        self._loading: set[Request] = set()
        """Requests whose KV blocks are loaded between steps. An admission removes the request."""
        self._owners: dict[ContextId, Request] = {}
        """Maps each context in the pool to the ended request whose blocks the context retains."""

    def before_plan(self, pool: KVPool) -> None:
        scheduler, config = self._scheduler, self._scheduler.config
        self._loading = {request for request in self._loading if request.holds_blocks}
        contexts = pool.context_ids
        self._owners = {context: self._owner(context) for context in contexts}
        held = [] if scheduler.retention is None else scheduler.retention.held
        tables = (table for key in held for table in pool.block_tables(key))
        num_held = len({block for table in tables for block in table} - {NULL_BLOCK})
        pinned = (*self._owners.values(), *map(self._requests.__getitem__, held))
        names = set(map(_job_id, pinned)) - {None}
        in_tier = 0 if config.kv_role is None else None
        self._snapshot = {
            "event": "step_snapshot",
            "step": scheduler.steps.next_number,
            "running": len(scheduler.running),
            "waiting": len(scheduler.queues),
            "free_blocks": scheduler.kv_cache_manager.num_free_blocks,
            "total_blocks": config.num_blocks,
            "gpu_cached_blocks": pool.num_cached_hashes,
            "cpu_free_blocks": in_tier,
            "cpu_total_blocks": in_tier,
            "cpu_cached_blocks": in_tier,
            "num_pinned": len(pinned),
            "pinned_blocks": pool.num_retained_blocks + num_held,
            "pinned_job_ids": sorted(filter(None, names)),
            "max_num_running_reqs": config.max_running,
            "max_num_scheduled_tokens": config.token_budget,
        }

    def planned(self, plan: SchedulerOutput) -> None:
        self._write(self._snapshot)
        loads = {load.request: load.num_tokens for load in plan.loads if not load.is_async}
        starts = dict(zip(plan.requests, plan.num_computed_tokens, strict=True))
        for request in (*plan.new, *plan.resumed):
            self._admitted(plan.step, request, starts[request], loads.get(request, 0))
        self._loading.update(load.request for load in plan.loads if load.is_async)
        admitted = {*plan.new, *plan.resumed}
        self._write(
            {
                "event": "step_decision",
                "step": plan.step,
                "scheduled_new_req_ids": _ids(plan.new),
                "scheduled_resumed_req_ids": _ids(plan.resumed),
                "scheduled_running_req_ids": _ids(
                    [request for request in plan.requests if request not in admitted]
                ),
                "preempted_req_ids": _ids(plan.preempted),
                "num_scheduled_tokens": dict(
                    zip(_ids(plan.requests), plan.num_scheduled_tokens, strict=True)
                ),
                "total_scheduled_tokens": plan.num_tokens,
            }
        )

    def _admitted(self, step: int, request: Request, start: int, num_loaded: int) -> None:
        """Writes the record of an admission with `start` computed tokens, of which a KV connector
        loads `num_loaded` in the step. If the load preceded the step, `num_loaded` is ignored.
        """
        was_loaded = request in self._loading
        if was_loaded:
            self._loading.remove(request)
            num_loaded = min(start, request.num_external_tokens)
        role = self._scheduler.config.kv_role
        self._write(
            {
                "event": "prefix_cache_event",
                "step": step,
                "req_id": request.request_id,
                "job_id": _job_id(request),
                "local_hit_tokens": start - num_loaded,
                "external_hit_tokens": num_loaded,
                "total_prompt_tokens": request.num_prompt_tokens,
                "num_tokens": request.num_tokens,
                "connector_name": role and role.value,
                "load_kv_async": was_loaded,
            }
        )

    def _owner(self, context: ContextId) -> Request:
        """The request whose blocks a context has: the last request with the context's id."""
        if (known := self._owners.get(context)) is not None:
            return known
        return next(one for one in reversed(self._requests.values()) if one.context == context)


def _job_id(request: Request) -> str | None:
    return (request.program and request.program.id) or None


def _ids(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]
