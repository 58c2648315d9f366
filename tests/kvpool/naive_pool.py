"""A pool that is too simple to be wrong: lists that are searched from end to end.

It follows the contract's words, one item at a time, and keeps nothing twice: who holds a block is
read off the tables, what can be found off a list of (group, hash, block) in the order published.
"""

from services.kvpool.core.operations import (
    Admission,
    Admit,
    Commit,
    Grow,
    Lookup,
    Operation,
    Release,
    ResetPrefixCache,
    StopReason,
)

Answer = list[object]
Misfit = tuple[int, int, StopReason, int | None]


class NaivePool:
    def __init__(self, num_blocks: int, num_groups: int, block_size: int, caching: bool) -> None:
        self.free = list(range(1, num_blocks))
        self.published: list[tuple[int, bytes, int]] = []
        self.tables: dict[int, list[list[int]]] = {}
        self.chains: dict[int, list[bytes]] = {}
        self.num_evictions = 0
        self._groups = range(num_groups)
        self._block_size = block_size
        self._caching = caching

    def transact(  # noqa: PLR0912
        self, operations: list[Operation]
    ) -> tuple[Answer, Misfit | None]:
        answers: Answer = []
        for index, operation in enumerate(operations):
            match operation:
                case Release(requests):
                    for request in requests:
                        self._release(request)
                    answers.append(None)
                case Grow(requests, _, slots):
                    answers.append([])
                    for item, (request, num_slots) in enumerate(zip(requests, slots, strict=True)):
                        new = self._grow(request, num_slots)
                        if new is None:
                            return answers, (index, item, StopReason.NO_BLOCKS, None)
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
                        answers[-1].append(depth * self._block_size)
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
        return answers, None

    def found(self) -> set[tuple[int, bytes]]:
        return {(group, block_hash) for group, block_hash, _ in self.published}

    def depth(self, request: int, new: list[bytes], limit: int) -> int:
        return self._depth(self.chains.get(request, []) + new, limit)

    def _held(self) -> list[int]:
        return [block for tables in self.tables.values() for table in tables for block in table]

    def _release(self, request: int) -> None:
        self.chains.pop(request, None)
        for table in self.tables.get(request, []):
            blocks = list(reversed(table))
            table.clear()
            blocks = [block for block in blocks if block not in self._held()]
            hashed = [block for block in blocks if self._has_hash(block)]
            blank = [block for block in blocks if not self._has_hash(block)]
            self.free = blank + self.free + hashed
        self.tables.pop(request, None)

    def _grow(self, request: int, num_slots: int) -> list[list[int]] | None:
        lacking = [max(0, self._blocks(num_slots) - len(t)) for t in self.tables[request]]
        if sum(lacking) > len(self.free):
            return None
        new = [[self._take() for _ in range(number)] for number in lacking]
        for table, blocks in zip(self.tables[request], new, strict=True):
            table.extend(blocks)
        return new

    def _admit(self, admission: Admission) -> tuple[StopReason, int | None] | None:
        chain = self.chains.get(admission.request, []) + list(admission.new_hashes)
        depth = self._depth(chain, admission.max_hit_tokens)
        if depth * self._block_size != admission.num_hit_tokens:
            return StopReason.HIT_CHANGED, depth * self._block_size
        hits = [[self._find(g, chain[i]) for i in range(depth)] for g in self._groups]
        wanted = max(admission.num_slots, admission.num_reserve_slots)
        needed = len(self._groups) * (self._blocks(wanted) - depth)
        needed += sum(block in self.free for table in hits for block in table)
        if needed + admission.num_watermark_blocks > len(self.free):
            return StopReason.NO_BLOCKS, None
        self.free = [block for block in self.free if not any(block in table for table in hits)]
        self.tables[admission.request] = hits
        self._grow(admission.request, admission.num_slots)
        self.chains[admission.request] = chain
        self._publish(admission.request, admission.num_commit_tokens)
        return None

    def _publish(self, request: int, num_tokens: int) -> None:
        if not self._caching:
            return
        for group, table in enumerate(self.tables[request]):
            for position, block in enumerate(table):
                full = (position + 1) * self._block_size <= num_tokens
                if full and position < len(self.chains[request]) and not self._has_hash(block):
                    self.published.append((group, self.chains[request][position], block))

    def _depth(self, chain: list[bytes], limit: int) -> int:
        depth = 0
        while (
            depth < len(chain)
            and (depth + 1) * self._block_size <= limit
            and all(self._find(group, chain[depth]) is not None for group in self._groups)
        ):
            depth += 1
        return depth

    def _find(self, group: int, block_hash: bytes) -> int | None:
        for entry in self.published:
            if entry[:2] == (group, block_hash):
                return entry[2]
        return None

    def _take(self) -> int:
        block = self.free.pop(0)
        if self._has_hash(block):
            self.num_evictions += 1
            self.published = [entry for entry in self.published if entry[2] != block]
        return block

    def _has_hash(self, block: int) -> bool:
        return any(entry[2] == block for entry in self.published)

    def _blocks(self, num_slots: int) -> int:
        return (num_slots + self._block_size - 1) // self._block_size
