"""Speculative decoding. If a newly admitted request has one token to compute, placeholders for
drafts are scheduled with it, as far as the limits allow.
"""

import pytest

from tests.scenarios.run import run_scenario
from tests.scenarios.scenario import read_scenario
from tests.scenarios.stand_in_model import continuation
from tests.scheduler.story import Story, prompt


async def enter_beside_another(num_prompt_tokens: int, **config: int) -> dict[str, int]:
    """The scheduled tokens in the step that admits a cached prompt beside a decoding request."""
    story = Story(num_speculative_tokens=2, **config)
    story.add("first", prompt(num_prompt_tokens), max_tokens=2)
    await story.run()
    story.add("other", prompt(2, first=500), max_tokens=8)
    await story.step()
    story.add("again", prompt(num_prompt_tokens), max_tokens=2)
    return (await story.step()).granted


async def test_a_request_that_lacks_one_token_enters_with_as_many_drafts_as_the_others() -> None:
    assert await enter_beside_another(9, max_model_len=32) == {"other": 3, "again": 3}


@pytest.mark.parametrize(("max_model_len", "granted"), [(12, 3), (11, 1)])
async def test_drafts_and_the_token_after_them_stay_within_the_model(
    max_model_len: int, granted: int
) -> None:
    assert (await enter_beside_another(9, max_model_len=max_model_len))["again"] == granted


async def test_where_no_step_holds_the_drafts_it_enters_without() -> None:
    story = Story(num_speculative_tokens=2, max_num_batched_tokens=2)
    story.add("first", prompt(9), max_tokens=2)
    await story.run()
    story.add("again", prompt(9), max_tokens=2)
    assert (await story.step()).granted == {"again": 1}


async def test_requests_share_a_bounded_number_of_rows() -> None:
    story = Story(
        num_speculative_tokens=4, num_speculative_rows=6, async_scheduling=True, max_num_seqs=8
    )
    story.add("0", prompt(5), max_tokens=40)
    await story.step()
    assert (await story.step()).granted == {"0": 5}
    for number in range(1, 3):
        story.add(str(number), prompt(5, first=100 * number), max_tokens=12)
    await story.step()
    assert (await story.step()).granted == {"0": 2, "1": 2, "2": 2}
    story.add("3", prompt(5, first=900), max_tokens=12)
    await story.step()
    assert (await story.step()).granted == dict.fromkeys("0123", 1)
    while len(story.scheduler.running) > 1:
        await story.step()
    await story.step()
    assert (await story.step()).granted == {"0": 5}


async def test_with_stages_no_draft_stands_in_place_of_a_token_that_is_in_flight() -> None:
    """The second request is preempted while one of its steps is in flight, and then resumes. The
    drafts of the old step arrive later. They cannot follow the token of the new step, because this
    token is still in flight.
    """
    first, second = prompt(7), prompt(5, first=300)
    added = [("a", first), ("b", second)]
    document = {
        "config": {
            "block_size": 4,
            "max_model_len": 40,
            "num_gpu_blocks": 6,
            "num_speculative_tokens": 1,
            "pipeline_parallel_size": 2,
        },
        "events": [
            {"step": 0, "add": {"request_id": name, "prompt_token_ids": tokens, "max_tokens": 8}}
            for name, tokens in added
        ],
    }
    record = await run_scenario(read_scenario(document))
    assert any(step.get("resumed") for step in record["steps"])
    num_known = {name: len(tokens) for name, tokens in added}
    for step in record["steps"]:
        drafts = step.get("spec", {})
        for (name, granted), start in zip(
            step.get("scheduled", []), step.get("start", []), strict=True
        ):
            assert start + granted - len(drafts.get(name, [])) <= num_known[name]
            assert granted > len(drafts.get(name, []))
        for name, tokens, *_ in step.get("outputs", []):
            num_known[name] += len(tokens)
    for name, tokens in added:
        assert record["requests"][name]["output_token_ids"] == continuation(tokens, 8)
