"""A connector that answers as the log of a step says."""

from collections import deque

from services.cli.replay.fields import Field
from services.common.ids import BlockId, RequestKey
from services.common.pool_operations import BlockTables
from services.scheduler.core.kv_connector import ExternalMatch, KVTransferResults
from services.scheduler.core.request import Request


class LoggedConnector:
    """Answers one call's questions in their order. Raises FieldError for an answer that is missing
    or of another question.
    """

    def __init__(self) -> None:
        self._entry = Field({})
        self._answers: deque[Field] = deque()

    def read(self, entry: Field) -> None:
        """Takes the answers of an entry."""
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
        """Nothing is loaded."""

    def request_finished(
        self,
        request: Request,  # noqa: ARG002
        blocks: BlockTables,  # noqa: ARG002
    ) -> bool:
        return self._next().boolean()

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        """Nothing is stored."""

    def blocks_released(self, request: Request) -> None:
        """Nothing is kept of it."""

    def build_connector_meta(self, step: int) -> None:
        """There are no workers to be told anything."""

    def update_connector_output(self, step: int, results: KVTransferResults) -> None:
        """Nothing depends on it."""

    def reset_cache(self) -> None:
        """Nothing is stored."""

    def forget(self) -> None:
        """Nothing is kept."""

    def has_pending_block_frees(self) -> bool:
        return self._next().boolean()

    def _next(self) -> Field:
        if not self._answers:
            raise self._entry.get("connector", []).wrong("must have a further answer")
        return self._answers.popleft()


def read_transfers(entry: Field, num_blocks: int) -> KVTransferResults:
    """What the workers reported of transfers with an output; nothing if it is not there."""
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
