"""While real workers compute, requests have the same blocks in each step as with vLLM.

vLLM's recorded decisions in tests/conformance show the rule. When a request is scheduled, blocks
are freed before new blocks are allocated. A sliding window frees whole blocks below computed -
window + 1. Recurrent states free all blocks before the block of the last computed token. Tokens in
flight do not count as computed. A step allocates blocks up to its last token. For recurrent states
it allocates only the block of the last token.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.pool.kv_cache_groups import AttentionType
from services.worker.build import build_worker
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.settings import WorkerSettings
from tests.scheduler.serving_replica import gateway_of, sampling, serving_replica
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.worker.serving_worker import ServingWorker

BLOCK_SIZE = 4
PROMPT_LENGTHS = (45, 30, 7)
MAX_TOKENS = 40

KINDS = {
    # The number of KV-cache groups of each attention type.
    "mistral_window": {AttentionType.SLIDING_WINDOW: 1},
    "qwen2_window": {AttentionType.FULL: 1, AttentionType.SLIDING_WINDOW: 2},
    "gemma3": {AttentionType.SLIDING_WINDOW: 5, AttentionType.FULL: 1},
    "gemma4": {AttentionType.SLIDING_WINDOW: 1, AttentionType.FULL: 1},
    "gemma4_moe": {AttentionType.SLIDING_WINDOW: 1, AttentionType.FULL: 1},
    "bamba": {AttentionType.FULL: 1, AttentionType.STATE_SPACE: 3},
    "falcon_h1": {AttentionType.FULL: 1, AttentionType.STATE_SPACE: 1},
}


@dataclass
class Holder:
    """The entries of a request's block tables that have a block according to the rule. `held` has a
    set of these for each KV-cache group.
    """

    groups: tuple[LayerGroup, ...]
    num_processed: int = 0
    num_planned: int = 0
    held: list[set[int]] = field(default_factory=list)

    def schedule(self, end: int) -> None:
        """Plans a step that computes the request's tokens up to `end`."""
        self.held = self.held or [set() for _ in self.groups]
        for group, held in zip(self.groups, self.held, strict=True):
            size = BLOCK_SIZE * group.block_scale
            first, num_blocks = -(-self.num_planned // size), -(-end // size)
            held -= set(range(self._first_kept(group) // size))
            held |= set(range(first, num_blocks))
            if group.holds_states:
                held -= set(range(first, num_blocks - 1))
        self.num_planned = end

    def _first_kept(self, group: LayerGroup) -> int:
        """The first computed token that the next token needs."""
        if group.holds_states:
            return max(0, self.num_processed - 1)
        return 0 if group.window is None else max(0, self.num_processed - group.window + 1)


def expected_free_blocks(
    entries: list[dict[str, Any]], groups: tuple[LayerGroup, ...], num_usable_blocks: int
) -> Iterator[tuple[int, int]]:
    """For each step, yields the number of free blocks by the rule, and the one in the log."""
    holders: dict[int, Holder] = {}
    in_flight: dict[int, dict[int, int]] = {}
    for entry in entries:
        match entry["call"]:
            case "schedule":
                in_flight[entry["step"]] = ends = {}
                for key, computed, count in zip(
                    entry["keys"],
                    entry["num_computed_tokens"],
                    entry["num_scheduled_tokens"],
                    strict=True,
                ):
                    holders.setdefault(key, Holder(groups)).schedule(computed + count)
                    ends[key] = computed + count
                num_held = sum(len(held) for one in holders.values() for held in one.held)
                yield num_usable_blocks - num_held, entry["num_free_blocks"]
            case "update_from_output":
                for key, end in in_flight.pop(entry["step"]).items():
                    if key in holders:
                        holders[key].num_processed = end
                for key, *_ in entry["ended"]:
                    del holders[key]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one step", "two steps in flight"])
@pytest.mark.parametrize("kind", KINDS)
async def test_blocks_are_held_and_given_back_as_in_vllm(
    kind: str, async_scheduling: bool, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path / kind, kind)
    settings = WorkerSettings(
        model=tmp_path / kind,
        block_size=BLOCK_SIZE,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    worker = build_worker(settings, kind, lambda: None)
    groups = worker.description.groups
    types = [group.kv_cache_group(BLOCK_SIZE, 128).attention_type for group in groups]
    assert {one: types.count(one) for one in types} == KINDS[kind]
    random = np.random.default_rng(1)
    log = tmp_path / "steps.jsonl"
    async with (
        serving_replica(
            ServingWorker(worker), async_scheduling=async_scheduling, step_log=log
        ) as replica,
        gateway_of(replica) as gateway,
    ):
        for handle, length in enumerate(PROMPT_LENGTHS):
            token_ids = random.integers(3, VOCAB_SIZE, length).tolist()
            await gateway.add(handle, token_ids, sampling=sampling(MAX_TOKENS))
        await gateway.finish(*range(len(PROMPT_LENGTHS)))
        await replica.until_idle()
        pool = await replica.pool.stats()
        assert pool.num_free_blocks == pool.num_usable_blocks
    entries = [json.loads(line) for line in log.read_text().splitlines()][1:]
    steps = list(expected_free_blocks(entries, groups, pool.num_usable_blocks))
    assert len(steps) > MAX_TOKENS
    assert [expected for expected, _ in steps] == [free for _, free in steps]
