"""Adapters, grammars, a host-memory tier, pooling, embeddings and ranks of a simulated worker."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from services.common.request.adapter import adapter_digest
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind
from services.worker.core.step import NewRequest, StepOutput, TierBlocks, TierLoad
from services.worker.core.worker import Worker
from services.worker.options.simulated.model import SimulatedLora
from services.worker.parallel.group import Group
from services.worker.parallel.membership import Membership
from tests.e2e.tiny import save_tokenizer
from tests.lora_adapters import CONFIGS, save_adapter
from tests.pooling_models import save_classifier, save_embedder
from tests.tiny_models import save_tiny_model
from tests.worker.options.simulated.simulated_worker import (
    build,
    model_runner,
    oracle_of,
    save_configuration,
    save_profile,
    simulated,
)
from tests.worker.rank_threads import TIMEOUTS, free_port
from tests.worker.runner_driver import ints
from tests.worker.step_story import step

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15]
LIMITS: dict[str, Any] = {"block_size": 4, "num_blocks": 60, "max_model_len": 64}


def request(row: int, token_ids: Sequence[int] = PROMPT, **fields: Any) -> NewRequest:
    table = np.arange(1 + 8 * row, 9 + 8 * row, dtype=np.int32)
    known = {"sampling": SamplingParams(temperature=0), "block_tables": (table,)} | fields
    return NewRequest(row, ints(*token_ids), len(token_ids), **known)


def answer(worker: Worker, new: NewRequest, count: int) -> list[int]:
    """The first `count` output tokens of a request that runs alone."""
    worker.runner.reset()
    length, row = len(new.token_ids), new.row
    output = worker.runner.execute(step(0, (row, length, 0), new_requests=(new,)))
    tokens = output.token_ids.tolist()
    for number in range(1, count):
        output = worker.runner.execute(step(number, (row, 1, length + number - 1)))
        tokens += output.token_ids.tolist()
    return tokens


def test_an_adapter_has_other_answers_also_beside_requests_without_it(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    adapter = save_adapter(tmp_path / "model", tmp_path / "adapter", **CONFIGS["everywhere"])
    (tmp_path / "model" / "model.safetensors").unlink()
    worker = build(tmp_path / "model", enable_lora=True, **LIMITS)
    assert worker.adapters is not None
    digest = adapter_digest(adapter)
    worker.adapters.load(digest, adapter)
    number = _number_of(worker, digest) + 1
    adapted, plain = request(1, adapter_digest=digest), request(0)
    starting = step(0, (0, 9, 0), (1, 9, 0), new_requests=(plain, adapted))
    outputs = [worker.runner.execute(one) for one in (starting, step(1, (1, 1, 9), (0, 1, 9)))]
    oracle = oracle_of(worker)
    without, having = oracle.continuation(PROMPT, 2), oracle.continuation(PROMPT, 2, number)
    assert outputs[0].token_ids.tolist() == [without[0], having[0]]
    assert outputs[1].token_ids.tolist() == [having[1], without[1]]
    assert without != having


def _number_of(worker: Worker, digest: bytes) -> int:
    assert worker.adapters is not None
    packed = worker.adapters._loaded[digest]
    assert isinstance(packed, SimulatedLora)
    assert packed.num_bytes > 0
    return packed.number


def test_a_grammar_selects_among_the_other_tokens(tmp_path: Path) -> None:
    save_configuration(tmp_path)
    save_tokenizer(tmp_path)
    worker = build(tmp_path, **LIMITS)
    wanted = StructuredOutputs(StructuredOutputsKind.REGEX, "[0-9]{3}")
    asked = SamplingParams(temperature=0, structured_outputs=wanted)
    tokens = answer(worker, request(0, sampling=asked), 4)
    texts = AutoTokenizer.from_pretrained(tmp_path).convert_ids_to_tokens(tokens[:3])
    assert set(texts) <= set("0123456789")
    assert tokens[3] in worker.description.eos_token_ids


@pytest.mark.parametrize("is_lost", [False, True])
def test_blocks_come_back_from_the_tier_unless_a_copy_is_lost(
    tmp_path: Path, is_lost: bool
) -> None:
    """A request's first two blocks are stored in host memory and loaded into other blocks."""
    worker = simulated(tmp_path, kv_offloading_size=0.001, **LIMITS)
    keys = tuple(bytes(35) + bytes([n]) for n in range(2))
    worker.runner.execute(step(0, (0, 9, 0), new_requests=(request(0),)))
    stored = TierBlocks(ints(1, 2), ints(5, 6), keys)
    worker.runner.execute(step(1, (0, 1, 9), tier_stores=stored))
    loads = TierLoad(4, TierBlocks(ints(20, 21), ints(5, 6), keys))
    planes = model_runner(worker).attention.planes
    planes[:, 1:3] = 0
    loading = step(2, (0, 1, 10), removed_rows=ints(), tier_loads=(loads,))
    ended = list(worker.runner.execute(loading).ended_tier_loads)
    while not ended:
        ended += _idle(worker, 3).ended_tier_loads
    assert [len(one.invalid_block_ids) for one in ended] == [0]
    if is_lost:
        planes[:, 21] = planes[:, 30]
    table = (ints(20, 21, 22),)
    follower = request(1, [*PROMPT[:8], 33], block_tables=table)
    output = worker.runner.execute(step(9, (1, 1, 8), new_requests=(follower,)))
    expected = [oracle_of(worker).next_token([*PROMPT[:8], 33])]
    assert (output.token_ids.tolist() == expected) is not is_lost


def _idle(worker: Worker, number: int) -> StepOutput:
    nothing = step(number, (0, 1, 0))
    nothing.rows = nothing.num_scheduled_tokens = nothing.num_computed_tokens = ints()
    return worker.runner.execute(nothing)


def test_log_probabilities_say_that_the_next_token_is_certain(tmp_path: Path) -> None:
    worker = simulated(tmp_path, **LIMITS)
    asked = SamplingParams(temperature=1, seed=5, logprobs=2, prompt_logprobs=0)
    output = worker.runner.execute(step(0, (0, 9, 0), new_requests=(request(0, sampling=asked),)))
    rows = output.logprobs[0]
    assert rows.sampled is not None
    assert rows.prompt is not None
    assert rows.sampled.logprobs[0, 0] > -1e-6
    assert len(rows.prompt.logprobs) == 8
    assert (rows.prompt.logprobs < -30).all()


def test_embeddings_in_a_prompt_change_the_answer(tmp_path: Path) -> None:
    worker = simulated(tmp_path, **LIMITS)
    width = worker.description.hidden_size
    answers = []
    for seed in (1, 2, 1):
        values = np.random.default_rng(seed).standard_normal((3, width)).astype(np.float32)
        embeds = PromptEmbeds(3, EmbedsDtype.FLOAT32, values.tobytes())
        new = request(0, prompt_embeds=embeds, num_placeholders=3)
        answers.append(answer(worker, new, 3))
    assert answers[0] == answers[2] != answers[1]
    own = [7, 8, 9]
    like_tokens = np.zeros((3, width), np.float32)
    like_tokens[:, 0] = own
    embeds = PromptEmbeds(3, EmbedsDtype.FLOAT32, like_tokens.tobytes())
    new = request(0, [0, 0, 0, *PROMPT[3:]], prompt_embeds=embeds, num_placeholders=3)
    assert answer(worker, new, 3) == oracle_of(worker).continuation(PROMPT, 3)


@pytest.mark.parametrize("mode", ["last", "mean"])
def test_vectors_depend_on_the_prompt_and_not_on_its_chunks(tmp_path: Path, mode: str) -> None:
    save_embedder(tmp_path, "llama", mode)
    (tmp_path / "model.safetensors").unlink()
    worker = build(tmp_path, **LIMITS)
    whole = worker.runner.execute(step(0, (0, 9, 0), new_requests=(request(0),))).pooled[0]
    worker.runner.reset()
    worker.runner.execute(step(0, (1, 4, 0), new_requests=(request(1),)))
    chunked = worker.runner.execute(step(1, (1, 5, 4))).pooled[0]
    other = worker.runner.execute(
        step(2, (2, 9, 0), new_requests=(request(2, [1, *PROMPT[1:]]),))
    ).pooled[0]
    assert whole.shape == (worker.description.hidden_size,)
    assert np.isclose(np.linalg.norm(whole), 1)
    assert np.array_equal(whole, chunked)
    assert not np.allclose(whole, other)


def test_two_ranks_give_the_same_tokens_with_half_of_the_memory_each(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_configuration(tmp_path)
    port, profile = free_port(), save_profile(tmp_path)

    def run(rank: int) -> tuple[Group, int, list[int]]:
        own = Membership(rank, 2, "127.0.0.1", port)
        group = Group(own, TIMEOUTS, lambda _: None, lambda: None)
        settings = {"tensor_parallel_size": 2, "check_ranks_every_steps": 1}
        worker = build(tmp_path, group=group, profile=profile, **settings, **LIMITS)
        return group, worker.description.bytes_per_block, answer(worker, request(0), 5)

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(run, range(2)))
    for group, _, _ in ranks:
        group.close()
    alone = build(tmp_path, **LIMITS)
    expected = oracle_of(alone).continuation(PROMPT, 5)
    assert [tokens for _, _, tokens in ranks] == [expected] * 2
    assert {2 * size for _, size, _ in ranks} == {alone.description.bytes_per_block}


def test_a_classifier_has_a_score_for_each_class(tmp_path: Path) -> None:
    save_classifier(tmp_path, "llama", num_labels=3)
    (tmp_path / "model.safetensors").unlink()
    worker = build(tmp_path, **LIMITS)
    scores = worker.runner.execute(step(0, (0, 9, 0), new_requests=(request(0),))).pooled[0]
    assert scores.shape == (3,)
    assert np.isclose(scores.sum(), 1)


def test_answers_have_the_mean_length_of_the_profile(tmp_path: Path) -> None:
    save_configuration(tmp_path)
    profile = tmp_path / "ending.toml"
    profile.write_text(
        "mean_output_tokens = 5\nkv_cache_memory_bytes = 4_000_000\n[mixed]\nseconds = 0"
    )
    worker = build(tmp_path, profile=str(profile), **LIMITS)
    ends = 0
    for start in range(3, 203):
        worker.runner.reset()
        new = request(0, range(start, start + 5))
        output = worker.runner.execute(step(0, (0, 5, 0), new_requests=(new,)))
        ends += int(output.token_ids[0]) in worker.description.eos_token_ids
    assert 20 <= ends <= 65
