"""Reads KV transfers from a step log: the KV connector's return values and the workers' results."""

from collections import deque

from services.cli.replay.fields import Field
from services.common.pool.ids import BlockId, RequestKey
from services.scheduler.core.kv_transfer import KVTransferResults


class LoggedAnswers:
    """The return values of the KV connector's methods in one log entry, in the order of the calls.
    Raises FieldError for a value that is missing or belongs to another method.
    """

    def __init__(self) -> None:
        self._entry = Field({})
        self._answers: deque[Field] = deque()

    def read(self, entry: Field) -> None:
        self._entry = entry
        self._answers = deque(entry.get("connector", []).items())

    def match(self) -> tuple[int, bool] | None:
        answer = self._next()
        if answer.value is None:
            return None
        parts = list(answer.items())
        if len(parts) != 2:
            raise answer.wrong("must be a number of tokens, and whether they load between steps")
        return parts[0].integer(), parts[1].boolean()

    def flag(self) -> bool:
        return self._next().boolean()

    def _next(self) -> Field:
        if not self._answers:
            raise self._entry.get("connector", []).wrong("must have a further answer")
        return self._answers.popleft()


def read_transfers(entry: Field, num_blocks: int) -> KVTransferResults:
    """The transfer results that workers reported with a step's output, or empty results."""
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
