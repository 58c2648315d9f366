"""vLLM's counters of accepted and rejected drafts."""

from services.common.telemetry.metric_specs import vllm
from services.scheduler.adapters.telemetry.engine_metrics import SpeculationMetrics
from services.scheduler.adapters.telemetry.request_metrics import RequestMetrics
from services.scheduler.core.output import EngineCoreOutputs, SchedulerOutput
from tests.scheduler.story import Story, prompt


def samples(metrics: SpeculationMetrics) -> dict[str, float]:
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_drafts_count_by_whether_and_where_they_stood() -> None:
    metrics = SpeculationMetrics(3)
    update = EngineCoreOutputs(
        SchedulerOutput(1), [[5, 6, 7], [8], None, [9]], {}, [], 5, num_draft_tokens=[3, 2, 1, 0]
    )
    metrics.done(update)
    metrics.done(EngineCoreOutputs(SchedulerOutput(2), [[5, 6]], {}, [], 2, num_draft_tokens=[1]))
    assert samples(metrics) == {
        "vllm:spec_decode_num_drafts_total": 4,
        "vllm:spec_decode_num_draft_tokens_total": 7,
        "vllm:spec_decode_num_accepted_tokens_total": 3,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total0": 2,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total1": 1,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total2": 0,
    }


def test_without_speculation_there_is_nothing_to_read() -> None:
    assert not samples(SpeculationMetrics(0))


async def test_drafts_that_were_not_proposed_are_no_tokens_of_the_step() -> None:
    story = Story(num_speculative_tokens=3, async_scheduling=True)
    request, metrics = story.add("a", prompt(5), max_tokens=20), RequestMetrics()
    await story.step()
    plan = await story.scheduler.schedule()
    assert [len(drafts) for drafts in plan.draft_token_ids.values()] == [3]
    for verified in ([2], ()):
        metrics.done(plan, EngineCoreOutputs(plan, [[7]], {}, [], 1, num_draft_tokens=verified))
    assert request in plan.requests
    (tokens,) = (one for one in metrics.collect() if one.name == vllm.ITERATION_TOKENS.name)
    assert {one.value for one in tokens.samples if one.name.endswith("_sum")} == {3 + 1}
