"""Records the block tables of each KV-cache group, and the order in which blocks are freed."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.common.pool.ids import BlockId
from services.kvpool.core.free_queue import FreeQueue
from services.kvpool.core.group_manager import GroupManager
from services.kvpool.core.kv_pool import KVPool
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request

_Tables = tuple[tuple[BlockId, ...], ...]


class ObservedFreeQueue(FreeQueue):
    """A free queue that passes all freed blocks to an observer, in the order of freeing."""

    __slots__ = ("_observer",)

    def __init__(self, queue: FreeQueue, observer: Callable[[Sequence[BlockId]], None]) -> None:
        """Takes over the lists of blocks of `queue`, which must not be used afterwards."""
        self._blank, self._cached = queue._blank, queue._cached
        self._observer = observer

    def push_blank(self, blocks: Sequence[BlockId]) -> None:
        super().push_blank(blocks)
        self._observer(blocks[::-1])

    def push_cached(self, blocks: Iterable[BlockId], now: int) -> None:
        entering = list(blocks)
        super().push_cached(entering, now)
        self._observer(entering)

    def push_mixed(self, blocks: Sequence[BlockId], has_hash: Sequence[bool], now: int) -> None:
        super().push_mixed(blocks, has_hash, now)
        self._observer(blocks)


class ObservedGroup:
    """Wraps a GroupManager. Notes the group's index in `noted` for each block to zero."""

    def __init__(self, manager: GroupManager, group: int, noted: list[int]) -> None:
        self._manager, self._group, self._noted = manager, group, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def take_blocks_to_zero(self) -> list[BlockId]:
        blocks = self._manager.take_blocks_to_zero()
        self._noted += [self._group] * len(blocks)
        return blocks


class GroupRecord:
    """Records how each plan changes the block tables of running requests, by KV-cache group. Used
    for scenarios that name their groups.
    """

    def __init__(self, core: KVPool) -> None:
        self._core = core
        self._freed: list[BlockId] = []
        self._before: dict[Request, _Tables] = {}
        self._groups_to_zero: list[int] = []
        """For each block in `block_ids_to_zero` of the next plan, in order, its group."""
        blocks = core._blocks
        blocks._free = ObservedFreeQueue(blocks._free, self._freed.extend)
        core._groups = [
            ObservedGroup(manager, group, self._groups_to_zero)
            for group, manager in enumerate(core._groups)
        ]

    def before_plan(self, running: Iterable[Request]) -> None:
        """Must be called before a step is planned."""
        self._before = self._tables(running)
        self._freed.clear()

    def record_plan(
        self, plan: SchedulerOutput, running: Iterable[Request], record: dict[str, Any]
    ) -> None:
        """Adds the changes by a plan to the record of its step."""
        after = self._tables(running)
        record["nulled"] = {
            request.request_id: nulled
            for request, before in self._before.items()
            if request in after and any(nulled := _nulled(before, after[request]))
        }
        tables = {request.request_id: tables for request, tables in after.items()}
        text = json.dumps(tables, separators=(",", ":"))
        record["tables_sha_sched"] = hashlib.sha256(text.encode()).hexdigest()[:12]
        record["junction"] = {
            request.request_id: request.shared_prefix_boundary
            for request in plan.new + plan.resumed
            if request.shared_prefix_boundary
        }
        record["to_zero"] = self._by_group(plan.block_ids_to_zero)
        record["copies"] = [[copy.source, copy.target] for copy in plan.copies]
        record["freed_sched"] = self._take_freed()

    def before_update(self) -> None:
        """Must be called before the scheduler processes the output of a step."""
        self._freed.clear()

    def record_update(self, record: dict[str, Any]) -> None:
        """Adds the blocks that were freed while the scheduler processed the output of a step."""
        record["freed"] = self._take_freed()

    def _tables(self, requests: Iterable[Request]) -> dict[Request, _Tables]:
        return {request: self._core.block_tables(request.key) for request in requests}

    def _by_group(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """The blocks that a step fills with zeros, sorted by group as in vLLM. The plan has them in
        the order of transactions.
        """
        pairs = zip(self._groups_to_zero, block_ids, strict=True)
        ordered = [block_id for _, block_id in sorted(pairs, key=lambda pair: pair[0])]
        self._groups_to_zero.clear()
        return ordered

    def _take_freed(self) -> list[BlockId]:
        freed = list(self._freed)
        self._freed.clear()
        return freed


def _nulled(before: _Tables, after: _Tables) -> list[list[int]]:
    """For each group, the positions of its block table at which the null block replaced a block."""
    return [
        [
            position
            for position, (old, new) in enumerate(zip(*tables, strict=False))
            if old and not new
        ]
        for tables in zip(before, after, strict=True)
    ]
