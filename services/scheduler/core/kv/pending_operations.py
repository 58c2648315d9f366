"""Pool operations that wait for the next transaction. They cannot fail: none needs free blocks."""

from collections.abc import Sequence

from services.common.pool import operations as ops
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId, ContextId, RequestKey


class PendingOperations:
    """Collects pool operations, and merges operations of the same kind. Publishes blocks (caches
    them for prefix hits) before it frees blocks, so that later requests can hit the last full block
    of an ended request.
    """

    def __init__(self) -> None:
        self.commits: dict[RequestKey, tuple[int, list[BlockHash]]] = {}
        """Maps a request to its number of stored tokens, and the hashes of its new full blocks."""
        self.evictions: list[BlockId] = []
        """Blocks whose hashes the pool must remove."""
        self._releases: dict[RequestKey, ContextId | None] = {}
        """Maps released requests to the context (of an agent) as which their blocks stay cached."""
        self._early_releases: list[ops.Operation] = []
        """Operations that must free blocks before the operation of `_releases`."""

    def __bool__(self) -> bool:
        return bool(self.commits or self._releases or self.evictions or self._early_releases)

    def commit(self, key: RequestKey, num_tokens: int, new_hashes: list[BlockHash]) -> None:
        """Publishes a request's full blocks. `new_hashes` follow the hashes of earlier commits."""
        _, earlier = self.commits.get(key, (0, []))
        self.commits[key] = num_tokens, earlier + new_hashes

    def release(self, key: RequestKey, context: ContextId | None = None) -> None:
        self._releases[key] = context

    def remove_skipped_blocks(self, key: RequestKey, num_computed_tokens: int) -> None:
        """Frees the blocks that no token from position `num_computed_tokens` on attends to."""
        self.give_back_in_order(ops.RemoveSkippedBlocks([key], [num_computed_tokens]))

    def give_back_in_order(self, operation: ops.Operation) -> None:
        """Adds an operation that frees blocks after earlier releases and before later releases."""
        if self._releases:
            self._early_releases.append(self._release())
            self._releases = {}
        self._early_releases.append(operation)

    def evict(self, blocks: Sequence[BlockId]) -> None:
        """Removes the hashes of these blocks, so that they cannot be hit."""
        self.evictions += blocks

    def take(self) -> list[ops.Operation]:
        """Removes and returns all operations, in the order in which the pool must execute them."""
        operations: list[ops.Operation] = []
        if self.commits:
            num_tokens, new_hashes = zip(*self.commits.values(), strict=True)
            operations.append(ops.Commit(list(self.commits), num_tokens, new_hashes))
        if self.evictions:
            operations.append(ops.EvictBlocks(tuple(self.evictions)))
        operations += self._early_releases
        if self._releases:
            operations.append(self._release())
        self.clear()
        return operations

    def _release(self) -> ops.Release:
        contexts: tuple[ContextId, ...] = ()
        if any(self._releases.values()):
            contexts = tuple(context or ContextId(0) for context in self._releases.values())
        return ops.Release(tuple(self._releases), contexts=contexts)

    def clear(self) -> None:
        self.commits, self.evictions = {}, []
        self._releases, self._early_releases = {}, []
