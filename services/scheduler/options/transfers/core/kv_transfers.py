"""Tracks the transfers of keys and values through a KV connector, and the blocks that they use."""

from collections.abc import Collection, Iterable, Sequence

from services.common.pool.ids import NULL_BLOCK, BlockId, RequestKey
from services.common.pool.kv_cache_groups import AttentionType
from services.common.pool.operations import BlockCopy, BlockTables
from services.scheduler.core.kv_transfer import KVLoad, KVLoadFailurePolicy, KVTransferResults
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.replica_state import ReplicaState
from services.scheduler.core.planning.transfers import Answer
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.options.transfers.core.deferred_frees import DeferredFrees
from services.scheduler.options.transfers.core.external_hits import ExternalHits
from services.scheduler.options.transfers.core.failed_loads import (
    Recomputations,
    scheduled_tokens,
    set_back,
)
from services.scheduler.options.transfers.core.kv_connector import ExternalMatch, KVConnector
from services.scheduler.options.transfers.core.reserved_blocks import ReservedBlocks


class KVTransfers:
    """The state of all transfers through a KV connector. Implements the interface Transfers.

    The blocks of an ended request are freed only when no transfer uses them. If loads are not
    ordered with steps, blocks are also kept while a step in flight may write them, as in vLLM.
    Otherwise a load could fill such a block for the block's new owner, and the step could then
    overwrite the block.
    """

    def __init__(self, connector: KVConnector, state: ReplicaState) -> None:
        config, kv_cache_manager = state.config, state.kv_cache_manager
        self.connector = connector
        self._answers: list[Answer] | None = None
        """Results of the connector's calls since `take_answers`. None if they are not recorded."""
        self.plan = ExternalHits(state, self).plan
        self.loads: list[KVLoad] = []
        """Loads that begin with the step that is planned now."""
        self.deferred_frees = DeferredFrees(kv_cache_manager)
        self._config = config
        self._steps = state.steps
        self._clock, self._costs = state.clock, state.step_costs
        self._cuts_loads = config.only_grows and len(config.all_groups) == 1
        """Whether a request whose load failed keeps the blocks before the first block that was not
        loaded. With sliding windows or states, it keeps none of its blocks.
        """
        self._kv_cache_manager = kv_cache_manager
        self._block_tables: dict[Request, BlockTables] = {}
        """Maps the requests that hold blocks to their block tables."""
        self.reserved = ReservedBlocks(config, self._block_tables)
        self._loading: dict[RequestKey, Request] = {}
        """Requests that wait for an asynchronous load, until `promote` is called after its end."""
        self._begun: dict[RequestKey, tuple[float, int]] = {}
        """Maps each request with a load in progress to the load's start time and token count."""
        self._num_local: dict[Request, int] = {}
        """Maps the requests in `_loading` to their numbers of tokens that were already cached."""
        self._finished_recving: set[Request] = set()
        """Requests whose load has ended, but for which `promote` was not called yet."""
        self.recomputations = Recomputations(config.all_groups[0], self._block_tables)
        self._leaving: dict[RequestKey, tuple[Request, BlockTables]] = {}
        """Ended requests whose blocks a transfer still uses."""
        self._filled: list[Request] = []
        """Requests that recent steps admitted, or whose blocks they filled. Before a step is
        planned, the connector is called with their blocks, to store a block before a sliding window
        frees it.
        """

    @property
    def is_busy(self) -> bool:
        return bool(self._loading or self._leaving)

    @property
    def is_moving(self) -> bool:
        is_freeing = bool(self._leaving or self.deferred_frees)
        return is_freeing or not self._finished_recving.issuperset(self._loading.values())

    # Called while a step is planned

    def begin_step(self) -> None:
        """Calls the connector with the blocks that earlier steps filled. Blocks with tokens that
        are still being sampled wait for a later step.
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

    def match(self, request: Request, num_computed_tokens: int) -> ExternalMatch | None:
        match = self.connector.get_num_new_matched_tokens(request, num_computed_tokens)
        self._note(None if match is None else [match.num_tokens, match.is_async])
        return match

    def admitted(
        self, request: Request, blocks: BlockTables, num_new_tokens: int, num_external_tokens: int
    ) -> None:
        self._note_table(request, blocks)
        if request.num_computed_tokens + num_new_tokens < request.num_tokens:
            self.reserved.prefills.add(request)
        self._begin(request, num_external_tokens, is_async=False)

    def begin_load(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """Begins an asynchronous load of the last `num_external_tokens` computed tokens."""
        self._note_table(request, blocks)
        self._loading[request.key] = request
        self._begun[request.key] = self._clock(), num_external_tokens
        self.reserved.prefills.add(request)
        self._num_local[request] = request.num_computed_tokens - num_external_tokens
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._begin(request, num_external_tokens, is_async=True)

    def promote(self, request: Request) -> bool:
        if request not in self._finished_recving:
            return False
        self._finished_recving.remove(request)
        del self._loading[request.key]
        request.stop_loading()
        num_local = self._num_local.pop(request)
        request.num_external_tokens = max(0, request.num_computed_tokens - num_local)
        if request.num_computed_tokens:
            # The last known token is computed again, to sample the next token. If all tokens were
            # loaded, the loaded state is the state before the last token.
            longest = request.num_tokens - 1
            num_tokens = request.num_computed_tokens
            if self._config.holds_states:
                num_tokens = min(num_tokens, longest)
            self._kv_cache_manager.publish(request, num_tokens)
            request.num_computed_tokens = min(request.num_computed_tokens, longest)
        else:
            self._kv_cache_manager.release(request)
            request.forget_blocks()
            self._forget_table(request)
        return True

    def planned(self, plan: SchedulerOutput) -> None:
        """Appends the step's new blocks to the block tables, and adds the transfers to the plan."""
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
        prefills = self.reserved.prefills
        scheduled = prefills.intersection(plan.requests)
        prefills -= {request for request in scheduled if not request.is_prefill_chunk}

    def defer_frees(self, victim: Request, in_flight: Iterable[SchedulerOutput]) -> bool:
        are_pending = self.connector.has_pending_block_frees()
        self._note(are_pending)
        return are_pending or self._is_written(victim, in_flight)

    def defer_copies(self, copies: Sequence[BlockCopy], step: int) -> bool:
        if self._config.fences_frees:
            self.deferred_frees.add_copies(copies, step)
        return self._config.fences_frees

    def _is_written(self, request: Request, in_flight: Iterable[SchedulerOutput]) -> bool:
        """Whether steps in flight write a request's blocks, so that they must not be freed yet."""
        return self._config.fences_frees and any(request in plan.requests for plan in in_flight)

    # Called when the blocks of a request are freed

    def preempted(self, request: Request) -> None:
        if request in self._block_tables and request.key not in self._loading:
            self._offer(request)
            self._evict_wrong(request, self._steps.in_flight)
        self._forget_table(request)
        self.reserved.prefills.discard(request)

    def ended(self, request: Request, in_flight: Sequence[SchedulerOutput]) -> None:
        if request in self._block_tables and request.key not in self._loading:
            self._offer(request)
            self._evict_wrong(request, in_flight)
        blocks = self._block_tables.pop(request, None)
        if blocks is not None and not self._config.only_grows:
            self._remove_skipped_blocks(request, blocks, in_flight)
        self.reserved.prefills.discard(request)
        is_loading = request.key in self._loading and request not in self._finished_recving
        self._loading.pop(request.key, None)
        self._num_local.pop(request, None)
        self._finished_recving.discard(request)
        if blocks is None:
            blocks = tuple([] for _ in range(max(1, len(self._config.groups))))
        computed = tuple(
            table
            if group.attention_type is AttentionType.STATE_SPACE  # drafts use later blocks
            else table[: -(-request.num_computed_tokens // group.block_size)]
            for group, table in zip(self._config.all_groups, blocks, strict=True)
        )
        is_sent = self.connector.request_finished(request, computed)
        self._note(is_sent)
        if is_loading or is_sent:
            self._leaving[request.key] = request, blocks
        elif blocks[0] and self._is_written(request, in_flight):
            self.deferred_frees.add_request(request, blocks, in_flight[-1].step)
        else:
            self._kv_cache_manager.release(request, request.context)

    # Called when the output of a step has arrived

    def take_failures(
        self,
        plan: SchedulerOutput,
        results: KVTransferResults,
        in_flight: Sequence[SchedulerOutput],
        waiting: Iterable[Request],
        running: Iterable[Request],
    ) -> set[Request]:
        self.connector.update_connector_output(plan.step, results)
        self.deferred_frees.give_back(plan.step)
        recomputes = self._config.kv_load_failure_policy is KVLoadFailurePolicy.RECOMPUTE
        failed: set[Request] = set()
        recomputations = self.recomputations
        invalid = recomputations.take_orphaned(plan.step).union(results.invalid_block_ids)
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
        if len(self._config.all_groups) > 1 or not (invalid or recomputations):
            return failed
        loading = [request for request in waiting if request.key in self._loading]
        (group,), tables = self._config.all_groups, self._block_tables
        failed_loads, _ = set_back(loading, tables, group, invalid, {})
        before = {request: request.num_computed_tokens for request in running}
        failed_running, stale = set_back(
            before, tables, group, invalid, scheduled_tokens([plan, *in_flight])
        )
        if recomputes:
            for request in failed_running:
                recomputations.add(request, before.pop(request))
            failed_running |= recomputations.set_back_early(plan, in_flight, before)
            failed, failed_loads, stale = set(), set(), []
        stale += recomputations.left_behind(invalid, in_flight)
        if stale:
            self._kv_cache_manager.pending.evict(stale)
        return failed | failed_loads | failed_running

    def finished(self, results: KVTransferResults, in_flight: Sequence[SchedulerOutput]) -> None:
        for key in results.finished_recving:
            begun = self._begun.pop(key, None)
            if begun is not None and not (results.failed_recving or results.invalid_block_ids):
                began, num_tokens = begun
                self._costs.observe_load(num_tokens, self._clock() - began)
            if (request := self._loading.get(key)) is not None:
                self._finished_recving.add(request)
            else:
                self._release_leaving(key, in_flight)
        for key in results.finished_sending:
            self._release_leaving(key, in_flight)

    def forget(self) -> None:
        for request in self._loading.values():
            request.stop_loading()
        self.connector.forget()
        self.loads, self._filled = [], []
        for state in (
            self._block_tables,
            self._loading,
            self._begun,
            self._leaving,
            self._num_local,
        ):
            state.clear()
        for requests in (self._finished_recving, self.reserved.prefills):
            requests.clear()
        self.recomputations.forget()
        self.deferred_frees.forget()

    def reset_cache(self) -> None:
        self.connector.reset_cache()

    def record_answers(self) -> None:
        self._answers = []

    def take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers or [], []
        return answers

    def _note(self, answer: Answer) -> None:
        if self._answers is not None:
            self._answers.append(answer)

    def _loading_into(self, invalid: Collection[BlockId]) -> list[RequestKey]:
        return [
            key
            for key, request in self._loading.items()
            if any(not table.isdisjoint(invalid) for table in map(set, self._block_tables[request]))
        ]

    def _evict_wrong(self, request: Request, in_flight: Sequence[SchedulerOutput]) -> None:
        """Removes the hashes of blocks that a request frees without having computed them again
        after a failed load. vLLM keeps their hashes in the prefix index.
        """
        if wrong := self.recomputations.leave(request, in_flight):
            self._kv_cache_manager.pending.evict(wrong)

    def _forget_table(self, request: Request) -> None:
        self.connector.blocks_released(request)
        self._block_tables.pop(request, None)

    def _note_table(self, request: Request, blocks: BlockTables) -> None:
        self._block_tables[request] = tuple(map(list, blocks))

    def _remove_skipped_blocks(
        self, request: Request, blocks: BlockTables, in_flight: Iterable[SchedulerOutput]
    ) -> None:
        """Frees the blocks before the sliding windows of an ended request's tokens in flight and
        later tokens. Replaces them in `blocks` by the null block, before the connector gets
        `blocks`.
        """
        num_in_flight = scheduled_tokens(in_flight).get(request, 0)
        num_computed = max(0, request.num_computed_tokens - num_in_flight)
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
        if self._is_written(request, in_flight):
            self.deferred_frees.add_request(request, blocks, in_flight[-1].step)
        else:
            self._kv_cache_manager.pending.release(key, request.context)


def _leave_moved(table: list[BlockId], appended: Sequence[BlockId]) -> None:
    """Replaces blocks of `table` that are also in `appended` by the null block. They contained
    obsolete states, and are reused for later states.
    """
    for block in set(appended).intersection(table) - {NULL_BLOCK}:
        table[table.index(block)] = NULL_BLOCK
