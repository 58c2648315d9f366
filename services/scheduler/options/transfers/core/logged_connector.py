"""A connector that returns the answers recorded in a step log."""

from services.common.pool.operations import BlockTables
from services.scheduler.core.planning.transfers import LoggedAnswers
from services.scheduler.core.request import Request
from services.scheduler.options.transfers.core.kv_connector import ExternalMatch, KVConnector


class LoggedConnector(KVConnector):
    """Returns logged answers in the order of calls. A replay has no storage, so the methods without
    an answer do nothing.
    """

    def __init__(self, answers: LoggedAnswers) -> None:
        self._answers = answers

    def get_num_new_matched_tokens(
        self,
        request: Request,  # noqa: ARG002 - the log has the answers in order
        num_computed_tokens: int,  # noqa: ARG002
    ) -> ExternalMatch | None:
        match = self._answers.match()
        return None if match is None else ExternalMatch(*match)

    def request_finished(
        self,
        request: Request,  # noqa: ARG002
        blocks: BlockTables,  # noqa: ARG002
    ) -> bool:
        return self._answers.flag()

    def has_pending_block_frees(self) -> bool:
        return self._answers.flag()
