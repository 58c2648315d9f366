"""Drafts from a draft model do not change the tokens. Under any schedule, the drafts are the draft
model's own greedy continuation. If the draft model is the target model itself, every draft is
right, so that a rejected draft shows wrong keys and values of the draft model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.worker.core.worker import Worker
from services.worker.models.config import DtypeSetting
from tests.parity.draft_models import Proposed, Recorded, record_drafts, save_perturbed
from tests.parity.parallel.test_services_parity import Outputs, generate, serving
from tests.parity.situations import (
    BLOCK_SIZE,
    GREEDY,
    MAX_TOKENS,
    SITUATIONS,
    prompts,
    reference_outputs,
)
from tests.parity.situations import build as build_worker
from tests.parity.test_speculation_parity import DEMO, outputs_without_drafts
from tests.scheduler.serving_replica import sampling
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import Driver, Request, build_runner

NUM_DRAFTS = 4
TOGETHER = SITUATIONS["sixteen together"]
NUM_CHECKED = 60
"""The number of proposals that are compared with the draft model's continuation."""


def build(
    directory: Path, draft: Path | None, num_drafts: int = NUM_DRAFTS, **changes: Any
) -> Worker:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_drafts}
    drafts = None if draft is None else json.dumps({**config, "num_rows": 0})
    return build_worker(directory, speculative_config=drafts, **changes)


def save_draft(kind: str, model: Path, directory: Path) -> Path:
    """Saves a draft model for the model in the directory `model`. Returns the draft's directory."""
    match kind:
        case "itself":
            return model
        case "perturbed":
            return save_perturbed(model, directory)
        case _:
            save_tiny_model(directory, kind, seed=9)
            return directory


@dataclass(frozen=True)
class Drafting:
    """A worker with a draft model, and the results of `outputs_without_drafts` for its target
    model. Both models have the data type `dtype`. `kind` is the kind of draft model, which is in
    `directory`.
    """

    kind: str
    dtype: torch.dtype
    directory: Path
    worker: Worker
    outputs: list[tuple[dict[str, Any], Outputs]]


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "itself", torch.bfloat16),
        ("llama", "perturbed", torch.bfloat16),
        ("llama", "mistral_window", torch.float32),
        ("gemma3", "itself", torch.bfloat16),
        ("gemma3", "llama", torch.float32),
        ("gemma4_moe", "llama", torch.float32),
    ],
    ids=lambda case: " by ".join(case[:2]),
)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """Models with and without windows, each with several kinds of draft models."""
    torch.set_num_threads(1)
    model, kind, dtype = request.param
    directory: Path = tmp_path_factory.mktemp(model)
    outputs = outputs_without_drafts(model, dtype, directory / "model")
    draft = save_draft(kind, directory / "model", directory / "draft")
    return Drafting(kind, dtype, draft, build(directory / "model", draft), outputs)


always_right = pytest.mark.parametrize(
    "drafting",
    [("llama", "itself", torch.bfloat16), ("gemma3", "itself", torch.bfloat16)],
    indirect=True,
    ids=lambda case: " by ".join(case[:2]),
)


def assert_share(kind: str, recorded: Recorded) -> None:
    """Asserts the fraction of accepted greedy drafts, which depends on the kind of draft model."""
    assert recorded.num_drafts > 30
    share = recorded.num_accepted / recorded.num_drafts
    match kind:
        case "itself":
            assert share == 1
        case "perturbed":
            assert 0.3 < share < 1
        case _:
            assert share < 0.2


@pytest.mark.parametrize(
    ("situation", "async_scheduling"),
    [
        *(("alone", True), ("chunks of 11", True)),
        *(("preempted again and again", True), ("preempted again and again", False)),
    ],
)
async def test_drafts_change_no_token(
    drafting: Drafting, situation: str, *, async_scheduling: bool
) -> None:
    chosen = SITUATIONS[situation].chosen
    async with serving(
        drafting.worker, SITUATIONS[situation], async_scheduling=async_scheduling
    ) as (replica, gateway):
        for params, expected in drafting.outputs:
            recorded = record_drafts(drafting.worker)
            assert await generate(gateway, chosen(prompts()), params) == chosen(expected)
            if params is GREEDY:
                assert_share(drafting.kind, recorded)
        await replica.until_idle()
        stats = await replica.stats()
    if situation == "preempted again and again":
        assert stats.num_preemptions >= 1


@always_right
async def test_a_model_that_drafts_for_itself_takes_a_step_for_all_drafts_and_one_token(
    drafting: Drafting,
) -> None:
    async with serving(drafting.worker, SITUATIONS["alone"], async_scheduling=False) as (
        replica,
        gateway,
    ):
        assert await generate(gateway, prompts(), GREEDY) == drafting.outputs[0][1]
        stats = await replica.stats()
    each = 1 + -(-(MAX_TOKENS - 1) // (1 + NUM_DRAFTS))
    # If all but one token of a prompt are cached, the step that computes this token already has
    # drafts. The last step is empty, and removes the last request from the workers' batch.
    assert (each - 1) * len(prompts()) < stats.num_steps <= each * len(prompts()) + 1


async def test_what_is_proposed_is_how_the_draft_model_continues(drafting: Drafting) -> None:
    """Drafts are compared with transformers in float32, and the draft model alone in bfloat16."""
    recorded = record_drafts(drafting.worker)
    async with serving(drafting.worker, SITUATIONS["chunks of 11"], async_scheduling=True) as (
        _,
        gateway,
    ):
        for params, _ in drafting.outputs:
            await generate(gateway, prompts(), params)
    order = np.random.default_rng(0).permutation(len(recorded.proposed))[:NUM_CHECKED]
    chosen = [recorded.proposed[index] for index in order.tolist()]
    if drafting.dtype is torch.bfloat16:
        assert_continued_alone(drafting.directory, chosen)
        return
    model = AutoModelForCausalLM.from_pretrained(drafting.directory, dtype=torch.float32).eval()
    for proposed in chosen:
        assert_continued(model, proposed)


def assert_continued_alone(directory: Path, chosen: Sequence[Proposed]) -> None:
    """Asserts that drafts equal the continuation by the model in `directory`, run alone."""
    runner = build_runner(directory, dtype=torch.bfloat16)
    driver = Driver(runner, block_size=16, num_blocks=runner.limits.num_blocks)
    for proposed in chosen:
        forced, own = np.split(np.array(proposed.drafts), [proposed.num_forced])
        request = Request([*proposed.known, *forced.tolist()], len(own))
        driver.run([request])
        assert request.output == own.tolist()


@torch.inference_mode()
def assert_continued(model: PreTrainedModel, proposed: Proposed) -> None:
    tokens = torch.tensor([[*proposed.known, *proposed.drafts[:-1]]])
    first = len(proposed.known) + proposed.num_forced
    logits = model(input_ids=tokens, use_cache=False).logits[0, first - 1 :]
    assert logits.argmax(-1).tolist() == proposed.drafts[proposed.num_forced :]


async def test_cached_blocks_hold_what_the_draft_model_computed(drafting: Drafting) -> None:
    _, expected = drafting.outputs[0]
    half = MAX_TOKENS // 2
    size = BLOCK_SIZE * max(group.block_scale for group in drafting.worker.description.groups)
    async with serving(drafting.worker, TOGETHER, async_scheduling=True) as (_, gateway):
        assert await generate(gateway, prompts(), GREEDY) == expected
        turns = [prompt + answer[:half] for prompt, answer in zip(prompts(), expected, strict=True)]
        recorded, first = record_drafts(drafting.worker), len(gateway.heard)
        params = {**GREEDY, "max_tokens": half}
        assert await generate(gateway, turns, params) == [answer[half:] for answer in expected]
        for handle, turn in enumerate(turns, first):
            cached = gateway.heard[handle].num_cached_tokens
            assert cached == (len(turn) - 1) // size * size
    assert_share(drafting.kind, recorded)


async def test_offloaded_blocks_hold_what_the_draft_model_computed(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    worker = build(tmp_path, tmp_path, kv_offloading_size=64 / 1024)
    async with serving(worker, TOGETHER, async_scheduling=True) as (replica, gateway):
        assert await generate(gateway, prompts(), GREEDY) == reference_outputs("llama")
        await replica.until_idle()
        request = scheduler_pb2.ResetPrefixCacheRequest(preempt_running=True)
        await replica.admin.ResetPrefixCache(request)
        recorded, first = record_drafts(worker), len(gateway.heard)
        assert await generate(gateway, prompts(), GREEDY) == reference_outputs("llama")
        cached = [gateway.heard[handle].num_cached_tokens for handle in range(first, first + 16)]
        assert cached == [(len(of) - 1) // BLOCK_SIZE * BLOCK_SIZE for of in prompts()]
    assert_share("itself", recorded)


@always_right
@pytest.mark.parametrize("num_tokens", range(5, 10))
async def test_a_session_goes_on_inside_the_block_of_its_last_turn(
    drafting: Drafting, num_tokens: int
) -> None:
    recorded = record_drafts(drafting.worker)
    first, more = prompts()[5], prompts()[7]
    params = sampling(**{**GREEDY, "max_tokens": num_tokens})
    async with serving(drafting.worker, TOGETHER, async_scheduling=False) as (_, gateway):
        await gateway.add(0, first, sampling=params, resumable=True)
        held = first + (await gateway.until_turn(0))[:-1]
        await gateway.add_chunk(0, len(held), more, sampling=sampling(**GREEDY))
        said = (await gateway.until_turn(0, 2))[num_tokens:]
        assert gateway.heard[0].num_cached_tokens == len(held)
        assert [said] == await generate(gateway, [held + more], GREEDY)
        await gateway.abort(0)
        await gateway.finish(0)
    assert recorded.num_drafts > MAX_TOKENS
    assert recorded.num_accepted == recorded.num_drafts


async def test_a_shorter_draft_model_drafts_up_to_its_length(tmp_path: Path) -> None:
    longest = 40
    save_tiny_model(tmp_path / "model")
    save_tiny_model(tmp_path / "draft", max_position_embeddings=longest)
    worker = build(tmp_path / "model", tmp_path / "draft")
    recorded = record_drafts(worker)
    async with serving(worker, TOGETHER, async_scheduling=True) as (_, gateway):
        for _ in range(2):  # the second run has prefix hits
            assert await generate(gateway, prompts(), GREEDY) == reference_outputs("llama")
    ends = [len(of.known) + len(of.drafts) for of in recorded.proposed]
    assert max(ends) == longest + 1
    assert_share("itself", recorded)


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_what_a_form_forces_comes_before_drafts(temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["tortoise", "fox"]}, "note": {"type": "string"}},
        "required": ["animal", "note"],
        "additionalProperties": False,
    }
    wanted = common_pb2.StructuredOutputs(
        kind=common_pb2.STRUCTURED_OUTPUTS_KIND_JSON, text=json.dumps(schema)
    )
    params = {
        **{"temperature": temperature, "seed": 3, "max_tokens": 60},
        "structured_outputs": wanted,
    }
    in_float32 = {"dtype": DtypeSetting.FLOAT32}
    plain, worker = build(DEMO, None, **in_float32), build(DEMO, DEMO, 12, **in_float32)
    recorded, answers = record_drafts(worker), []
    for served in (plain, worker):
        async with serving(served, TOGETHER, async_scheduling=True) as (_, gateway):
            answers.append(await generate(gateway, [[5, 6, 7], [8, 9], [10], [11]], params))
    assert answers[0] == answers[1]
    forced = [of for of in recorded.proposed if of.num_forced]
    assert all(of.num_accepted >= of.num_forced for of in forced)
    continued = [of for of in forced if len(of.drafts) > of.num_forced]
    assert len(continued) >= 2
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    for proposed in continued:
        assert_continued(model, proposed)
