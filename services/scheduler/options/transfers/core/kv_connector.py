"""Connectors load keys and values from another tier or replica, and store them there.
Names and rules follow the scheduler's side of vLLM's KVConnectorBase_V1. The workers' side of a
connector moves the data.
"""

from dataclasses import dataclass

from services.common.pool.operations import BlockTables
from services.scheduler.core.kv_transfer import KVConnectorMetadata, KVTransferResults
from services.scheduler.core.planning.transfers import LoggedAnswers
from services.scheduler.core.request import Request


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """How many tokens after a local hit can be loaded. If `is_async` is true, the tokens are loaded
    between steps, while the request waits. Otherwise the request's first step loads them.
    """

    num_tokens: int
    is_async: bool


class KVConnector:
    """Tracks the keys and values that are stored in another tier or replica. Never blocks. The base
    class has nothing stored, and a subclass overrides the methods that it uses.
    """

    def get_num_new_matched_tokens(
        self,
        request: Request,  # noqa: ARG002
        num_computed_tokens: int,  # noqa: ARG002
    ) -> ExternalMatch | None:
        """Returns how many tokens, in whole blocks, can be loaded after a local hit of
        `num_computed_tokens` tokens. None if the number is not known yet. Called at every attempt
        to admit the request. Has no side effect.
        """
        return ExternalMatch(0, is_async=False)

    def update_state_after_alloc(
        self, request: Request, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        """Called when a request's blocks are allocated. Keys and values of `num_external_tokens`
        tokens are loaded into the blocks from this step on.

        For state-space layers, the state after these tokens is loaded. If the request's last token
        is one of them, the state before the last token is loaded instead.
        """

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        """Called when another block of a request is full, and before the request's blocks are
        freed. The first `num_tokens` tokens of the request are known, and steps planned earlier
        compute them.
        """

    def blocks_released(self, request: Request) -> None:
        """Called when a request no longer holds blocks, because it was preempted or has ended."""

    def build_connector_meta(self, step: int) -> KVConnectorMetadata | None:  # noqa: ARG002
        """Returns the transfers that begin with the planned step. None if there are none."""
        return None

    def update_connector_output(self, step: int, results: KVTransferResults) -> None:
        """Called with the transfer results in the output of each step."""

    def reset_cache(self) -> None:
        """Removes everything that is stored. No request holds blocks, and no load is running."""

    def forget(self) -> None:
        """Called when pool or workers are lost. No request holds blocks any more, no transfer is in
        progress, and steps in flight may not have run.
        """

    def request_finished(self, request: Request, blocks: BlockTables) -> bool:  # noqa: ARG002
        """Called when a request has ended. `blocks` contain its computed keys and values. Returns
        True if a transfer still reads the blocks. In that case they are freed only after the output
        of a step has listed the request in `finished_sending`.
        """
        return False

    def has_pending_block_frees(self) -> bool:
        """Whether the end of a transfer will free blocks. If so, a running request that lacks
        blocks waits for them instead of preempting another request.
        """
        return False


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
