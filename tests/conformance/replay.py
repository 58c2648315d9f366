"""Drives the scheduler and pool cores through a recorded scenario and records what they decide.

The scenario and record formats are described in tests/conformance/README.md. The model is a
deterministic stand-in: its next token is a function of the tokens so far.
"""

import hashlib
from collections import defaultdict, deque
from typing import Any

from services.kvpool.core.kv_pool import KVPool
from services.scheduler.core import ports
from services.scheduler.core.config import Policy, SchedulerConfig
from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.request import Request, StopConditions
from services.scheduler.core.scheduler import Scheduler

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
    "num_lookahead_tokens": None,
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
    "async_scheduling",
    "num_speculative_tokens",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl",
    "watermark",
)


def next_token(tokens: list[int]) -> int:
    """What the stand-in for the model says after `tokens`."""
    return (sum(tokens[-4:]) * 31 + len(tokens) * 7) % 997 + 3


def continuation(tokens: list[int], count: int) -> list[int]:
    """The next `count` tokens of the stand-in."""
    longer = list(tokens)
    for _ in range(count):
        longer.append(next_token(longer))
    return longer[len(tokens) :]


def proposals(tokens: list[int], count: int) -> list[int]:
    """Drafts made when a request holds `tokens`: about seven in ten right, the others one off."""
    return [
        token if (len(tokens) * 7 + index * 13) % 10 < 7 else token + 1
        for index, token in enumerate(continuation(tokens, count))
    ]


def full_config(scenario: dict[str, Any]) -> dict[str, Any]:
    """The scenario's configuration with what it leaves out."""
    return {**DEFAULTS, **scenario["config"]}


class Replay:
    """One run of a scenario through the scheduler core. `pool` is its pool, whose `core` the
    record looks into: both may be in this process, or with a wire between them.
    """

    def __init__(self, scenario: dict[str, Any], pool: ports.KVPool, core: KVPool) -> None:
        self._config = full_config(scenario)
        self._events = defaultdict(list)
        for event in scenario["events"]:
            self._events[event["step"]].append(event)
        self._max_steps = scenario.get("max_steps", 20_000)
        config = self._config
        self._core = core
        self.scheduler = Scheduler(
            SchedulerConfig(
                **{name: config[name] for name in SAME_NAME},
                num_blocks=config["num_gpu_blocks"],
                num_lookahead_tokens=config["num_lookahead_tokens"] or 0,
                policy=Policy(config["policy"]),
            ),
            pool,
        )
        self._requests: dict[str, Request] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._finished_since_plan: list[str] = []
        self._in_flight: deque[tuple[int, StepPlan]] = deque()
        self._held_by_worker: dict[Request, list[int]] = {}
        self._depth = 2 if config["async_scheduling"] else 1

    async def run(self) -> dict[str, Any]:
        """The record of the whole scenario."""
        steps: list[dict[str, Any]] = []
        last_event = max(self._events, default=0)
        for step in range(self._max_steps):
            record: dict[str, Any] = {"step": step}
            await self._apply_events(step, record)
            if self._has_requests or self._in_flight:
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

    @property
    def _has_requests(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self._finished_since_plan)

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
        model_executed = False
        record["waiting"] = [request.request_id for request in scheduler.waiting]
        record["running"] = [request.request_id for request in scheduler.running]
        if self._has_requests:
            record["computed_before"] = {
                request.request_id: request.num_computed_tokens for request in scheduler.running
            }
            record["finished_before"] = sorted(self._finished_since_plan)
            self._finished_since_plan = []
            plan = await scheduler.schedule()
            self._record_plan(plan, record, step)
            self._in_flight.append((step, plan))
            model_executed = bool(plan.requests)
        for event in self._events[step]:
            if event.get("phase") == "mid":
                self._abort(step, event["abort"], record)
        if len(self._in_flight) == self._depth or (self._in_flight and not model_executed):
            self._update(step, record)
        await scheduler.flush()
        self._record_pool(record, "")
        record["running_after"] = [request.request_id for request in scheduler.running]
        record["waiting_after"] = [request.request_id for request in scheduler.waiting]

    def _update(self, step: int, record: dict[str, Any]) -> None:
        scheduler = self.scheduler
        planned_in, plan = self._in_flight.popleft()
        outputs = []
        answer = self._answer(plan)
        record["accepted"] = {
            request.request_id: len(answer.token_ids[index]) - 1
            for index, request in enumerate(plan.requests)
            if request in plan.draft_token_ids
        }
        for update in scheduler.update_from_output(plan, answer):
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
        record["update_of"], record["outputs"] = planned_in, outputs

    def _answer(self, plan: StepPlan) -> StepOutput:
        """What a worker would say that has seen all steps before this one."""
        tokens, drafts = [], []
        count = self._config["num_speculative_tokens"]
        for index, request in enumerate(plan.requests):
            if request in plan.block_tables:
                self._held_by_worker[request] = list(request.token_ids)
            held = self._held_by_worker[request]
            sampled = self._sampled(plan, index, held)
            held += sampled
            tokens.append(sampled)
            drafts.append(proposals(held, count) if count and sampled else [])
        return StepOutput(tokens, draft_token_ids=drafts if count else ())

    def _sampled(self, plan: StepPlan, index: int, held: list[int]) -> list[int]:
        """Accepted drafts and one token more; none when the prompt is not computed to its end."""
        request = plan.requests[index]
        drafts = plan.draft_token_ids.get(request, [])
        end = plan.num_computed_tokens[index] + plan.num_scheduled_tokens[index] - len(drafts)
        if end < len(held):
            return []
        truth = continuation(held, len(drafts) + 1)
        if -1 in drafts and request not in plan.block_tables:
            drafts = proposals(held, len(drafts))
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == truth[accepted]:
            accepted += 1
        return truth[: accepted + 1]

    def _record_plan(self, plan: StepPlan, record: dict[str, Any], step: int) -> None:
        ids = [request.request_id for request in plan.requests]
        record["scheduled"] = [list(pair) for pair in zip(ids, plan.num_scheduled_tokens)]  # noqa: B905
        record["start"] = plan.num_computed_tokens
        record["new"] = [request.request_id for request in plan.new]
        record["spec"] = {
            request.request_id: drafts for request, drafts in plan.draft_token_ids.items()
        }
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
        core = self._core
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
    *("spec", "accepted"),
    *("outputs", "free", "free_head", "free_sha", "num_cached_hashes", "free_sched"),
    *("free_head_sched", "free_sha_sched", "num_cached_hashes_sched", "running_after"),
    "waiting_after",
]
