"""Transfers of keys and values that are under way, and which blocks they hold."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from services.common.pool.ids import NULL_BLOCK, BlockId, RequestKey
from services.common.pool.kv_cache_groups import AttentionType
from services.common.pool.operations import BlockTables
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv.deferred_frees import DeferredFrees
from services.scheduler.core.kv.kv_cache_manager import KVCacheManager
from services.scheduler.core.kv.reserved_blocks import ReservedBlocks
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.transfers.failed_loads import scheduled_tokens, set_back
from services.scheduler.core.transfers.kv_connector import (
    KVConnector,
    KVLoad,
    KVTransferResults,
)
from services.scheduler.core.transfers.kv_role import KVLoadFailurePolicy


class KVTransfers:
    """What the scheduler keeps because it has a connector.

    A request that loads between steps waits with its blocks. Blocks of one that ended stay taken
    while they are sent or loaded, and, if loads are not ordered with the steps in flight, while one
    of these writes them. As vLLM does: a load could otherwise fill a block before the step that
    belongs to its last owner writes it.
    """

    def __init__(
        self, config: SchedulerConfig, connector: KVConnector, kv_cache_manager: KVCacheManager
    ) -> None:
        self.connector = connector
        self._reserved = ReservedBlocks(config)
        self.loads: list[KVLoad] = []
        """Loads that begin in the step that is planned."""
        self.deferred_frees = DeferredFrees(kv_cache_manager)
        self._config = config
        self._cuts_loads = config.only_grows and len(config.all_groups) == 1
        """Whether a request can go on before the first block that was not loaded. Where a window or
        a state would have to be there, nothing of the load is used.
        """
        self._kv_cache_manager = kv_cache_manager
        self._block_tables: dict[Request, BlockTables] = {}
        """Block tables of the requests that hold blocks."""
        self._loading: dict[RequestKey, Request] = {}
        """Requests that wait for a load, until they are looked at after its end."""
        self._num_local: dict[Request, int] = {}
        """Tokens of their local hits."""
        self._finished_recving: set[Request] = set()
        """Requests whose load has ended, and that have not gone on since."""
        self._first_invalid: dict[Request, int] = {}
        """The first block to compute again of each request whose load within a step failed."""
        self._leaving: dict[RequestKey, tuple[Request, BlockTables]] = {}
        """Requests that ended and whose blocks a transfer still uses."""
        self._filled: list[Request] = []
        """Requests that the last steps admitted, or filled a block of: their blocks are offered
        before windows give them back.
        """
        self._prefills: set[Request] = set()
        """Requests that load or have computed a part of their tokens: blocks are kept free for the
        rest.
        """

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is under way, so that steps go on to hear of its end."""
        return bool(self._loading or self._leaving)

    @property
    def holds_ended(self) -> bool:
        """Whether a transfer uses blocks of a request that ended."""
        return bool(self._leaving)

    @property
    def is_moving(self) -> bool:
        """Whether a transfer has not ended, or blocks wait for the end of a step."""
        loading = self._loading.values()
        is_giving_back = bool(self._leaving or self.deferred_frees)
        return is_giving_back or not self._finished_recving.issuperset(loading)

    def tables(self, request: Request) -> BlockTables:
        """The block table of a request that holds blocks."""
        return self._block_tables[request]

    # While a step is planned

    def begin_step(self) -> None:
        """A step is about to be planned: offers the connector the blocks that earlier ones filled.
        Those whose tokens are not known yet are offered before a later step.
        """
        filled, self._filled = self._filled, []
        size = self._config.block_size
        for request in filled:
            if request in self._block_tables:
                self._offer(request)
                if request.num_computed_tokens // size > request.num_tokens // size:
                    self._filled.append(request)

    def _offer(self, request: Request) -> None:
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        self.connector.blocks_filled(request, self._block_tables[request], num_tokens)

    def num_reserved_blocks(
        self, appended_blocks: Mapping[Request, BlockTables], *, is_alone: bool
    ) -> int:
        """Blocks that a load must leave free: those that prefills in progress still lack, since a
        load cannot be preempted to make room for them, and those of its own first drafts.
        `appended_blocks` are what the step that is planned gave running requests.

        As in vLLM a request without a valid block of its load counts among them, also for itself.
        But if the request that is to load `is_alone`, while nothing runs or loads, those that hold
        no blocks are left out, and so are drafts: it would wait for itself, or for another that
        waits for it.
        """
        num_of_drafts = 0 if is_alone else self._reserved.num_of_drafts
        return num_of_drafts + sum(
            self._reserved.lacking(
                request, self._block_tables.get(request), appended_blocks.get(request)
            )
            for request in self._prefills
            if request in self._block_tables or not is_alone
        )

    def admitted(
        self, request: Request, blocks: BlockTables, num_new_tokens: int, num_external_tokens: int
    ) -> None:
        """A request runs from this step on, which computes `num_new_tokens` of it and loads
        `num_external_tokens`.
        """
        self._note_table(request, blocks)
        if request.num_computed_tokens + num_new_tokens < request.num_tokens:
            self._prefills.add(request)
        self._begin(request, num_external_tokens, is_async=False)

    def begin_load(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """A request waits until `num_external_tokens` of it are loaded."""
        self._note_table(request, blocks)
        self._loading[request.key] = request
        self._prefills.add(request)
        self._num_local[request] = request.num_computed_tokens - num_external_tokens
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._begin(request, num_external_tokens, is_async=True)

    def promote(self, request: Request) -> bool:
        """Lets a request whose load has ended go on with what is valid, and publishes that; without
        anything valid it holds no blocks any more. Returns False, and does nothing, before the end.
        """
        if request not in self._finished_recving:
            return False
        self._finished_recving.remove(request)
        del self._loading[request.key]
        request.stop_loading()
        num_local = self._num_local.pop(request)
        request.num_external_tokens = max(0, request.num_computed_tokens - num_local)
        if request.num_computed_tokens:
            self._kv_cache_manager.publish_loaded(request)
            # The next token is sampled from the last one that is known, so that is computed again.
            longest = request.num_tokens - 1
            request.num_computed_tokens = min(request.num_computed_tokens, longest)
        else:
            self._kv_cache_manager.release(request)
            request.forget_blocks()
            self._forget_table(request)
        return True

    def planned(self, plan: SchedulerOutput) -> None:
        """A step is decided: its running requests have further blocks."""
        plan.loads, self.loads = self.loads, []
        for request, appended in plan.appended_blocks.items():
            tables = self._block_tables[request]
            for group, table, blocks in zip(self._config.all_groups, tables, appended, strict=True):
                if group.attention_type is AttentionType.STATE_SPACE:
                    _leave_moved(table, blocks)
                table.extend(blocks)
        size = self._config.block_size
        self._filled += [
            request
            for request, start, num_tokens in zip(
                plan.requests, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
            )
            if start % size + num_tokens >= size or request in plan.block_tables
        ]
        plan.kv_connector_metadata = self.connector.build_connector_meta(plan.step)
        plan.awaits_transfers = self.is_busy
        scheduled = self._prefills.intersection(plan.requests)
        self._prefills -= {request for request in scheduled if not request.is_prefill_chunk}

    def is_written(self, request: Request, in_flight: Iterable[SchedulerOutput]) -> bool:
        """Whether steps in flight write blocks of a request that must not be free before."""
        return self._config.fences_frees and any(request in plan.requests for plan in in_flight)

    # When a request gives its blocks back

    def preempted(self, request: Request) -> None:
        """A request that ran gives its blocks back."""
        if request in self._block_tables and request.key not in self._loading:
            self._offer(request)
            self._evict_invalid(request)
        self._forget_table(request)
        self._prefills.discard(request)

    def ended(self, request: Request, in_flight: Sequence[SchedulerOutput]) -> None:
        """Releases the blocks of a request that ended, as soon as no transfer and no step in flight
        uses them.
        """
        if request in self._block_tables and request.key not in self._loading:
            self._offer(request)
            self._evict_invalid(request)
        blocks = self._block_tables.pop(request, None)
        if blocks is not None and not self._config.only_grows:
            self._remove_skipped_blocks(request, blocks, in_flight)
        self._prefills.discard(request)
        is_loading = request.key in self._loading and request not in self._finished_recving
        self._loading.pop(request.key, None)
        self._num_local.pop(request, None)
        self._finished_recving.discard(request)
        if blocks is None:
            blocks = tuple([] for _ in range(max(1, len(self._config.groups))))
        computed = tuple(
            table
            if group.attention_type is AttentionType.STATE_SPACE  # drafts write states behind them
            else table[: -(-request.num_computed_tokens // group.block_size)]
            for group, table in zip(self._config.all_groups, blocks, strict=True)
        )
        is_sent = self.connector.request_finished(request, computed)
        if is_loading or is_sent:
            self._leaving[request.key] = request, blocks
        elif blocks[0] and self.is_written(request, in_flight):
            self.deferred_frees.add_request(request.key, blocks, in_flight[-1].step)
        else:
            self._kv_cache_manager.release(request)

    # When a step's output has come

    def processed(self, plan: SchedulerOutput, results: KVTransferResults) -> None:
        """Passes on what was reported, and gives back blocks that waited for the step's output."""
        self.connector.update_connector_output(plan.step, results)
        self.deferred_frees.give_back(plan.step)

    def take_failures(
        self,
        results: KVTransferResults,
        plans: Iterable[SchedulerOutput],
        waiting: Iterable[Request],
        running: Iterable[Request],
    ) -> set[Request]:
        """Sets the computed tokens of requests back to before the first block that was not loaded.
        `plans` are the step whose output has come and those in flight, which were planned as if all
        had been loaded. Returns the requests whose output of these steps is void; with the
        policy FAIL, all that have such a block.
        """
        recomputes = self._config.kv_load_failure_policy is KVLoadFailurePolicy.RECOMPUTE
        failed: set[Request] = set()
        invalid = frozenset(results.invalid_block_ids)
        failed_recving = [*results.failed_recving]
        if invalid and not self._cuts_loads:
            failed_recving += self._loading_into(invalid)
        for key in failed_recving:
            if (request := self._loading.get(key)) is not None:
                if recomputes:
                    request.num_computed_tokens = 0
                failed.add(request)
        if recomputes:
            failed.clear()
        if not invalid or len(self._config.all_groups) > 1:
            return failed
        loading = [request for request in waiting if request.key in self._loading]
        (group,), tables = self._config.all_groups, self._block_tables
        failed_loads, _ = set_back(loading, tables, group, invalid, {})
        failed_running, stale = set_back(running, tables, group, invalid, scheduled_tokens(plans))
        if recomputes:
            for request in failed_running:
                self._first_invalid[request] = request.num_computed_tokens // group.block_size
            return failed_running
        if stale:
            self._kv_cache_manager.pending.evict(stale)
        return failed | failed_loads | failed_running

    def finished(self, results: KVTransferResults, in_flight: Sequence[SchedulerOutput]) -> None:
        """Notes which loads ended, and releases blocks of ended requests that no transfer uses, as
        soon as no step in flight writes them.
        """
        for key in results.finished_recving:
            if (request := self._loading.get(key)) is not None:
                self._finished_recving.add(request)
            else:
                self._release_leaving(key, in_flight)
        for key in results.finished_sending:
            self._release_leaving(key, in_flight)

    def forget(self) -> None:
        """Starts over: pool and workers are lost, and with them all transfers."""
        for request in self._loading.values():
            request.stop_loading()
        self.connector.forget()
        self.loads, self._filled = [], []
        for state in (self._block_tables, self._loading, self._leaving, self._num_local):
            state.clear()
        self._first_invalid.clear()
        self._finished_recving.clear()
        self._prefills.clear()
        self.deferred_frees.forget()

    def _loading_into(self, invalid: Collection[BlockId]) -> list[RequestKey]:
        """Requests whose loads were to fill one of these blocks."""
        return [
            key
            for key, request in self._loading.items()
            if any(not table.isdisjoint(invalid) for table in map(set, self._block_tables[request]))
        ]

    def _evict_invalid(self, request: Request) -> None:
        """Lets no request find blocks that were not loaded, and that this one has not computed
        again. In vLLM they stay published.
        """
        if (first := self._first_invalid.pop(request, None)) is not None:
            (table,) = self._block_tables[request]
            begin = max(first, request.num_computed_tokens // self._config.block_size)
            self._kv_cache_manager.pending.evict(table[begin:])

    def _forget_table(self, request: Request) -> None:
        self.connector.blocks_released(request)
        self._block_tables.pop(request, None)

    def _note_table(self, request: Request, blocks: BlockTables) -> None:
        self._block_tables[request] = tuple(map(list, blocks))

    def _remove_skipped_blocks(
        self, request: Request, blocks: BlockTables, in_flight: Iterable[SchedulerOutput]
    ) -> None:
        """Gives back what no later query of a request sees, steps in flight included, before its
        blocks are shown to the connector, without those that it gave back earlier.
        """
        num_computed = request.num_computed_tokens - sum(
            plan.num_scheduled_tokens[plan.requests.index(request)]
            for plan in in_flight
            if request in plan.requests
        )
        num_computed = max(0, num_computed)
        self._kv_cache_manager.pending.remove_skipped_blocks(request.key, num_computed)
        left_behind = max(num_computed, request.num_tokens_left_behind)
        for group, table in zip(self._config.all_groups, blocks, strict=True):
            end = min(group.first_seen_block(left_behind), len(table))
            table[:end] = [NULL_BLOCK] * end

    def _begin(self, request: Request, num_tokens: int, *, is_async: bool) -> None:
        blocks = self._block_tables[request]
        self.connector.update_state_after_alloc(request, blocks, num_tokens)
        if num_tokens:
            self.loads.append(KVLoad(request, num_tokens, is_async, tuple(map(list, blocks))))

    def _release_leaving(self, key: RequestKey, in_flight: Sequence[SchedulerOutput]) -> None:
        if key not in self._leaving:
            return
        request, blocks = self._leaving.pop(key)
        if self.is_written(request, in_flight):
            self.deferred_frees.add_request(key, blocks, in_flight[-1].step)
        else:
            self._kv_cache_manager.pending.release(key)


def _leave_moved(table: list[BlockId], appended: Sequence[BlockId]) -> None:
    """Puts the null block where the table has blocks that are appended: a state that is not needed
    any more gives its block to a later one.
    """
    for block in set(appended).intersection(table) - {NULL_BLOCK}:
        table[table.index(block)] = NULL_BLOCK
