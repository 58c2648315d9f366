"""Runs a scenario (a scripted run of the scheduler) and records its KV events: the blocks that
entered and left the prefix index in each step.

A block's name identifies the tokens that its hash covers, as in the recordings of vLLM. It is the
first 12 hex digits of the SHA-256 of the JSON text `[tokens up to the end of the block, adapter,
cache salt, [[item, offset], ...]]`.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from services.common.pool.block_hash import BlockHash, unpack_token_ids
from services.common.pool.operations import Operation, Outcome
from services.common.pool.operations_proto import outcome_to_proto
from services.kvpool.adapters.converters import event_to_proto
from services.scheduler.adapters.pool.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from services.scheduler.adapters.pool.kv_events.log import KVEventLog
from services.scheduler.adapters.pool.kv_events.recorder import KVEventRecorder
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool
from tests.scenarios.connector import connected
from tests.scenarios.record import Record
from tests.scenarios.run import ScenarioRun
from tests.scenarios.scenario import Scenario

_Block = tuple[int, str]
"""The index of a KV-cache group, and the name of a block."""


class PublishingPool(InProcessPool):
    """A pool in this process that passes the events of each transaction to a KVEventRecorder."""

    def __init__(self, config: SchedulerConfig, recorder: KVEventRecorder) -> None:
        super().__init__(config)
        self._recorder = recorder

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        operations = list(operations)
        outcome = await super().transact(operations, traceparent)
        response = outcome_to_proto(outcome, 1, self.num_transactions)
        response.events.extend(map(event_to_proto, self.core.take_events()))
        self._recorder.transacted(operations, response)
        return outcome


class EventfulRun(ScenarioRun):
    """A run that records the decisions and, from the events of each step, the step's net changes:
    `stored` (with the number of tokens and the extra keys of each block), `removed`, `cleared`.
    """

    def __init__(self, scenario: Scenario) -> None:
        config = scenario.config
        self._log = KVEventLog(num_batches=100_000)
        recorder = KVEventRecorder(self._log)
        pool = PublishingPool(config, recorder)
        connector = scenario.make_connector()
        scheduler = Scheduler(config, pool, connected(connector))
        recorder.watch(lambda: scheduler.queues.queued, config.all_groups, config.hash_block_size)
        super().__init__(scenario, scheduler, pool.core, connector)
        self._num_read = 0
        self._unit = config.hash_block_size
        self._names: dict[BlockHash, str] = {}
        self._tokens: dict[BlockHash, list[int]] = {}
        self._stored: dict[_Block, list[Any]] = {}

    async def _apply_events(self, step: int, record: Record) -> None:
        await super()._apply_events(step, record)
        if not (self._has_requests or self._in_flight):
            self._add_changes(record)

    async def _step(self, step: int, record: Record) -> None:
        await super()._step(step, record)
        self._add_changes(record)

    def _add_changes(self, record: Record) -> None:
        for own in self._requests.values():
            self._name_hashes(own.request)
        before, cleared = dict(self._stored), False
        for batch in self._log.batches(self._num_read):
            for event in batch.events:
                match event:
                    case BlockStored():
                        self._store(event)
                    case BlockRemoved(hashes, group):
                        for block_hash in hashes:
                            del self._stored[group, self._names[block_hash]]
                    case AllBlocksCleared():
                        self._stored.clear()
                        cleared = True
        self._num_read = self._log.newest + 1
        now = self._stored
        changes = {
            "stored": sorted([*block, *now[block]] for block in now.keys() - before.keys()),
            "removed": sorted([*block] for block in before.keys() - now.keys()),
            "cleared": cleared,
        }
        record |= {name: value for name, value in changes.items() if value}

    def _store(self, event: BlockStored) -> None:
        """Checks the tokens of an event against the named hashes, and records its blocks."""
        size, parent = event.block_size, event.parent_block_hash
        before = [] if parent is None else self._tokens[parent]
        begin, tokens = len(before), before + unpack_token_ids(event.token_ids)
        assert self._tokens[event.block_hashes[-1]] == tokens
        for number, (block_hash, keys) in enumerate(
            zip(event.block_hashes, event.extra_keys, strict=True), start=1
        ):
            assert len(self._tokens[block_hash]) == begin + number * size
            block = event.group_idx, self._names[block_hash]
            assert block not in self._stored, "a block is stored twice"
            self._stored[block] = [size, [*keys] if keys else None]

    def _name_hashes(self, request: Request) -> None:
        for number, block_hash in enumerate(request.block_hashes, start=1):
            if block_hash in self._names:
                continue
            tokens = request.token_ids[: number * self._unit]
            items = [
                [item.identifier, item.offset]
                for item in request.encoder_inputs
                if item.offset < len(tokens)
            ]
            text = json.dumps([tokens, request.adapter_name, request.cache_salt, items])
            self._names[block_hash] = hashlib.sha256(text.encode()).hexdigest()[:12]
            self._tokens[block_hash] = tokens
