"""The interface of KV connectors, which store keys and values outside the KV cache (in host memory
or in another replica), and load them again. Names and rules follow the scheduler side of vLLM's
KVConnectorBase_V1. The worker side of a connector moves the data.
"""

from dataclasses import dataclass

from services.common.pool.operations import BlockTables
from services.scheduler.core.kv_transfer import KVConnectorMetadata, KVTransferResults
from services.scheduler.core.planning.transfers import LoggedAnswers
from services.scheduler.core.request import Request


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """The number of tokens that can be loaded after a prefix hit in the KV cache. If `is_async` is
    true, the tokens are loaded between steps, while the request waits. Otherwise the request's
    first step loads them.
    """

    num_tokens: int
    is_async: bool


class KVConnector:
    """Tracks which keys and values are stored outside the KV cache (in this class, none). Methods
    must not block.
    """

    def get_num_new_matched_tokens(
        self,
        request: Request,  # noqa: ARG002
        num_computed_tokens: int,  # noqa: ARG002
    ) -> ExternalMatch | None:
        """Returns how many tokens, in whole blocks, can be loaded after a prefix hit of
        `num_computed_tokens` tokens. None if unknown yet. Called at each attempt to admit the
        request. Must not begin a load.
        """
        return ExternalMatch(0, is_async=False)

    def update_state_after_alloc(
        self, request: Request, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        """Called when a request's blocks are allocated. The connector must load the keys and values
        of the last `num_external_tokens` computed tokens into the blocks, from the planned step on.

        For state-space layers, it must load the state after these tokens. If these tokens include
        the request's last token, it must load the state before the last token instead.
        """

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        """Called when a request has filled a further block, and before its blocks are freed. Its
        first `num_tokens` tokens are known, and computed by steps that are already planned.
        """

    def blocks_released(self, request: Request) -> None:
        """Called when a request has lost its blocks, because it was preempted or has ended."""

    def build_connector_meta(self, step: int) -> KVConnectorMetadata | None:  # noqa: ARG002
        """Returns the transfers that begin with step `step`, or None."""
        return None

    def update_connector_output(self, step: int, results: KVTransferResults) -> None:
        """Called with the ends of transfers that each step's output reports."""

    def reset_cache(self) -> None:
        """Removes everything that is stored. Called only if no blocks are held and no load runs."""

    def forget(self) -> None:
        """Called when the pool or the workers, and so all blocks and transfers, are lost. It is
        unknown which steps in flight have run.
        """

    def request_finished(self, request: Request, blocks: BlockTables) -> bool:  # noqa: ARG002
        """Called when a request has ended. `blocks` contain its computed keys and values. Returns
        True if a transfer still reads them. The blocks are then freed only after the output of a
        step lists the request in `finished_sending`.
        """
        return False

    def has_pending_block_frees(self) -> bool:
        """Whether the end of a transfer will free blocks. If so, a running request that lacks
        blocks waits for them, and no request is preempted.
        """
        return False


class LoggedConnector(KVConnector):
    """The connector of a replay of a step log. Returns the results in the log, in the order of
    calls. Methods without a result do nothing, because a replay stores no keys and values.
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
