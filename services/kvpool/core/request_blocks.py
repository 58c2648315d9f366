"""Allocates and frees the blocks of requests, and publishes them (in the prefix index)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from services.common.pool import operations as ops
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId, ContextId, RequestKey
from services.common.pool.kv_cache_groups import AttentionType
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.coordinator import Coordinator, PrefixHit
from services.kvpool.core.group_manager import Chain, Filling, GroupHit, Need, Tables
from services.kvpool.core.pool_config import PoolConfig


@dataclass(frozen=True, slots=True)
class _KnownHit:
    """The prefix hit that a look-up found. It is valid until the prefix index changes."""

    hit: PrefixHit
    max_hit_tokens: int
    num_index_changes: int


class RequestBlocks:
    """Block tables and block hashes of a pool's requests. Executes validated operations."""

    def __init__(self, config: PoolConfig, blocks: BlockPool) -> None:
        self.coordinator = Coordinator(config, blocks)
        self.tables: dict[RequestKey, Tables] = {}
        """Block tables of the requests that have blocks."""
        self.chains: dict[RequestKey, Chain] = {}
        """Hashes of requests that have blocks, or whose prefix hits were looked up."""
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._hits: dict[RequestKey, _KnownHit] = {}
        """The last look-up result of each request that has not been admitted since."""
        self._config = config
        self._blocks = blocks
        self._block_size = config.groups[0].block_size
        self._groups = self.coordinator.groups
        self._holds_states = any(
            spec.attention_type is AttentionType.STATE_SPACE for spec in config.groups
        )

    def release(self, release: ops.Release) -> None:
        """Frees the blocks of requests and deletes their hashes."""
        contexts = release.contexts or repeat(0)
        for request, context in zip(release.requests, contexts, strict=False):
            self.chains.pop(request, None)
            self._hits.pop(request, None)
            tables = self.tables.pop(request, None)
            if tables is None:
                continue
            if context:
                self._retain(ContextId(context), tables)
            if release.as_one_list:
                self._blocks.free_as_one_list(
                    (group, block)
                    for group in reversed(range(len(tables)))
                    for block in reversed(tables[group].blocks)
                )
                continue
            for group, table in zip(self._groups, tables, strict=True):
                group.free(table)

    def _retain(self, context: ContextId, tables: Tables) -> None:
        """Retains the published blocks of an ended request as a context, which is reused after all
        other free blocks. If no group frees blocks early, the context is reused from its end, so
        that its beginning can still be hit. Otherwise a hit needs all blocks of the context.
        """
        if self.coordinator.is_simple:
            published = (table.blocks[: table.num_published] for table in tables)
            rows = zip(*published, strict=True)
            self._blocks.retain(context, [block for row in rows for block in row])
        else:
            left = (
                block
                for group, table in enumerate(tables)
                for block in table.blocks
                if block and self._blocks.indexes[group].hash_of(block) is not None
            )
            self._blocks.retain(context, left, is_whole=True)

    def arrange_contexts(self, operation: ops.RankContexts | ops.DropContexts) -> None:
        """Sets the order in which the blocks of contexts are reused, or ends some contexts."""
        contexts = self._blocks.contexts
        if contexts is None:
            return
        if isinstance(operation, ops.RankContexts):
            contexts.rank(operation.contexts)
        else:
            contexts.drop(operation.contexts)

    def remove_skipped(self, removal: ops.RemoveSkippedBlocks) -> None:
        """Frees the blocks that no later query of the requests can see."""
        for request, num_computed_tokens in zip(
            removal.requests, removal.num_computed_tokens, strict=True
        ):
            if (tables := self.tables.get(request)) is not None:
                self.coordinator.remove_skipped_blocks(tables, num_computed_tokens)

    def grow(self, index: int, grow: ops.Grow) -> tuple[ops.GrowResult, ops.Stop | None]:
        """Extends the tables of admitted requests, up to the first request for which blocks are
        missing. `index` is the position of the operation in its transaction.
        """
        if not self.coordinator.is_simple:
            return self._grow_one_by_one(index, grow)
        # All tables of a request have equal length here, and growing frees no block. So the blocks
        # of all requests can be allocated at once.
        size, num_groups = self._block_size, len(self._groups)
        num_left = self._blocks.num_free_blocks // num_groups
        growing: list[tuple[Tables, int]] = []
        stop = None
        for request, num_slots in zip(grow.requests, grow.num_slots, strict=True):
            tables = self.tables[request]
            missing = max(0, -(-num_slots // size) - len(tables[0].blocks))
            num_left -= missing
            if num_left < 0:
                stop = ops.Stop(index, len(growing), ops.StopReason.NO_BLOCKS)
                break
            growing.append((tables, missing))
        num_missing = sum([missing for _, missing in growing])
        blocks = self._blocks.get_new_blocks(num_missing * num_groups)
        return ops.GrowResult(self._distribute(blocks, growing)), stop

    def _distribute(
        self, blocks: list[BlockId], growing: Sequence[tuple[Tables, int]]
    ) -> tuple[ops.GroupBlocks, ...]:
        """Distributes `blocks` in order. Each table receives as many blocks as it needs."""
        groups, end = self._no_blocks(), 0
        for tables, missing in growing:
            for index, table in enumerate(tables):
                begin, end = end, end + missing
                entries = blocks[begin:end]
                table.blocks += entries
                groups[index].num_blocks.append(missing)
                groups[index].block_ids.extend(entries)
        return groups

    def _grow_one_by_one(
        self, index: int, grow: ops.Grow
    ) -> tuple[ops.GrowResult, ops.Stop | None]:
        result = ops.GrowResult(self._no_blocks())
        needs = map(Need, grow.num_slots, grow.num_tokens or grow.num_slots)
        for item, (request, num_computed_tokens, need) in enumerate(
            zip(grow.requests, grow.num_computed_tokens, needs, strict=True)
        ):
            tables = self.tables[request]
            self.coordinator.remove_skipped_blocks(tables, num_computed_tokens)
            if self._num_missing(tables, need) > self._blocks.num_free_blocks:
                return result, ops.Stop(index, item, ops.StopReason.NO_BLOCKS)
            for group, table, granted in zip(self._groups, tables, result.groups, strict=True):
                _append(granted, group.extend(table, need))
        return result, None

    def look_up(self, lookup: ops.Lookup) -> ops.LookupResult:
        result, num_changes = ops.LookupResult([], []), self._blocks.num_index_changes
        for request, max_hit_tokens, new_hashes in zip(
            lookup.requests, lookup.max_hit_tokens, lookup.new_hashes, strict=True
        ):
            chain = self._chain(request)
            if self._config.enable_prefix_caching:
                chain.hashes.extend(new_hashes)
            hit = self._find_cache_hit(chain.hashes, max_hit_tokens)
            self._hits[request] = _KnownHit(hit, max_hit_tokens, num_changes)
            result.num_hit_tokens.append(hit.num_tokens)
            result.shared_prefix_boundaries.append(hit.shared_prefix_boundary)
            if lookup.with_divergent_hits:
                divergent = self._find_cache_hit(chain.hashes, max_hit_tokens, diverges=True)
                result.num_divergent_hit_tokens.append(divergent.num_tokens)
        return result

    def admit(self, index: int, admit: ops.Admit) -> tuple[ops.AdmitResult, ops.Stop | None]:
        """Admits requests with their hit blocks and with new blocks. Stops at the first request for
        which blocks are missing, or whose prefix hit has changed since its look-up.
        """
        result = ops.AdmitResult(self._no_blocks())
        num_taken = 0
        for item, admission in enumerate(admit.admissions):
            if admission.holds_blocks:
                continued = self._continue(admission)
                if continued is None:
                    return result, ops.Stop(index, item, ops.StopReason.NO_BLOCKS)
                for granted, table in zip(result.groups, continued, strict=True):
                    _append(granted, table.blocks)
                continue
            hit = self._hit(admission)
            now = hit.num_tokens, hit.shared_prefix_boundary
            if _has_changed(hit, admission):
                return result, ops.Stop(index, item, ops.StopReason.HIT_CHANGED, *now)
            num_stored = _num_stored(admission)
            hits = [GroupHit(blocks, hit.num_tokens, num_stored) for blocks in hit.tables]
            num_kept_free = admission.num_blocks_kept_free
            if not self._fits(admission, hits, num_kept_free):
                fits_without = num_kept_free and self._fits(admission, hits, 0)
                reason = ops.StopReason.KEPT_FREE if fits_without else ops.StopReason.NO_BLOCKS
                return result, ops.Stop(index, item, reason)
            num_retained = self._num_retained_needed(admission, hits)
            limit = admission.num_retained_blocks
            if limit is not None and num_taken + max(0, num_retained + num_kept_free) > limit:
                return result, ops.Stop(index, item, ops.StopReason.RETAINED)
            num_taken += max(0, num_retained)
            tables = self._admit_one(admission, hits)
            for granted, table in zip(result.groups, tables, strict=True):
                _append(granted, table.blocks)
        return result, None

    def _hit(self, admission: ops.Admission) -> PrefixHit:
        """Returns the hit of a request. Repeats its look-up only if the index has changed."""
        limit, known = admission.max_hit_tokens, self._hits.pop(admission.request, None)
        if not (admission.new_hashes or admission.diverges) and known is not None:
            is_current = known.num_index_changes == self._blocks.num_index_changes
            if is_current and known.max_hit_tokens == limit:
                return known.hit
        chain = self.chains.get(admission.request)
        hashes = [*(chain.hashes if chain else ()), *admission.new_hashes]
        return self._find_cache_hit(hashes, limit, diverges=admission.diverges)

    def _fits(self, admission: ops.Admission, hits: Sequence[GroupHit], num_kept_free: int) -> bool:
        """Whether the request can read all hit blocks in this step, and enough blocks are free.
        `num_kept_free` blocks must stay free. Free hit blocks do not count as free, because they
        must not be allocated. To save time, they are counted only if their number decides.
        """
        need = _need(admission)
        now = reserved = admission.num_watermark_blocks
        for group, hit in zip(self._groups, hits, strict=True):
            if not group.is_stored(hit.blocks):
                return False
            now += group.num_missing_behind(hit, need)
            reserved += group.num_reserved_behind(hit, admission.num_reserve_slots)
        left = self._blocks.num_free_blocks - max(now + num_kept_free, reserved)
        return left >= sum(len(hit.blocks) for hit in hits) or left >= sum(
            self._blocks.count_free(group.counted_hits(hit))
            for group, hit in zip(self._groups, hits, strict=True)
        )

    def _num_retained_needed(self, admission: ops.Admission, hits: Sequence[GroupHit]) -> int:
        """The number of blocks of retained contexts that an admission must reuse, because the other
        free blocks do not suffice for its slots. Negative if other free blocks are left over.
        """
        contexts = self._blocks.contexts
        if contexts is None:
            return -self._blocks.num_free_blocks
        need, num_new, num_others = _need(admission), 0, len(contexts) - contexts.num_retained
        for group, hit in zip(self._groups, hits, strict=True):
            num_reserved = group.num_reserved_behind(hit, admission.num_reserve_slots)
            num_new += max(group.num_missing_behind(hit, need), num_reserved)
            blocks = group.counted_hits(hit)
            num_others -= self._blocks.count_free(blocks) - contexts.count_retained(blocks)
        return num_new - num_others

    def _admit_one(self, admission: ops.Admission, hits: Sequence[GroupHit]) -> Tables:
        tables = self.coordinator.admit(hits, _need(admission), admission.num_computed_tokens)
        self.tables[admission.request] = tables
        self._publish_admitted(admission)
        if self._config.enable_prefix_caching and not admission.resumed:
            self.num_query_tokens += admission.max_hit_tokens
            self.num_hit_tokens += admission.num_hit_tokens
        return tables

    def _continue(self, admission: ops.Admission) -> Tables | None:
        """Extends and publishes the tables of a waiting request that already has blocks. Returns
        None if blocks are missing. Even then blocks outside the request's window may be freed.
        """
        tables, need = self.tables[admission.request], _need(admission)
        num_reserved = sum(
            group.num_reserved(table, admission.num_reserve_slots)
            for group, table in zip(self._groups, tables, strict=True)
        )
        num_left = self._blocks.num_free_blocks - admission.num_watermark_blocks
        if admission.num_reserve_slots and num_reserved > num_left:
            return None
        self.coordinator.remove_skipped_blocks(tables, _num_stored(admission))
        num_left = self._blocks.num_free_blocks - admission.num_watermark_blocks
        num_missing = self._num_missing(tables, need)
        if num_missing + admission.num_blocks_kept_free > num_left:
            return None
        self.coordinator.extend(tables, need)
        self._publish_admitted(admission)
        return tables

    def _publish_admitted(self, admission: ops.Admission) -> None:
        chain = self._chain(admission.request)
        chain.num_prompt_tokens = admission.num_prompt_tokens
        chain.shared_prefix_boundary = admission.shared_prefix_boundary
        self.publish([admission.request], [admission.num_commit_tokens], [admission.new_hashes])

    def _num_missing(self, tables: Tables, need: Need) -> int:
        return sum(
            group.num_missing(table, need)
            for group, table in zip(self._groups, tables, strict=True)
        )

    def evict(self, evict: ops.EvictBlocks) -> None:
        evicted = self._blocks.evict(evict.block_ids)
        for tables in self.tables.values() if evicted else ():
            for table in tables:
                positions = [
                    position
                    for position, block in enumerate(table.blocks[: table.num_published])
                    if block in evicted
                ]
                table.evicted = table.evicted.union(positions)

    def publish(
        self,
        requests: Sequence[RequestKey],
        num_tokens: Sequence[int],
        new_hashes: Sequence[Sequence[BlockHash]],
    ) -> None:
        """Adds new hashes to admitted requests and publishes their full blocks."""
        if not self._config.enable_prefix_caching:
            return
        fillings: list[Filling] = []
        for request, end, hashes in zip(requests, num_tokens, new_hashes, strict=True):
            chain = self.chains[request]
            chain.hashes += hashes
            fillings.append((self.tables[request], chain, end))
        for group in self._groups:
            group.publish(fillings)

    def _chain(self, request: RequestKey) -> Chain:
        chain = self.chains.get(request)
        if chain is None:
            chain = self.chains[request] = Chain()
        return chain

    def _find_cache_hit(
        self, chain: Sequence[BlockHash], max_hit_tokens: int, *, diverges: bool = False
    ) -> PrefixHit:
        if not self._config.enable_prefix_caching:
            return PrefixHit([[] for _ in self._groups], 0)
        if diverges and self._holds_states:
            return self.coordinator.find_divergent_cache_hit(chain, max_hit_tokens)
        return self.coordinator.find_longest_cache_hit(chain, max_hit_tokens)

    def _no_blocks(self) -> tuple[ops.GroupBlocks, ...]:
        return tuple([ops.GroupBlocks([], []) for _ in self._groups])


def _has_changed(hit: PrefixHit, admission: ops.Admission) -> bool:
    if hit.num_tokens != admission.num_hit_tokens:
        return True
    boundary = admission.shared_prefix_boundary
    return not admission.diverges and hit.shared_prefix_boundary != boundary


def _need(admission: ops.Admission) -> Need:
    num_slots, num_tokens = admission.num_slots, admission.num_tokens
    return Need(num_slots, num_slots if num_tokens is None else num_tokens)


def _num_stored(admission: ops.Admission) -> int:
    """A number of tokens. Blocks that no query after these tokens can see are freed."""
    num_stored = admission.num_stored_tokens
    return admission.num_computed_tokens if num_stored is None else num_stored


def _append(granted: ops.GroupBlocks, blocks: Sequence[BlockId]) -> None:
    granted.num_blocks.append(len(blocks))
    granted.block_ids.extend(blocks)
