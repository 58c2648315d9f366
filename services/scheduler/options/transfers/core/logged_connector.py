"""A connector that returns the answers recorded in a step log."""

from services.common.pool.operations import BlockTables
from services.scheduler.core.kv_transfer import KVTransferResults
from services.scheduler.core.planning.transfers import LoggedAnswers
from services.scheduler.core.request import Request
from services.scheduler.options.transfers.core.kv_connector import ExternalMatch


class StorelessConnector:
    """A part of KVConnector: the methods that do nothing without storage, as in a replay.
    Subclasses add the methods that return answers to the scheduler.
    """

    __slots__ = ()

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        """Does nothing, because there is no storage."""

    def blocks_released(self, request: Request) -> None:
        """Does nothing, because no state is kept for a request."""

    def build_connector_meta(self, step: int) -> None:
        """Returns None, because no message is sent to workers."""

    def update_connector_output(self, step: int, results: KVTransferResults) -> None:
        """Does nothing."""

    def reset_cache(self) -> None:
        """Does nothing, because there is no storage."""

    def forget(self) -> None:
        """Does nothing, because there is no state."""


class LoggedConnector(StorelessConnector):
    """Returns logged answers in the order of calls."""

    def __init__(self, answers: LoggedAnswers) -> None:
        self._answers = answers

    def get_num_new_matched_tokens(
        self,
        request: Request,  # noqa: ARG002 - the log has the answers in order
        num_computed_tokens: int,  # noqa: ARG002
    ) -> ExternalMatch | None:
        match = self._answers.match()
        return None if match is None else ExternalMatch(*match)

    def update_state_after_alloc(
        self, request: Request, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        """Does nothing, because a replay loads no blocks."""

    def request_finished(
        self,
        request: Request,  # noqa: ARG002
        blocks: BlockTables,  # noqa: ARG002
    ) -> bool:
        return self._answers.flag()

    def has_pending_block_frees(self) -> bool:
        return self._answers.flag()
