"""Operations that go to the pool with the next transaction, whatever that is about."""

from collections.abc import Sequence

from services.common.block_hash import BlockHash
from services.common.ids import RequestKey
from services.common.pool_operations import Commit, Operation, Release


class PendingOperations:
    """Blocks to publish and blocks to give back; publishing comes first, so that a request that
    ends leaves its last full block findable.
    """

    def __init__(self) -> None:
        self._commits: dict[RequestKey, tuple[int, list[BlockHash]]] = {}
        self._releases: list[RequestKey] = []

    def __bool__(self) -> bool:
        return bool(self._commits or self._releases)

    def commit(self, key: RequestKey, num_tokens: int, new_hashes: Sequence[BlockHash]) -> None:
        """Publishes the full blocks of a request below `num_tokens`."""
        _, earlier = self._commits.get(key, (0, []))
        self._commits[key] = num_tokens, [*earlier, *new_hashes]

    def release(self, key: RequestKey) -> None:
        """Gives back the blocks of a request."""
        self._releases.append(key)

    def pop_all(self) -> list[Operation]:
        """Removes and returns the operations. They count as done from here on: they always fit."""
        operations: list[Operation] = []
        if self._commits:
            num_tokens, new_hashes = zip(*self._commits.values(), strict=True)
            operations.append(Commit(list(self._commits), num_tokens, new_hashes))
        if self._releases:
            operations.append(Release(tuple(self._releases)))
        self._commits, self._releases = {}, []
        return operations
