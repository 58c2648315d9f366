"""Connector methods that do nothing, for a connector without storage, as in a replay."""

from services.common.pool.operations import BlockTables
from services.scheduler.core.request import Request
from services.scheduler.core.transfers.kv_connector import KVTransferResults


class StorelessConnector:
    """A part of KVConnector. Subclasses add the methods that return answers to the scheduler."""

    __slots__ = ()

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        """Does nothing: there is no storage."""

    def blocks_released(self, request: Request) -> None:
        """Does nothing, because no state is kept for a request."""

    def build_connector_meta(self, step: int) -> None:
        """Returns None: workers get no message."""

    def update_connector_output(self, step: int, results: KVTransferResults) -> None:
        """Does nothing."""

    def reset_cache(self) -> None:
        """Does nothing: there is no storage."""

    def forget(self) -> None:
        """Does nothing: there is no state."""
