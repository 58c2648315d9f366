"""Transfers of keys and values that are under way, and which blocks they hold."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.common.ids import NULL_BLOCK, BlockId, RequestKey
from services.common.kv_cache_groups import KVCacheGroup
from services.common.pool_operations import BlockTables
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_cache_manager import KVCacheManager
from services.scheduler.core.kv_connector import (
    KVConnector,
    KVLoad,
    KVTransferResults,
)
from services.scheduler.core.kv_role import KVLoadFailurePolicy
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class DeferredFree:
    """Blocks of a request that ended, which a step in flight still writes."""

    request: RequestKey
    fence: int
    """The step with whose output they become free."""
    blocks: BlockTables


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
        self._most_counted = {
            group: group.max_admission_blocks(config.max_in_flight_tokens, config.max_model_len)
            for group in config.all_groups
        }
        """Blocks of a group that are counted of one request, at most; None: all."""
        self.loads: list[KVLoad] = []
        """Loads that begin in the step that is planned."""
        self.deferred_frees: deque[DeferredFree] = deque()
        self._config = config
        self._kv_cache_manager = kv_cache_manager
        self._block_tables: dict[Request, BlockTables] = {}
        self._loading: dict[RequestKey, Request] = {}
        """Requests that wait for a load, until they are looked at after its end."""
        self._finished_recving: set[Request] = set()
        self._failed_recving: set[Request] = set()
        self._leaving: dict[RequestKey, BlockTables] = {}
        """Requests that ended and whose blocks a transfer still uses."""
        self._prefills: set[Request] = set()
        """Requests that load or have computed a part of their tokens: blocks are kept free for the
        rest.
        """

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is under way, so that steps go on to hear of its end."""
        return bool(self._loading or self._leaving)

    @property
    def is_moving(self) -> bool:
        """Whether a transfer has not ended."""
        loading = self._loading.values()
        return bool(self._leaving) or not self._finished_recving.issuperset(loading)

    def tables(self, request: Request) -> BlockTables:
        """The block table of a request that holds blocks."""
        return self._block_tables[request]

    # While a step is planned

    def num_reserved_blocks(self, appended_blocks: Mapping[Request, BlockTables]) -> int:
        """Blocks that a load must leave free: those that prefills in progress still lack, since a
        load cannot be preempted to make room for them, and those of its own first drafts.
        `appended_blocks` are what the step that is planned gave running requests.
        """
        config = self._config
        num_step_tokens = 0
        if config.num_speculative_tokens:
            num_step_tokens = 1 + config.num_speculative_tokens + config.num_lookahead_tokens
        num_blocks = sum(-(-num_step_tokens // group.block_size) for group in config.all_groups)
        for request in self._prefills:
            num_tokens = min(request.num_tokens, config.max_model_len)
            tables, appended = self._block_tables.get(request), appended_blocks.get(request)
            for index, group in enumerate(config.all_groups):
                num_held = None if tables is None else len(tables[index])
                if num_held is not None and appended is not None:
                    num_held += len(appended[index])
                num_blocks += self._num_lacking(group, num_held, num_tokens, num_step_tokens)
        return num_blocks

    def _num_lacking(
        self, group: KVCacheGroup, num_held: int | None, num_tokens: int, num_step_tokens: int
    ) -> int:
        """Blocks that a request still needs in one group for so many tokens, and those of its next
        step; of windows no more than an admission counts, of states one. `num_held` is the length
        of its table, None if it has none.
        """
        size, num_drafts = group.block_size, group.num_speculative_blocks
        if group.aligns_states:
            num_states = 1 if num_held is not None else 1 + num_drafts
            num_wanted = -(-num_tokens // size) + num_drafts - (num_held or 0)
            return max(0, min(num_wanted, num_states))
        num_wanted = -(-(num_tokens + num_step_tokens) // size) + num_drafts
        most = self._most_counted[group]
        if most is not None:
            num_wanted = min(num_wanted, most)
        return max(0, num_wanted - (num_held or 0))

    def admitted(
        self, request: Request, blocks: BlockTables, num_new_tokens: int, num_external_tokens: int
    ) -> None:
        """A request runs from this step on; so many of its tokens are computed, and loaded."""
        self._note_table(request, blocks)
        if request.num_computed_tokens + num_new_tokens < request.num_tokens:
            self._prefills.add(request)
        self._begin(request, num_external_tokens, is_async=False)

    def begin_load(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """A request waits while so many of its tokens are loaded."""
        self._note_table(request, blocks)
        self._loading[request.key] = request
        self._prefills.add(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._begin(request, num_external_tokens, is_async=True)

    def promote(self, request: Request) -> bool:
        """Lets a request whose load has ended go on with what is valid, and publishes that; without
        anything valid it holds no blocks any more. Returns False, and does nothing, before the end.
        """
        if request not in self._finished_recving:
            return False
        self._finished_recving.remove(request)
        self._failed_recving.discard(request)
        del self._loading[request.key]
        request.stop_loading()
        if request.num_computed_tokens:
            self._kv_cache_manager.publish_loaded(request)
            # The next token is sampled from the last one that is known, so that is computed again.
            longest = request.num_tokens - 1
            request.num_computed_tokens = min(request.num_computed_tokens, longest)
        else:
            self._kv_cache_manager.release(request)
            request.forget_blocks()
            self.preempted(request)
        return True

    def planned(self, plan: SchedulerOutput) -> None:
        """A step is decided: its running requests have further blocks."""
        plan.loads, self.loads = self.loads, []
        for request, appended in plan.appended_blocks.items():
            for table, blocks in zip(self._block_tables[request], appended, strict=True):
                table.extend(blocks)
        scheduled = self._prefills.intersection(plan.requests)
        self._prefills -= {request for request in scheduled if not request.is_prefill_chunk}

    def is_written(self, request: Request, in_flight: Iterable[SchedulerOutput]) -> bool:
        """Whether steps in flight write blocks of a request that must not be free before."""
        return self._config.fences_frees and any(request in plan.requests for plan in in_flight)

    # When a request gives its blocks back

    def preempted(self, request: Request) -> None:
        """A request that ran holds no blocks any more."""
        self._block_tables.pop(request, None)
        self._prefills.discard(request)

    def ended(self, request: Request, in_flight: Sequence[SchedulerOutput]) -> None:
        """Releases the blocks of a request that ended, as soon as no transfer and no step in flight
        uses them.
        """
        blocks = self._block_tables.pop(request, None)
        if blocks is not None and not self._config.only_grows:
            self._remove_skipped_blocks(request, blocks, in_flight)
        self._prefills.discard(request)
        is_loading = request.key in self._loading and request not in self._finished_recving
        self._loading.pop(request.key, None)
        self._finished_recving.discard(request)
        self._failed_recving.discard(request)
        if blocks is None:
            blocks = tuple([] for _ in range(max(1, len(self._config.groups))))
        computed = tuple(
            table[: -(-request.num_computed_tokens // group.block_size)]
            for group, table in zip(self._config.all_groups, blocks, strict=True)
        )
        is_sent = self.connector.request_finished(request, computed)
        if is_loading or is_sent:
            self._leaving[request.key] = blocks
        elif blocks[0] and self.is_written(request, in_flight):
            self.deferred_frees.append(DeferredFree(request.key, in_flight[-1].step, blocks))
        else:
            self._kv_cache_manager.release(request)

    # When a step's output has come

    def processed(self, plan: SchedulerOutput) -> None:
        """Releases blocks that the step was the last to write."""
        while self.deferred_frees and self.deferred_frees[0].fence <= plan.step:
            self._kv_cache_manager.release_key(self.deferred_frees.popleft().request)

    def take_failures(
        self,
        results: KVTransferResults,
        plans: Iterable[SchedulerOutput],
        waiting: Iterable[Request],
        running: Iterable[Request],
    ) -> set[Request]:
        """Sets the computed tokens of requests back to before the first block that was not loaded.
        `plans` are the step whose output has come and those in flight, which were planned as if all
        had been loaded. Returns the requests whose output of these steps means nothing; with the
        policy FAIL, all that have such a block.
        """
        recomputes = self._config.kv_load_failure_policy is KVLoadFailurePolicy.RECOMPUTE
        failed = set[Request]()
        for key in results.failed_recving:
            if (request := self._loading.get(key)) is not None:
                if recomputes:
                    request.num_computed_tokens = 0
                    self._failed_recving.add(request)
                failed.add(request)
        if recomputes:
            failed.clear()
        if not results.invalid_block_ids:
            return failed
        invalid = frozenset(results.invalid_block_ids)
        loading = [request for request in waiting if request.key in self._loading]
        failed_loads, _ = self._set_back(loading, invalid, {})
        scheduled = Counter[Request]()
        for plan in plans:
            scheduled.update(dict(zip(plan.requests, plan.num_scheduled_tokens, strict=True)))
        failed_running, stale = self._set_back(running, invalid, scheduled)
        if recomputes:
            self._failed_recving |= failed_loads
            return failed_running
        if stale:
            self._kv_cache_manager.evict_blocks(stale)
        return failed | failed_loads | failed_running

    def finished(self, results: KVTransferResults) -> None:
        """Notes which loads ended, and releases blocks of ended requests that no transfer uses."""
        for key in results.finished_recving:
            if (request := self._loading.get(key)) is not None:
                self._finished_recving.add(request)
            else:
                self._release_leaving(key)
        for key in results.finished_sending:
            self._release_leaving(key)

    def forget(self) -> None:
        """Starts over: pool and workers are lost, and with them all transfers."""
        for request in self._loading.values():
            request.stop_loading()
        self.loads = []
        for state in (self._block_tables, self._loading, self._leaving):
            state.clear()
        for requests in (self._finished_recving, self._failed_recving, self._prefills):
            requests.clear()
        self.deferred_frees.clear()

    def _note_table(self, request: Request, blocks: BlockTables) -> None:
        self._block_tables[request] = tuple(map(list, blocks))

    def _remove_skipped_blocks(
        self, request: Request, blocks: BlockTables, in_flight: Iterable[SchedulerOutput]
    ) -> None:
        """Gives back what no later query of a request sees, steps in flight included, before its
        blocks are shown to the connector.
        """
        num_computed = request.num_computed_tokens - sum(
            plan.num_scheduled_tokens[plan.requests.index(request)]
            for plan in in_flight
            if request in plan.requests
        )
        num_computed = max(0, num_computed)
        self._kv_cache_manager.remove_skipped_blocks(request.key, num_computed)
        for group, table in zip(self._config.all_groups, blocks, strict=True):
            end = min(group.first_seen_block(num_computed), len(table))
            table[:end] = [NULL_BLOCK] * end

    def _begin(self, request: Request, num_tokens: int, *, is_async: bool) -> None:
        blocks = self._block_tables[request]
        self.connector.update_state_after_alloc(request, blocks, num_tokens)
        if num_tokens:
            self.loads.append(KVLoad(request, num_tokens, is_async, tuple(map(list, blocks))))

    def _release_leaving(self, key: RequestKey) -> None:
        if self._leaving.pop(key, None) is not None:
            self._kv_cache_manager.release_key(key)

    def _set_back(
        self,
        requests: Iterable[Request],
        invalid: Collection[BlockId],
        scheduled: Mapping[Request, int],
    ) -> tuple[set[Request], list[BlockId]]:
        """Sets requests back to before their first invalid block; of several that share one, only
        the first computes it again, and the others count it as computed. Returns those that have
        one, and the blocks from there on.
        """
        affected = set[Request]()
        recomputed = set[BlockId]()
        stale: list[BlockId] = []
        size = self._config.block_size
        if len(self._config.all_groups) > 1:
            raise ValueError("with several groups a connector reports failed_recving, not blocks")
        for request in requests:
            (blocks,) = self._block_tables[request]
            num_computed = request.num_computed_tokens - scheduled.get(request, 0)
            own = blocks[: -(-num_computed // size)]
            bad = [index for index, block in enumerate(own) if block in invalid]
            if not bad:
                continue
            affected.add(request)
            request.draft_token_ids = []
            first = next((index for index in bad if own[index] not in recomputed), None)
            recomputed.update(own[index] for index in bad)
            if first is None:
                request.num_computed_tokens = num_computed
            else:
                request.num_computed_tokens = first * size
                stale += blocks[first:]
        return affected, stale
