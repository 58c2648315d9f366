"""The methods of a connector that change nothing where nothing is stored, as in a replay."""

from services.common.pool.operations import BlockTables
from services.scheduler.core.request import Request
from services.scheduler.core.transfers.kv_connector import KVTransferResults


class StorelessConnector:
    """A part of KVConnector; subclasses have the methods that answer the scheduler."""

    __slots__ = ()

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        """Nothing is stored."""

    def blocks_released(self, request: Request) -> None:
        """Nothing is kept of it."""

    def build_connector_meta(self, step: int) -> None:
        """No workers get a message."""

    def update_connector_output(self, step: int, results: KVTransferResults) -> None:
        """Nothing depends on it."""

    def reset_cache(self) -> None:
        """Nothing is stored."""

    def forget(self) -> None:
        """Nothing is kept."""
