"""A slow model of the KV pool for tests, too simple to be wrong.

It executes the operations one item at a time and stores nothing twice. It finds the owners of a
block in the block tables, and prefix hits in a list of (group, hash, block) in the order of
publication. The blocks that a request needs follow from the tokens that the request's next query
sees.
"""

from collections.abc import Sequence
from itertools import takewhile

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import (
    Admission,
    Admit,
    BeginStep,
    Commit,
    EvictBlocks,
    Grow,
    Lookup,
    Operation,
    Release,
    RemoveSkippedBlocks,
    ResetPrefixCache,
    StopReason,
)

Answer = list[object]
Misfit = tuple[int, int, StopReason, int, int]


NULL = 0


class NaivePool:
    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVCacheGroup],
        caching: bool,
        drop_last: bool = False,
        longest: int = 10**6,
        in_flight: int = 10**6,
    ) -> None:
        self.free = list(range(1, num_blocks))
        self.published: list[tuple[int, bytes, int]] = []
        self.tables: dict[int, list[list[int]]] = {}
        self.chains: dict[int, list[bytes]] = {}
        self.num_evictions = 0
        # Blocks whose hash EvictBlocks removed. They get no hash until they are allocated again.
        self.barred: set[int] = set()
        # The (group, hash) of each recurrent state that was published since the last step began.
        self.fresh: set[tuple[int, bytes]] = set()
        self._specs = groups
        self._groups = range(len(groups))
        self._block_size = groups[0].block_size
        self._caching = caching
        self._drop_last = drop_last
        self._longest, self._in_flight = longest, in_flight

    def transact(  # noqa: PLR0912
        self, operations: list[Operation]
    ) -> tuple[Answer, Misfit | None]:
        answers: Answer = []
        for index, operation in enumerate(operations):
            match operation:
                case BeginStep():
                    self.fresh = set()
                    answers.append(None)
                case Release(requests):
                    for request in requests:
                        self._release(request)
                    answers.append(None)
                case RemoveSkippedBlocks(requests, computed):
                    for request, num_tokens in zip(requests, computed, strict=True):
                        if request in self.tables:
                            self._settle(request, num_tokens)
                    answers.append(None)
                case Grow(requests, computed, slots):
                    answers.append([])
                    for item, request in enumerate(requests):
                        self._settle(request, computed[item])
                        new = self._grow(request, slots[item])
                        if new is None:
                            return answers, (index, item, StopReason.NO_BLOCKS, 0, 0)
                        answers[-1].append(new)
                case Commit(requests, tokens, hashes):
                    for request, num_tokens, new in zip(requests, tokens, hashes, strict=True):
                        self.chains[request] += new
                        self._publish(request, num_tokens)
                    answers.append(None)
                case Lookup(requests, limits, hashes):
                    answers.append([])
                    for request, limit, new in zip(requests, limits, hashes, strict=True):
                        self.chains[request] = self.chains.get(request, []) + list(new)
                        depth = self._depth(self.chains[request], limit)
                        boundary = self.boundary(self.chains[request], limit)
                        answers[-1].append((depth * self._block_size, boundary))
                case Admit(admissions):
                    answers.append([])
                    for item, admission in enumerate(admissions):
                        stop = self._admit(admission)
                        if stop is not None:
                            return answers, (index, item, *stop)
                        answers[-1].append([list(t) for t in self.tables[admission.request]])
                case ResetPrefixCache():
                    answers.append(not self._held())
                    if not self._held():
                        self.published = []
                case EvictBlocks(blocks):
                    self._evict(list(dict.fromkeys(blocks)))
                    answers.append(None)
        return answers, None

    def found(self) -> set[tuple[int, bytes]]:
        return {(group, block_hash) for group, block_hash, _ in self.published}

    def depth(self, request: int, new: list[bytes], limit: int) -> int:
        return self._depth(self.chains.get(request, []) + new, limit)

    def common(self) -> list[int]:
        """The number of leading blocks that all requests share. 0 for groups without full
        attention.
        """
        if not self._caching or not self.tables:
            return [0 for _ in self._groups]
        return [self._common(group) for group in self._groups]

    def _common(self, group: int) -> int:
        number = 0
        if self._specs[group].attention_type is AttentionType.FULL:
            columns = zip(*(tables[group] for tables in self.tables.values()), strict=False)
            for blocks in columns:
                if len(set(blocks)) > 1:
                    break
                number += 1
        return number

    def needs(self, group: int, position: int, num_tokens: int) -> bool:
        """Whether block `position` contains a token that the query at `num_tokens` sees."""
        spec = self._specs[group]
        match spec.attention_type:
            case AttentionType.FULL:
                seen = range(num_tokens)
            case AttentionType.SLIDING_WINDOW:
                seen = range(max(0, num_tokens - spec.window + 1), num_tokens)
            case AttentionType.CHUNKED_LOCAL:
                chunk = num_tokens // spec.window
                seen = range(chunk * spec.window, num_tokens)
            case AttentionType.STATE_SPACE:
                seen = range(max(0, num_tokens - 1), num_tokens)
        block = range(position * self._block_size, (position + 1) * self._block_size)
        return any(token in seen for token in block)

    def _num_unseen(self, group: int, num_tokens: int) -> int:
        """The number of leading blocks that the query at position `num_tokens` does not see."""
        positions = range(num_tokens // self._block_size)
        unseen = takewhile(lambda i: not self.needs(group, i, num_tokens), positions)
        return sum(1 for _ in unseen)

    def _is_stateful(self, group: int) -> bool:
        return self._specs[group].attention_type is AttentionType.STATE_SPACE

    def _held(self) -> list[int]:
        return [
            block
            for tables in self.tables.values()
            for table in tables
            for block in table
            if block != NULL
        ]

    def _release(self, request: int) -> None:
        self.chains.pop(request, None)
        for table in self.tables.get(request, []):
            self._give_back(table, range(len(table)))
        self.tables.pop(request, None)

    def _evict(self, blocks: Sequence[int]) -> None:
        hashed = [block for block in blocks if self._has_hash(block)]
        self.barred |= set(hashed)
        free = [block for block in hashed if block in self.free]
        self.free = free[::-1] + [block for block in self.free if block not in free]
        self.published = [entry for entry in self.published if entry[2] not in blocks]

    def _give_back(self, table: list[int], positions: Sequence[int]) -> None:
        blocks = [table[position] for position in reversed(positions) if table[position] != NULL]
        for position in positions:
            table[position] = NULL
        blocks = [block for block in blocks if block not in self._held()]
        hashed = [block for block in blocks if self._has_hash(block)]
        blank = [block for block in blocks if not self._has_hash(block)]
        self.free = blank + self.free + hashed

    def _settle(self, request: int, num_tokens: int) -> None:
        for group, table in enumerate(self.tables[request]):
            # Positions of blocks that neither the query nor a later one sees.
            unseen = [
                position
                for position in range(min(len(table), num_tokens // self._block_size))
                if not self.needs(group, position, num_tokens)
            ]
            self._give_back(table, unseen)

    def _lacking(self, group: int, num_entries: int, num_slots: int) -> int:
        entries = max(0, self._blocks(num_slots) - num_entries)
        return min(entries, 1) if self._is_stateful(group) else entries

    def _grow(self, request: int, num_slots: int) -> list[list[int]] | None:
        tables = self.tables[request]
        lacking = [self._lacking(g, len(table), num_slots) for g, table in enumerate(tables)]
        if sum(lacking) > len(self.free):
            return None
        new = []
        for table, number in zip(tables, lacking, strict=True):
            passed = max(0, self._blocks(num_slots) - len(table)) - number
            new.append([NULL] * passed + [self._take() for _ in range(number)])
        for table, blocks in zip(tables, new, strict=True):
            table.extend(blocks)
        return new

    def _counted(self, group: int, num_entries: int, num_slots: int) -> int:
        """The number of free blocks that an admission requires for its whole sequence, beyond the
        `num_entries` blocks of its table. With a window or chunks, all these blocks together cover
        at most one window or chunk and the tokens of the steps in flight.
        """
        spec = self._specs[group]
        match spec.attention_type:
            case AttentionType.SLIDING_WINDOW:
                most = self._blocks(min(spec.window - 1 + self._in_flight, self._longest)) + 1
            case AttentionType.CHUNKED_LOCAL:
                most = self._blocks(min(spec.window + self._in_flight, self._longest))
            case _:
                return self._lacking(group, num_entries, num_slots)
        return max(0, min(self._blocks(num_slots), most) - num_entries)

    def _continue(self, admission: Admission) -> tuple[StopReason, int, int] | None:
        """Admits a request that already has blocks."""
        request, spare = admission.request, admission.num_watermark_blocks
        held = [len(table) for table in self.tables[request]]
        later = [self._counted(g, n, admission.num_reserve_slots) for g, n in enumerate(held)]
        if admission.num_reserve_slots and sum(later) + spare > len(self.free):
            return StopReason.NO_BLOCKS, 0, 0
        self._settle(request, admission.num_hit_tokens)
        now = [self._lacking(g, n, admission.num_slots) for g, n in enumerate(held)]
        if sum(now) + spare + admission.num_blocks_kept_free > len(self.free):
            return StopReason.NO_BLOCKS, 0, 0
        self._grow(request, admission.num_slots)
        self.chains[request] += admission.new_hashes
        self._publish(request, admission.num_commit_tokens)
        return None

    def _admit(self, admission: Admission) -> tuple[StopReason, int, int] | None:
        if admission.holds_blocks:
            return self._continue(admission)
        chain = self.chains.get(admission.request, []) + list(admission.new_hashes)
        depth = self._depth(chain, admission.max_hit_tokens)
        now = depth * self._block_size, self.boundary(chain, admission.max_hit_tokens)
        if now != (admission.num_hit_tokens, admission.shared_prefix_boundary):
            return StopReason.HIT_CHANGED, *now
        end = admission.num_hit_tokens + admission.num_external_tokens
        hits = [
            [
                self._find(g, chain[i]) if i < depth and self.needs(g, i, end) else NULL
                for i in range(max(depth, self._num_unseen(g, end)))
            ]
            for g in self._groups
        ]
        for group in self._groups:
            if depth and self._is_stateful(group) and (group, chain[depth - 1]) in self.fresh:
                return StopReason.NO_BLOCKS, 0, 0
        now = [self._lacking(g, len(hits[g]), admission.num_slots) for g in self._groups]
        later = [self._counted(g, len(hits[g]), admission.num_reserve_slots) for g in self._groups]
        needed = max(sum(now) + admission.num_blocks_kept_free, sum(later))
        needed += sum(block in self.free for table in hits for block in table)
        if needed + admission.num_watermark_blocks > len(self.free):
            without = max(sum(now), sum(later)) + admission.num_watermark_blocks
            without += sum(block in self.free for table in hits for block in table)
            fits = without <= len(self.free)
            return (StopReason.KEPT_FREE if fits else StopReason.NO_BLOCKS), 0, 0
        self.free = [block for block in self.free if not any(block in table for table in hits)]
        self.tables[admission.request] = hits
        self._grow(admission.request, end)
        self._grow(admission.request, admission.num_slots)
        self.chains[admission.request] = chain
        self._publish(admission.request, admission.num_commit_tokens)
        return None

    def _publish(self, request: int, num_tokens: int) -> None:
        for group in self._groups:
            if not self._caching:
                return
            for position, block in enumerate(self.tables[request][group]):
                full = (position + 1) * self._block_size <= num_tokens
                known = position < len(self.chains[request])
                barred = block in {NULL, *self.barred}
                if full and known and not barred and not self._has_hash(block):
                    self.published.append((group, self.chains[request][position], block))
                    if self._is_stateful(group):
                        self.fresh.add((group, self.chains[request][position]))

    def boundary(self, chain: list[bytes], limit: int) -> int:
        """The hit length in tokens that the groups with full attention alone have, or the groups
        like the first one if none has full attention. It is 0 if all groups together have as long a
        hit.
        """
        kinds = [spec for spec in self._specs if spec.attention_type is AttentionType.FULL]
        first = [*kinds, *self._specs][0]
        groups = [group for group in self._groups if self._specs[group] == first]
        alone = self._longest_hit(chain, limit, groups)
        return alone * self._block_size if alone > self._depth(chain, limit) else 0

    def _depth(self, chain: list[bytes], limit: int) -> int:
        return self._longest_hit(chain, limit, list(self._groups))

    def _longest_hit(self, chain: list[bytes], limit: int, groups: list[int]) -> int:
        """The longest hit, in blocks, that all `groups` have. Tries every length."""
        longest = min(len(chain), limit // self._block_size)
        looked_at = chain[:longest] if len(self._groups) == 1 else chain[: longest + 1]
        return max(
            (d for d in range(1, longest + 1) if self._is_hit(looked_at, d, groups)), default=0
        )

    def _is_hit(self, chain: list[bytes], depth: int, groups: list[int]) -> bool:
        if not self._caching:
            return False
        for group in groups:
            needed = {i for i in range(depth) if self.needs(group, i, depth * self._block_size)}
            if self._drop_last and not self._is_stateful(group):
                needed.add(depth)
            if any(i >= len(chain) or self._find(group, chain[i]) is None for i in needed):
                return False
        return True

    def _find(self, group: int, block_hash: bytes) -> int | None:
        for entry in self.published:
            if entry[:2] == (group, block_hash):
                return entry[2]
        return None

    def _take(self) -> int:
        block = self.free.pop(0)
        self.barred.discard(block)
        if self._has_hash(block):
            self.num_evictions += 1
            self.published = [entry for entry in self.published if entry[2] != block]
        return block

    def _has_hash(self, block: int) -> bool:
        return any(entry[2] == block for entry in self.published)

    def _blocks(self, num_slots: int) -> int:
        return (num_slots + self._block_size - 1) // self._block_size
