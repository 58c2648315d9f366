"""vLLM's metrics of requests, in worked examples and in random sequences of steps."""

import random
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from services.common.request.finish import FinishReason
from services.common.telemetry.metric_specs import vllm
from services.common.telemetry.metric_specs.spec import MetricSpec
from services.scheduler.adapters.telemetry.request_metrics import RequestMetrics
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request
from tests.scheduler.story import Story, prompt

UNIX = 1_700_000_000.0


class MeasuredStory(Story):
    """A Story (a scheduler and pool whose steps are recorded). Its clock advances only during
    steps, or when the test sets it.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.now = 0.0
        self.metrics = RequestMetrics(lambda: self.now, lambda: UNIX + self.now)

    def arrive(
        self, name: str, token_ids: list[int], *, in_gateway: float = 0.0, **fields: Any
    ) -> Request:
        """Queues a request that has been in its gateway for `in_gateway` seconds."""
        unix = UNIX + self.now
        fields |= {"arrival_time": unix - in_gateway, "queued_unix_nanos": int(unix * 1e9)}
        request = self.add(name, token_ids, **fields)
        self.metrics.arrived([request])
        return request

    def end(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        self.scheduler.abort(request, reason)
        self.metrics.ended([request])

    async def take(self, seconds: float) -> tuple[SchedulerOutput, list[Any]]:
        """Runs a step that takes `seconds`. Returns its plan and its tokens."""
        plan = await self.scheduler.schedule()
        self.metrics.admitted(plan.new)
        self.now += seconds
        update = self.scheduler.update_from_output(plan, self.model.run_plan(plan))
        self.metrics.done(plan, update)
        return plan, list(update.token_ids)

    def read(self) -> dict[str, float]:
        """Maps samples that are not 0 to their values, without buckets. A sample's name is the
        metric's name without the prefix `vllm:`, followed by the values of its labels.
        """
        return {
            " ".join([sample.name.removeprefix("vllm:"), *sample.labels.values()]): sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.value and not sample.name.endswith("_bucket")
        }

    def buckets(self, name: str) -> dict[float, float]:
        return {
            float(sample.labels["le"]): sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.name == f"{name}_bucket"
        }


async def test_a_request_from_its_arrival_to_its_end() -> None:
    story = MeasuredStory(max_num_batched_tokens=4)
    story.arrive("a", prompt(6), max_tokens=3, in_gateway=0.5, num_choices=1)
    story.now = 2.0  # the request waits for two seconds
    await story.take(0.25)  # a chunk of four tokens
    await story.take(0.25)  # the rest of the prompt, and the first token
    await story.take(0.125)
    await story.take(0.375)
    assert story.read() == {
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.5 + 2.0 + 0.5,
        "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_sum": 0.5,
        "request_time_per_output_token_seconds_count": 1,
        "request_time_per_output_token_seconds_sum": 0.25,
        "e2e_request_latency_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 3.5,
        "request_queue_time_seconds_count": 1,
        "request_queue_time_seconds_sum": 2.0,
        "request_prefill_time_seconds_count": 1,
        "request_prefill_time_seconds_sum": 0.5,
        "request_decode_time_seconds_count": 1,
        "request_decode_time_seconds_sum": 0.5,
        "request_inference_time_seconds_count": 1,
        "request_inference_time_seconds_sum": 1.0,
        "request_prompt_tokens_count": 1,
        "request_prompt_tokens_sum": 6,
        "request_generation_tokens_count": 1,
        "request_generation_tokens_sum": 3,
        "request_max_num_generation_tokens_count": 1,
        "request_max_num_generation_tokens_sum": 3,
        "request_prefill_kv_computed_tokens_count": 1,
        "request_prefill_kv_computed_tokens_sum": 6,
        "request_params_n_count": 1,
        "request_params_n_sum": 1,
        "request_params_max_tokens_count": 1,
        "request_params_max_tokens_sum": 3,
        "iteration_tokens_total_count": 4,
        "iteration_tokens_total_sum": 4 + 2 + 1 + 1,
        "request_success_total length": 1,
        "prompt_tokens_total": 6,
        "generation_tokens_total": 3,
        "prompt_tokens_by_source_total local_compute": 6,
    }


async def test_cached_tokens_are_told_from_computed_ones() -> None:
    story = MeasuredStory()
    story.arrive("a", prompt(9), max_tokens=1)
    await story.take(1)
    story.arrive("b", prompt(9), max_tokens=1)
    await story.take(1)
    read = story.read()
    assert read["prompt_tokens_total"] == 18
    assert read["prompt_tokens_cached_total"] == 8
    assert read["prompt_tokens_by_source_total local_cache_hit"] == 8
    assert read["prompt_tokens_by_source_total local_compute"] == 10
    assert read["request_prefill_kv_computed_tokens_sum"] == 9 + 1
    assert "request_time_per_output_token_seconds_count" not in read, "of one token there is none"


async def test_a_request_that_goes_on_here_was_begun_elsewhere() -> None:
    story = MeasuredStory()
    story.arrive("a", [*prompt(6), 7, 8], num_prompt_tokens=6, max_tokens=4, in_gateway=10)
    await story.take(1)
    await story.take(1)
    read = story.read()
    assert "time_to_first_token_seconds_count" not in read
    assert "prompt_tokens_total" not in read
    assert read["generation_tokens_total"] == 2
    assert read["request_generation_tokens_sum"] == 2
    assert read["e2e_request_latency_seconds_sum"] == 12


async def test_ends_are_counted_by_vllms_reasons_and_a_refusal_is_none() -> None:
    story = MeasuredStory(max_num_seqs=1)
    ends = {
        "a": FinishReason.ABORT,
        "b": FinishReason.STOP,
        "c": FinishReason.STEP_FAILED,
        "d": FinishReason.NAN_IN_LOGITS,
        "e": FinishReason.QUEUE_TIMEOUT,
        "f": FinishReason.ABORT,
    }
    requests = [story.arrive(name, prompt(5)) for name in ends]
    await story.take(1)
    for request, reason in zip(requests, ends.values(), strict=True):
        story.end(request, reason)
    read = story.read()
    assert {key: value for key, value in read.items() if "success" in key} == {
        "request_success_total abort": 2,
        "request_success_total stop": 1,
        "request_success_total error": 2,
    }
    assert read["e2e_request_latency_seconds_count"] == 1, "the others were never scheduled"


@dataclass
class Naive:
    arrived: float
    scheduled: float | None = None
    tokens: list[float] = field(default_factory=list)


async def test_random_stories_give_what_a_list_of_all_times_gives() -> None:
    rng = random.Random(11)
    story = MeasuredStory(num_blocks=14, max_num_seqs=5, max_num_batched_tokens=16)
    naive: dict[Request, Naive] = {}
    observed: dict[MetricSpec, list[float]] = defaultdict(list)

    def note_end(request: Request) -> None:
        times = naive.pop(request)
        observed[vllm.E2E_REQUEST_LATENCY].append(story.now - times.arrived)
        if times.scheduled is None:
            observed[vllm.E2E_REQUEST_LATENCY].pop()
            return
        queue = times.scheduled - times.arrived
        observed[vllm.REQUEST_QUEUE_TIME].append(queue)
        if times.tokens:
            first, last = times.tokens[0], times.tokens[-1]
            observed[vllm.REQUEST_PREFILL_TIME].append(first - times.scheduled)
            observed[vllm.REQUEST_DECODE_TIME].append(last - first)

    num_preemptions = 0
    for number in range(400):
        if rng.random() < 0.15:
            length = rng.randrange(1, 20)
            request = story.arrive(
                f"r{number}", prompt(length, number), max_tokens=rng.randrange(1, 25)
            )
            naive[request] = Naive(story.now)
        if naive and rng.random() < 0.03:
            request = rng.choice(list(naive))
            story.end(request)
            note_end(request)
        began = story.now
        plan, tokens = await story.take(rng.choice([0.001, 0.01, 0.1, 0.7]))
        num_preemptions += len(plan.preemptions)
        for request in plan.new:
            naive[request].scheduled = began
        for request, new in zip(plan.requests, tokens, strict=True):
            for _ in new or ():
                times = naive[request].tokens
                if times:
                    observed[vllm.INTER_TOKEN_LATENCY].append(story.now - times[-1])
                else:
                    first = story.now - naive[request].arrived
                    observed[vllm.TIME_TO_FIRST_TOKEN].append(first)
                times.append(story.now)
            if request.is_finished and request in naive:
                note_end(request)
    assert num_preemptions > 5
    read = story.read()
    for spec, values in observed.items():
        name = spec.name
        short = name.removeprefix("vllm:")
        assert read[f"{short}_count"] == len(values) > 30, name
        assert abs(read[f"{short}_sum"] - sum(values)) < 1e-4, name
        for bound, count in story.buckets(name).items():
            # Times are differences of rounded sums, and so may be on either side of an equal bound.
            low = bisect_left(sorted(values), bound - 1e-6)
            high = bisect_left(sorted(values), bound + 1e-6)
            assert low <= count <= high, (name, bound)
        assert len(spec.buckets) + 1 == len(story.buckets(name))
