"""Records a connector's answers as JSON for the step log, because scheduling depends on them."""

from services.common.pool.operations import BlockTables
from services.scheduler.core.request import Request
from services.scheduler.options.transfers.core.kv_connector import (
    ExternalMatch,
    KVConnector,
    KVConnectorMetadata,
    KVTransferResults,
)

Answer = None | bool | list[int | bool]
"""The JSON form of an answer.

`[tokens, is_async]` is the number of tokens that can be loaded, and None means that the number is
not known yet. True and False answer whether blocks of an ended request are still read, or whether
transfers will free blocks.
"""


class RecordedConnector:
    """Wraps a connector, and records its answers in the order of the calls."""

    def __init__(self, connector: KVConnector) -> None:
        self._connector = connector
        self._answers: list[Answer] = []

    def take_answers(self) -> list[Answer]:
        """Returns the answers since the last call of this method."""
        answers, self._answers = self._answers, []
        return answers

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        match = self._connector.get_num_new_matched_tokens(request, num_computed_tokens)
        self._answers.append(None if match is None else [match.num_tokens, match.is_async])
        return match

    def update_state_after_alloc(
        self, request: Request, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        self._connector.update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Request, blocks: BlockTables) -> bool:
        is_read = self._connector.request_finished(request, blocks)
        self._answers.append(is_read)
        return is_read

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        self._connector.blocks_filled(request, blocks, num_tokens)

    def blocks_released(self, request: Request) -> None:
        self._connector.blocks_released(request)

    def build_connector_meta(self, step: int) -> KVConnectorMetadata | None:
        return self._connector.build_connector_meta(step)

    def update_connector_output(self, step: int, results: KVTransferResults) -> None:
        self._connector.update_connector_output(step, results)

    def reset_cache(self) -> None:
        self._connector.reset_cache()

    def forget(self) -> None:
        self._connector.forget()

    def has_pending_block_frees(self) -> bool:
        are_pending = self._connector.has_pending_block_frees()
        self._answers.append(are_pending)
        return are_pending
