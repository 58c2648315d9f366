"""Vectors of prompts equal those that are computed with transformers and an explicit pooling.
Chunks, batches, preemptions and prefix hits do not change them. All numbers are float32. The
tolerance applies to vectors of length 1.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.request.pooling import Pooler, PoolingParams
from services.common.request.sampling import SamplingParams
from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.adapters.replica_config import scheduler_config
from services.scheduler.adapters.workers.converters import (
    model_runner_output_from_proto,
    scheduler_output_to_proto,
)
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request
from services.scheduler.settings import SchedulerSettings
from services.simulation.inprocess_pool import InProcessPool
from services.worker.adapters.converters import (
    description_to_proto,
    step_from_proto,
    step_output_to_proto,
)
from services.worker.build import build_worker
from services.worker.core.worker import Worker
from services.worker.models.config import DtypeSetting
from services.worker.settings import WorkerSettings
from tests.parity.situations import BLOCK_SIZE, SITUATIONS, Situation, prompts
from tests.pooling_models import (
    add_modules,
    class_scores,
    embedding,
    save_classifier,
    save_embedder,
)
from tests.tiny_models import edit_config, save_tiny_model

TOLERANCE = 2e-6

DECODERS = ["llama", "mistral_window", "gemma2", "qwen3_moe"]


def loaded(directory: Path, **settings: Any) -> Worker:
    limits: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 16,
        "num_blocks": 2400,
        "block_size": BLOCK_SIZE,
        "dtype": DtypeSetting.FLOAT32,
    }
    return build_worker(WorkerSettings(model=directory, **limits | settings), "test", lambda: None)


def pooler_of(worker: Worker) -> Pooler:
    assert worker.description.pooler is not None
    return worker.description.pooler


async def pooled(
    worker: Worker,
    token_ids: list[list[int]],
    params: PoolingParams | None = None,
    situation: Situation | None = None,
) -> tuple[list[np.ndarray], list[Request]]:
    """Serves prompts with the real scheduler and pool, which exchange protobuf messages with the
    worker. Returns the vectors and the requests.
    """
    situation = situation or Situation()
    runner, built = worker.runner, worker.description
    runner.reset()
    pooler = pooler_of(worker)
    shape = ReplicaShape(description_to_proto(built), built.num_blocks)
    config = scheduler_config(SchedulerSettings(kvpool="", workers=()), shape)
    if not pooler.takes_whole_prompts:
        num_blocks = min(situation.num_blocks * len(built.groups), built.num_blocks)
        config = replace(
            config,
            max_num_batched_tokens=situation.max_num_batched_tokens,
            max_num_seqs=situation.max_num_seqs,
            num_blocks=num_blocks,
            scheduler_reserve_full_isl=False,
            long_prefill_token_threshold=situation.max_num_batched_tokens // 2,
        )
    pool = InProcessPool(config)
    scheduler = Scheduler(config, pool)
    requests = [
        Request(
            request_id=str(number),
            key=number + 1,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(),
            pooling=params or PoolingParams(),
            reads_prefix_cache=pooler.reads_prefix_cache,
        )
        for number, prompt in enumerate(token_ids)
    ]
    for request in requests:
        scheduler.add(request)
    vectors: dict[str, np.ndarray] = {}
    while scheduler.has_work:
        plan = await scheduler.schedule()
        pool.core.check()
        if not plan.requests and not plan.removed_rows:
            continue
        step = step_from_proto(scheduler_output_to_proto(plan, 1, ""))
        message = step_output_to_proto(runner.execute(step), queue_nanos=0, execute_nanos=0)
        output = model_runner_output_from_proto(message)
        for index, values in output.pooled.items():
            assert isinstance(values, bytes)
            vectors[plan.requests[index].request_id] = np.frombuffer(values, "<f4")
        scheduler.update_from_output(plan, output)
    return [vectors[request.request_id] for request in requests], requests


@pytest.mark.parametrize("kind", DECODERS)
async def test_the_last_state_of_a_decoder(kind: str, tmp_path: Path) -> None:
    model = save_embedder(tmp_path, kind, "last")
    worker = loaded(tmp_path)
    expected = [embedding(model, prompt, "last") for prompt in prompts()]
    for name, situation in SITUATIONS.items():
        vectors, requests = await pooled(worker, prompts(), situation=situation)
        np.testing.assert_allclose(vectors, expected, atol=TOLERANCE, err_msg=name)
        if situation.max_num_batched_tokens == 7:
            assert sum(request.num_cached_tokens or 0 for request in requests)


async def test_a_decoder_that_transformers_runs_over_the_cache(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "gpt_neox").base_model
    add_modules(tmp_path, "mean")
    worker = loaded(tmp_path)
    assert not pooler_of(worker).takes_whole_prompts
    expected = [embedding(model, prompt, "mean") for prompt in prompts()]
    vectors, _ = await pooled(worker, prompts(), situation=SITUATIONS["chunks of 11"])
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


@pytest.mark.parametrize("mode", ["mean", "cls"])
async def test_states_before_the_last_are_never_taken_from_the_cache(
    mode: str, tmp_path: Path
) -> None:
    model = save_embedder(tmp_path, "qwen3", mode, normalize=False)
    worker = loaded(tmp_path)
    expected = [embedding(model, prompt, mode, normalize=False) for prompt in prompts()]
    runs = []
    tight = Situation(num_blocks=16, max_num_batched_tokens=32, max_num_seqs=3)
    for name, situation in {**SITUATIONS, "preempted": tight}.items():
        vectors, requests = await pooled(worker, prompts(), situation=situation)
        np.testing.assert_allclose(vectors, expected, atol=2e-5, err_msg=name)
        assert not any(request.num_cached_tokens for request in requests)
        runs.append((vectors, sum(request.num_preemptions for request in requests)))
    assert runs[-1][1] > 0
    for vectors, _ in runs[1:]:
        assert [v.tobytes() for v in vectors] == [v.tobytes() for v in runs[0][0]]


@pytest.mark.parametrize(
    ("kind", "mode"), [("bert", "cls"), ("xlm_roberta", "mean"), ("gpt_neox", "last")]
)
async def test_a_model_that_takes_whole_prompts(kind: str, mode: str, tmp_path: Path) -> None:
    model = save_embedder(tmp_path, kind, mode)
    worker = loaded(
        tmp_path, max_model_len=128 if kind == "gpt_neox" else None, max_num_batched_tokens=16
    )
    assert worker.description.max_model_len == 128
    longest = [5 + number % 300 for number in range(128)]
    given = [*prompts(), longest]
    vectors, _ = await pooled(worker, given)
    expected = [embedding(model, prompt, mode) for prompt in given]
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
async def test_scores_of_a_classifier_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = save_classifier(tmp_path, kind)
    worker = loaded(tmp_path)
    for params in (PoolingParams(), PoolingParams(use_activation=False)):
        vectors, _ = await pooled(worker, prompts(), params)
        scores = torch.stack([class_scores(model, prompt) for prompt in prompts()])
        expected = scores if params.use_activation is False else scores.sigmoid()
        np.testing.assert_allclose(vectors, expected.numpy(), atol=2e-5)


async def test_classes_of_two_texts_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "bert", num_labels=3)
    worker = loaded(tmp_path)
    params = PoolingParams(num_first_text_tokens=6)
    prompt = prompts()[5]
    [vector], _ = await pooled(worker, [prompt], params)
    expected = class_scores(model, prompt, 6).softmax(0)
    np.testing.assert_allclose(vector, expected.numpy(), atol=TOLERANCE)
    [other], _ = await pooled(worker, [prompt])
    assert abs(other - vector).max() > 0.001


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
async def test_the_problem_type_determines_the_function_of_single_texts(
    problem: str, num_labels: int, tmp_path: Path
) -> None:
    """The function equals that of transformers' TextClassificationPipeline. Scores of pairs are
    always in the same range, as in vLLM.
    """
    model = save_classifier(tmp_path, "bert", num_labels=num_labels)
    edit_config(tmp_path, problem_type=problem)
    worker, prompt = loaded(tmp_path), prompts()[5]
    [single], _ = await pooled(worker, [prompt])
    logits = class_scores(model, prompt)
    expected = logits if problem == "regression" else logits.sigmoid()
    np.testing.assert_allclose(single, expected.numpy(), atol=TOLERANCE)
    [pair], _ = await pooled(worker, [prompt], PoolingParams(num_first_text_tokens=6))
    of_pair = class_scores(model, prompt, 6)
    expected = of_pair.sigmoid() if num_labels == 1 else of_pair.softmax(0)
    np.testing.assert_allclose(pair, expected.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "bert"])
async def test_a_shorter_vector_is_normalized_again(kind: str, tmp_path: Path) -> None:
    model = save_embedder(tmp_path, kind, "mean")
    worker = loaded(tmp_path)
    vectors, _ = await pooled(worker, prompts(), PoolingParams(dimensions=8))
    expected = [embedding(model, prompt, "mean", dimensions=8) for prompt in prompts()]
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    bare, _ = await pooled(worker, prompts(), PoolingParams(use_activation=False))
    plain = [embedding(model, prompt, "mean", normalize=False) for prompt in prompts()]
    np.testing.assert_allclose(bare, plain, atol=2e-5)
