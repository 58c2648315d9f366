"""The real scheduler and pool serve requests in random schedules, with a simulated worker. Each
request gets the tokens of an oracle, which depend only on the request.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from stepwell.worker.v1 import worker_pb2

from services.common.request.finish import FinishReason
from services.scheduler.adapters.workers.converters import (
    model_runner_output_from_proto,
    scheduler_output_to_proto,
)
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.worker.adapters.converters import step_from_proto, step_output_to_proto
from services.worker.core.drafts.draft_source import ProposerSource
from services.worker.core.drafts.drafter import Drafter
from services.worker.core.worker import Worker
from tests.scheduler.story import Story
from tests.scheduler.unit.test_scheduling_properties import Life
from tests.scheduler.worlds import Arrival, World, worlds
from tests.tiny_models import edit_config
from tests.worker.options.simulated.oracle import Oracle
from tests.worker.options.simulated.simulated_worker import (
    build,
    model_runner,
    oracle_of,
    save_configuration,
    save_draft,
)

BLOCK_SIZE, MAX_MODEL_LEN, MAX_DRAFTS = 4, 44, 3
NUM_WORLDS = 40
_GENERATIONS = count(1)


class OracleProposer:
    """Proposes the oracle's tokens as drafts, but makes about one in three wrong."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def propose(self, row: int, token_ids: np.ndarray, most: int) -> Sequence[int]:  # noqa: ARG002
        right = self._oracle.continuation(token_ids.tolist(), most)
        length = len(token_ids)
        return [
            3 if (5 * (length + index)) % 3 == 0 else token for index, token in enumerate(right)
        ]

    def forget(self, row: int) -> None: ...

    def clear(self) -> None: ...


class Workers:
    """Gives a simulated worker the interface of a Story's PagedModel. Steps and outputs are encoded
    as messages and decoded again. The KV cache begins with random contents.
    """

    def __init__(self, worker: Worker, num_speculative_tokens: int) -> None:
        self._worker = worker
        self._num_speculative_tokens = num_speculative_tokens
        self._generation = next(_GENERATIONS)
        worker.runner.reset()
        planes = model_runner(worker).attention.planes
        planes[:] = np.random.default_rng(self._generation).integers(0, 2**63, planes.shape)

    @property
    def num_requests(self) -> int:
        return len(model_runner(self._worker)._batch.sampling)

    def next_position(self, row: int, num_computed_tokens: int) -> int:
        """The first position that the request's next step writes. It is below `num_computed_tokens`
        if drafts were rejected that the scheduler counts as computed.
        """
        if not self._num_speculative_tokens:
            return num_computed_tokens
        known = int(model_runner(self._worker)._batch.num_tokens[row])
        return min(num_computed_tokens, known - 1)

    def run_plan(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        sent = scheduler_output_to_proto(plan, self._generation, "").SerializeToString()
        step = step_from_proto(worker_pb2.ExecuteRequest.FromString(sent))
        output = self._worker.runner.execute(self._changed(step))
        answer = step_output_to_proto(output, queue_nanos=0, execute_nanos=0)
        return model_runner_output_from_proto(
            answer, num_speculative_tokens=self._num_speculative_tokens
        )

    def _changed(self, step: Any) -> Any:
        return step


class SimulatedStory(Story):
    """A Story (a scheduler and pool whose steps are recorded) in which a simulated worker runs the
    steps, in place of the PagedModel.
    """

    def __init__(self, worker: Worker, **config: Any) -> None:
        self._worker = worker
        super().__init__(**config)

    def _new_model(self) -> Workers:
        return Workers(self._worker, self.config.num_speculative_tokens)


@dataclass(slots=True)
class SimulatedLife(Life):
    """A Life (one run of a random world, a replica with random requests and incidents) in which a
    simulated worker runs the steps.
    """

    worker: Worker | None = None

    def __post_init__(self) -> None:
        self.story = SimulatedStory(self.worker, **self.world.config, through=self._mortal)

    def _expected(self, arrival: Arrival) -> tuple[list[int], FinishReason]:
        known = arrival.token_ids
        room = MAX_MODEL_LEN - len(known)
        num_left = min(arrival.max_tokens - arrival.num_output, room)
        token_ids = known + oracle_of(self.worker).continuation(known, num_left)
        for end in range(len(known), len(token_ids)):
            if token_ids[end] in arrival.ending_token_ids:
                return token_ids[: end + 1], FinishReason.STOP
        return token_ids, FinishReason.LENGTH


def _num_blocks(num_groups: int) -> int:
    return 1 + num_groups * (MAX_MODEL_LEN // BLOCK_SIZE) + 6


@pytest.fixture(
    scope="module",
    params=["llama", "mistral_window", "gemma2 drafts"],
)
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """A worker that proposes drafts. Its vocabulary contains the tokens of the random worlds."""
    kind, _, has_draft_model = request.param.partition(" ")
    directory = tmp_path_factory.mktemp(kind)
    save_configuration(directory, kind)
    edit_config(directory, vocab_size=1000)
    wanted: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": MAX_DRAFTS}
    if has_draft_model:
        wanted |= {"method": "draft_model", "model": str(save_draft(directory))}
    worker = build(
        directory,
        block_size=BLOCK_SIZE,
        num_blocks=_num_blocks(2),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        speculative_config=json.dumps(wanted),
    )
    if has_draft_model:
        return worker
    drafter = Drafter(ProposerSource(OracleProposer(oracle_of(worker))), MAX_DRAFTS)
    model_runner(worker).drafter = drafter
    return worker


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_request_gets_its_own_tokens(worker: Worker, async_scheduling: bool) -> None:
    """Requests are preempted, aborted, and admitted with prefix hits. Pool and worker restart."""
    happened: Counter[str] = Counter()
    groups = tuple(
        group.kv_cache_group(BLOCK_SIZE, MAX_MODEL_LEN) for group in worker.description.groups
    )

    @settings(max_examples=NUM_WORLDS)
    @given(
        worlds(
            async_scheduling=async_scheduling,
            groups=groups,
            block_size=BLOCK_SIZE,
            num_blocks=_num_blocks(len(groups)),
            max_model_len=MAX_MODEL_LEN,
            num_lookahead_tokens=0,
        )
    )
    def live(world: World) -> None:
        asyncio.run(SimulatedLife(world, happened, worker=worker).live())

    live()
    for rare, least in {"preemptions": 5, "hits": 5, "drafts": 5, "LOSS": 1}.items():
        assert happened[rare] >= least, f"{rare} hardly happened: {happened}"


async def test_a_wrong_block_table_is_seen_in_the_answer(worker: Worker) -> None:
    class Confused(Workers):
        def _changed(self, step: Any) -> Any:
            def wrong(tables: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
                return tuple(np.array([7, *table[1:]], np.int32) for table in tables)

            changed = step.copy()
            changed.new_requests = tuple(
                replace(new, block_tables=wrong(new.block_tables)) for new in step.new_requests
            )
            return changed

    groups = tuple(
        group.kv_cache_group(BLOCK_SIZE, MAX_MODEL_LEN) for group in worker.description.groups
    )
    prompts = {"one": list(range(10, 22)), "two": list(range(30, 42))}
    for kind in (Workers, Confused):
        story = SimulatedStory(
            worker,
            groups=groups,
            block_size=BLOCK_SIZE,
            num_blocks=_num_blocks(2),
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=64,
            max_num_seqs=6,
        )
        story.model = kind(worker, 0)
        requests = [story.add(name, prompt, max_tokens=5) for name, prompt in prompts.items()]
        await story.run()
        right = [
            request.token_ids == prompt + oracle_of(worker).continuation(prompt, 5)
            for request, prompt in zip(requests, prompts.values(), strict=True)
        ]
        assert all(right) is (kind is Workers)
