"""Drives the scheduler and pool cores through a recorded scenario and records what they decide.

The scenario and record formats are described in tests/conformance/README.md. The model is a
deterministic stand-in: its next token is a function of the tokens so far.
"""

import hashlib
from collections import defaultdict
from typing import Any

from services.scheduler.core.config import Policy, SchedulerConfig
from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.request import Request, StopConditions
from services.scheduler.core.scheduler import Scheduler
from tools.inprocess_pool import InProcessPool

DEFAULTS: dict[str, Any] = {
    "policy": "fcfs",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "block_size": 16,
    "num_gpu_blocks": 1000,
    "enable_prefix_caching": True,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
    "async_scheduling": False,
    "num_speculative_tokens": 0,
    "max_num_scheduled_tokens": None,
    "max_num_active_seqs": None,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "eos_token_id": 2,
}
SAME_NAME = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "enable_prefix_caching",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl",
    "watermark",
)


def next_token(tokens: list[int]) -> int:
    """What the stand-in for the model says after `tokens`."""
    return (sum(tokens[-4:]) * 31 + len(tokens) * 7) % 997 + 3


class Replay:
    """One run of a scenario."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self._config = {**DEFAULTS, **scenario["config"]}
        self._events = defaultdict(list)
        for event in scenario["events"]:
            self._events[event["step"]].append(event)
        self._max_steps = scenario.get("max_steps", 20_000)
        config = self._config
        self._pool = InProcessPool(
            config["num_gpu_blocks"],
            config["block_size"],
            enable_prefix_caching=config["enable_prefix_caching"],
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                **{name: config[name] for name in SAME_NAME},
                num_blocks=config["num_gpu_blocks"],
                policy=Policy(config["policy"]),
            ),
            self._pool,
        )
        self._requests: dict[str, Request] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._finished_since_plan: list[str] = []

    async def run(self) -> dict[str, Any]:
        """The record of the whole scenario."""
        steps: list[dict[str, Any]] = []
        last_event = max(self._events, default=0)
        for step in range(self._max_steps):
            record: dict[str, Any] = {"step": step}
            await self._apply_events(step, record)
            if self.scheduler.running or self.scheduler.waiting or self._finished_since_plan:
                await self._step(step, record)
                steps.append(record)
            elif len(record) > 1:
                steps.append(record)
            elif step > last_event:
                break
        for request_id, request in self._requests.items():
            self._results[request_id] |= {
                "output_token_ids": request.token_ids[request.num_prompt_tokens :],
                "num_preemptions": request.num_preemptions,
                "cached_tokens": request.num_cached_tokens,
            }
        return {"steps": steps, "requests": self._results}

    async def _apply_events(self, step: int, record: dict[str, Any]) -> None:
        for event in self._events[step]:
            if "add" in event:
                self._add(step, event["add"], record)
            elif event.get("phase", "before") == "before":
                self._abort(step, event["abort"], record)
        await self.scheduler.flush()

    def _add(self, step: int, add: dict[str, Any], record: dict[str, Any]) -> None:
        request_id, prompt = add["request_id"], add["prompt_token_ids"]
        record.setdefault("added", []).append(request_id)
        self._results[request_id] = {
            "output_token_ids": [],
            "num_preemptions": 0,
            "first_step": None,
            "cached_tokens": None,
            "finish_step": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if not 0 < len(prompt) < self._config["max_model_len"]:
            record.setdefault("rejected", []).append(request_id)
            self._results[request_id] |= {"finish_reason": "rejected", "finish_step": step}
            return
        eos = () if add.get("ignore_eos") else (self._config["eos_token_id"],)
        request = Request(
            request_id=request_id,
            key=len(self._requests) + 1,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            stop=StopConditions(
                add["max_tokens"], frozenset(eos), frozenset(add.get("stop_token_ids", ()))
            ),
            priority=add.get("priority", 0),
            arrival_time=add.get("arrival_time", float(step)),
            cache_salt=add.get("cache_salt") or "",
        )
        self._requests[request_id] = request
        self.scheduler.add(request)

    def _abort(self, step: int, ids: str | list[str], record: dict[str, Any]) -> None:
        for request_id in [ids] if isinstance(ids, str) else ids:
            request = self._requests.get(request_id)
            if request is not None and not request.is_finished:
                record.setdefault("aborted", []).append(request_id)
                self.scheduler.abort(request)
                self._note_end(request, step)

    def _note_end(self, request: Request, step: int) -> None:
        assert request.finish_reason is not None
        self._finished_since_plan.append(request.request_id)
        self._results[request.request_id] |= {
            "finish_step": step,
            "finish_reason": request.finish_reason.value,
            "stop_reason": request.stop_token_id,
        }

    async def _step(self, step: int, record: dict[str, Any]) -> None:
        scheduler = self.scheduler
        record["waiting"] = [request.request_id for request in scheduler.waiting]
        record["running"] = [request.request_id for request in scheduler.running]
        record["computed_before"] = {
            request.request_id: request.num_computed_tokens for request in scheduler.running
        }
        record["finished_before"] = sorted(self._finished_since_plan)
        self._finished_since_plan = []
        plan = await scheduler.schedule()
        self._record_plan(plan, record, step)
        for event in self._events[step]:
            if event.get("phase") == "mid":
                self._abort(step, event["abort"], record)
        outputs = []
        for update in scheduler.update_from_output(plan, self._answer(plan)):
            request = update.request
            reason = request.finish_reason
            outputs.append(
                [
                    request.request_id,
                    list(update.token_ids),
                    reason and reason.value,
                    request.stop_token_id,
                ]
            )
            if request.is_finished:
                self._note_end(request, step)
        await scheduler.flush()
        record["update_of"], record["outputs"] = step, outputs
        self._record_pool(record, "")
        record["running_after"] = [request.request_id for request in scheduler.running]
        record["waiting_after"] = [request.request_id for request in scheduler.waiting]

    def _answer(self, plan: StepPlan) -> StepOutput:
        tokens = [
            [next_token(request.token_ids)]
            if not request.is_finished and request.num_computed_tokens >= request.num_tokens
            else []
            for request in plan.requests
        ]
        return StepOutput(tokens)

    def _record_plan(self, plan: StepPlan, record: dict[str, Any], step: int) -> None:
        ids = [request.request_id for request in plan.requests]
        record["scheduled"] = [list(pair) for pair in zip(ids, plan.num_scheduled_tokens)]  # noqa: B905
        record["start"] = plan.num_computed_tokens
        record["new"] = [request.request_id for request in plan.new]
        record["resumed"] = [request.request_id for request in plan.resumed]
        record["preempted"] = [request.request_id for request in plan.preempted]
        start = dict(zip(ids, plan.num_computed_tokens, strict=True))
        record["cached"] = {
            request.request_id: start[request.request_id] for request in plan.new + plan.resumed
        }
        record["blocks"] = {
            request.request_id: blocks[0]
            for table in (plan.appended_blocks, plan.block_tables)
            for request, blocks in table.items()
        }
        for request in plan.new:
            self._results[request.request_id]["first_step"] = step
        self._record_pool(record, "_sched")

    def _record_pool(self, record: dict[str, Any], suffix: str) -> None:
        core = self._pool.core
        free = core.free_block_ids()
        digest = hashlib.sha256(",".join(map(str, free)).encode()).hexdigest()
        record["free" + suffix] = len(free)
        record["free_head" + suffix] = list(free[:4])
        record["free_sha" + suffix] = digest[:12]
        record["num_cached_hashes" + suffix] = core.num_cached_hashes
        core.check()


def differences(golden: dict[str, Any], ours: dict[str, Any], fields: list[str]) -> list[str]:
    """Every field of every step and request that differs; an absent field equals an empty one."""
    found = []
    theirs, mine = ({s["step"]: s for s in record["steps"]} for record in (golden, ours))
    for step in sorted(theirs.keys() | mine.keys()):
        for name in fields:
            want, have = theirs.get(step, {}).get(name), mine.get(step, {}).get(name)
            if want != have and (want or have):
                found.append(f"step {step} {name}: recorded {want}, got {have}")
    for request_id, want in golden["requests"].items():
        for name, value in want.items():
            have = ours["requests"].get(request_id, {}).get(name)
            if have != value:
                found.append(f"request {request_id} {name}: recorded {value}, got {have}")
    return found


FIELDS = [
    *("added", "aborted", "rejected", "waiting", "running", "computed_before", "scheduled"),
    *("start", "new", "resumed", "cached", "blocks", "preempted", "finished_before", "update_of"),
    *("outputs", "free", "free_head", "free_sha", "num_cached_hashes", "free_sched"),
    *("free_head_sched", "free_sha_sched", "num_cached_hashes_sched", "running_after"),
    "waiting_after",
]

