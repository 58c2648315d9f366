"""Drafts do not change tokens, with any proposer and any schedule."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stepwell.common.v1 import common_pb2

from services.worker.core.drafts.draft_source import DraftSource, ProposerSource, SuffixSource
from services.worker.core.drafts.drafter import Drafter
from services.worker.core.model_runner import ModelRunner
from services.worker.core.worker import Worker
from services.worker.speculation.config import SpeculativeConfig
from services.worker.speculation.ngram import NgramProposer
from tests.cli.replaying import replay
from tests.parity.parallel.test_services_parity import Outputs, answers_together, generate, serving
from tests.parity.proposers import KnownProposer, RandomProposer
from tests.parity.situations import (
    BLOCK_SIZE,
    GREEDY,
    MAX_TOKENS,
    SAMPLED,
    SITUATIONS,
    build,
    prompts,
    reference_outputs,
)
from tests.scheduler.serving_replica import sampling
from tests.tiny_models import TILED, save_tiny_model
from tests.worker.suffix_reference import suffix_trees

NUM_DRAFTS = 4
NGRAM = SpeculativeConfig(NUM_DRAFTS, prompt_lookup_min=1, prompt_lookup_max=3)
EDITED: dict[str, Any] = {
    **GREEDY,
    "frequency_penalty": 0.7,
    "logit_bias_token_ids": [5, 6],
    "logit_bias_values": [2.0, -3.0],
    "min_tokens": 8,
    "stop_token_ids": list(range(40, 80)),
    "logprobs": 1,
}
DEMO = Path(__file__).parents[2] / "models" / "demo"
TOGETHER = SITUATIONS["sixteen together"]

PROPOSERS: dict[str, Callable[[KnownProposer], DraftSource]] = {
    "always right": ProposerSource,
    "never right": lambda known: ProposerSource(KnownProposer(known.sequences, shift=1)),
    "random": lambda known: ProposerSource(RandomProposer(known)),
    "ngram": lambda _: ProposerSource(NgramProposer(NGRAM)),
    "suffix": lambda _: SuffixSource(suffix_trees()),
}


def outputs_without_drafts(
    kind: str, dtype: torch.dtype, directory: Path
) -> list[tuple[dict[str, Any], Outputs]]:
    """Saves a model. Returns pairs of sampling parameters and the model's answers without drafts.
    Transformers computes the greedy answers in float32.
    """
    is_float32 = dtype is torch.float32
    save_tiny_model(directory, kind, dtype=dtype, **({} if is_float32 else TILED))
    plain = build(directory)
    greedy = reference_outputs(kind) if is_float32 else answers_together(plain, GREEDY)
    others = [(params, answers_together(plain, params)) for params in (SAMPLED, EDITED)]
    return [(GREEDY, greedy), *others]


@dataclass
class Speculating:
    """A worker that verifies drafts, and the results of `outputs_without_drafts` for its model."""

    loaded: Worker
    outputs: list[tuple[dict[str, Any], Outputs]]

    def propose_with(self, name: str) -> None:
        assert isinstance(self.loaded.runner, ModelRunner)
        given = [prompt for _ in self.outputs for prompt in prompts()]
        answers = [answer for _, outputs in self.outputs for answer in outputs]
        known = [prompt + answer for prompt, answer in zip(given, answers, strict=True)]
        source = PROPOSERS[name](KnownProposer(known))
        self.loaded.runner.drafter = Drafter(source, NUM_DRAFTS)


@pytest.fixture(
    scope="module",
    params=[("llama", torch.float32), ("gemma3", torch.bfloat16)],
    ids=lambda case: case[0],
)
def speculating(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Speculating:
    """A model in float32, and a model in bfloat16 that also has windows."""
    torch.set_num_threads(1)
    kind, dtype = request.param
    directory: Path = tmp_path_factory.mktemp(kind)
    outputs = outputs_without_drafts(kind, dtype, directory)
    assert 8 <= min(map(len, outputs[-1][1])) < MAX_TOKENS
    drafts = json.dumps({"num_speculative_tokens": NUM_DRAFTS, "num_rows": 0})
    return Speculating(build(directory, speculative_config=drafts), outputs)


@pytest.mark.parametrize(
    ("situation", "proposer", "async_scheduling"),
    [
        *(("preempted again and again", proposer, True) for proposer in PROPOSERS),
        ("preempted again and again", "random", False),
        *(("sixteen together", proposer, True) for proposer in ("always right", "ngram")),
        *(("chunks of 11", proposer, True) for proposer in ("never right", "random", "suffix")),
        *(("alone", proposer, True) for proposer in ("always right", "never right")),
    ],
)
async def test_drafts_change_no_token(
    speculating: Speculating, situation: str, proposer: str, *, async_scheduling: bool
) -> None:
    speculating.propose_with(proposer)
    chosen, each = SITUATIONS[situation].chosen, 1 + NUM_DRAFTS * (proposer == "always right")
    # One step for the prompt, steps for further tokens, and one step after the request's end.
    num_steps = 0
    async with serving(
        speculating.loaded, SITUATIONS[situation], async_scheduling=async_scheduling
    ) as (replica, gateway):
        for params, expected in speculating.outputs:
            assert await generate(gateway, chosen(prompts()), params) == chosen(expected)
            num_steps += sum(2 + -(-(len(answer) - 1) // each) for answer in chosen(expected))
        await replica.until_idle()
        stats = await replica.stats()
    if situation == "preempted again and again":
        assert stats.num_preemptions >= 1
    if situation == "alone":
        assert stats.num_steps < 1.1 * num_steps


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one step", "two in flight"])
async def test_a_run_whose_requests_share_rows_is_reproduced_from_its_log(
    speculating: Speculating, tmp_path: Path, *, async_scheduling: bool
) -> None:
    speculating.propose_with("random")
    description = replace(speculating.loaded.description, num_speculative_rows=20)
    loaded = replace(speculating.loaded, description=description)
    path, situation = tmp_path / "steps.jsonl", SITUATIONS["preempted again and again"]
    async with serving(loaded, situation, async_scheduling=async_scheduling, step_log=path) as (
        replica,
        gateway,
    ):
        for params, expected in speculating.outputs:
            assert await generate(gateway, prompts(), params) == expected
        await replica.until_idle()
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    planned = (entry["draft_token_ids"] for entry in entries if entry.get("call") == "schedule")
    assert {1, 2, NUM_DRAFTS} <= {len(drafts) for of in planned for drafts in of.values()}
    assert await asyncio.to_thread(replay, path) == 0


async def test_an_answer_is_drafted_from_others_of_the_same_salt(speculating: Speculating) -> None:
    speculating.propose_with("suffix")
    _, expected = speculating.outputs[0]
    num_steps = []
    async with serving(speculating.loaded, TOGETHER, async_scheduling=True) as (replica, gateway):
        for salt in ("ann", "ben", "", "ann"):
            before = (await replica.stats()).num_steps
            for prompt, answer in zip(prompts(), expected, strict=True):
                handle = len(gateway.heard)
                await gateway.add(handle, prompt, sampling=sampling(**GREEDY), cache_salt=salt)
                await gateway.finish(handle)
                assert gateway.heard[handle].tokens == answer
            num_steps.append((await replica.stats()).num_steps - before)
    first, *others, again = num_steps
    assert again < 0.6 * first
    assert min(others) > 0.9 * first


async def test_accepted_drafts_are_cached_as_they_were_computed(speculating: Speculating) -> None:
    speculating.propose_with("random")
    _, expected = speculating.outputs[0]
    half = MAX_TOKENS // 2
    async with serving(speculating.loaded, TOGETHER, async_scheduling=True) as (_, gateway):
        assert await generate(gateway, prompts(), GREEDY) == expected
        first = len(gateway.heard)
        turns = [prompt + answer[:half] for prompt, answer in zip(prompts(), expected, strict=True)]
        params = {**GREEDY, "max_tokens": half}
        assert await generate(gateway, turns, params) == [answer[half:] for answer in expected]
        for handle, turn in enumerate(turns, first):
            cached = gateway.heard[handle].num_cached_tokens
            assert cached == (len(turn) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_drafts_change_no_token_of_a_form(temperature: float) -> None:
    schema = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"enum": ["fox", "tortoise"]}, "old": {"type": "boolean"}},
            "required": ["name", "old"],
            "additionalProperties": False,
        },
        "minItems": 4,
        "maxItems": 4,
    }
    wanted = common_pb2.StructuredOutputs(
        kind=common_pb2.STRUCTURED_OUTPUTS_KIND_JSON, text=json.dumps(schema)
    )
    params: dict[str, Any] = {
        "temperature": temperature,
        "seed": 3,
        "max_tokens": 80,
        "structured_outputs": wanted,
    }
    answers, num_steps = [], []
    by_ngrams = {"num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 2}
    for config in (None, by_ngrams, {"method": "suffix"}):
        worker = build(DEMO, speculative_config=config and json.dumps(config))
        async with serving(worker, TOGETHER, async_scheduling=True) as (replica, gateway):
            answers.append(await generate(gateway, [[5, 6, 7], [8, 9]], params))
            num_steps.append((await replica.stats()).num_steps)
    assert answers[0] == answers[1] == answers[2]
    assert max(num_steps[1:]) < num_steps[0]
