"""A connector that returns the answers recorded in a step log."""

from collections import deque

from services.cli.replay.fields import Field
from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.operations import BlockTables
from services.scheduler.core.request import Request
from services.scheduler.options.transfers.core.kv_connector import ExternalMatch, KVTransferResults


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
    """Returns the answers of one log entry in the order of calls. Raises FieldError for an answer
    that is missing or belongs to another call.
    """

    def __init__(self) -> None:
        self._entry = Field({})
        self._answers: deque[Field] = deque()

    def read(self, entry: Field) -> None:
        """Reads the answers of a log entry."""
        self._entry = entry
        self._answers = deque(entry.get("connector", []).items())

    def get_num_new_matched_tokens(
        self,
        request: Request,  # noqa: ARG002 - the log has the answers in order
        num_computed_tokens: int,  # noqa: ARG002
    ) -> ExternalMatch | None:
        answer = self._next()
        if answer.value is None:
            return None
        parts = list(answer.items())
        if len(parts) != 2:
            raise answer.wrong("must be a number of tokens, and whether they load between steps")
        return ExternalMatch(parts[0].integer(), parts[1].boolean())

    def update_state_after_alloc(
        self, request: Request, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        """Does nothing, because a replay loads no blocks."""

    def request_finished(
        self,
        request: Request,  # noqa: ARG002
        blocks: BlockTables,  # noqa: ARG002
    ) -> bool:
        return self._next().boolean()

    def has_pending_block_frees(self) -> bool:
        return self._next().boolean()

    def _next(self) -> Field:
        if not self._answers:
            raise self._entry.get("connector", []).wrong("must have a further answer")
        return self._answers.popleft()


def read_transfers(entry: Field, num_blocks: int) -> KVTransferResults:
    """The transfer results that workers reported with an output, or empty results."""
    transfers = entry.get("kv_transfers", {})
    transfers.only(("finished_recving", "finished_sending", "failed_recving", "invalid_block_ids"))

    def keys(name: str) -> list[RequestKey]:
        return [RequestKey(key.integer(1)) for key in transfers.get(name, []).items()]

    blocks = transfers.get("invalid_block_ids", []).integers(1, num_blocks - 1)
    return KVTransferResults(
        finished_recving=keys("finished_recving"),
        finished_sending=keys("finished_sending"),
        failed_recving=keys("failed_recving"),
        invalid_block_ids=list(map(BlockId, blocks)),
    )
