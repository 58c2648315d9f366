"""The interface of an option (a part that only some replicas need) that transfers keys and values
between the KV cache and a KV connector. The base classes transfer nothing.
"""

from collections.abc import Sequence

from prometheus_client.registry import Collector
from stepwell.worker.v1 import worker_pb2

from services.common.errors import FailedPrecondition
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_transfer import (
    NO_RESULTS,
    KVConnectorMetadata,
    KVRole,
    KVTransferResults,
)
from services.scheduler.core.planning.replica_state import Connect
from services.scheduler.core.planning.transfers import LoggedAnswers


class TransferMessages:
    def __init__(self, num_ranks: int) -> None: ...

    def begin(self, metadata: KVConnectorMetadata) -> None:
        """Records the transfers that begin with a step."""

    def add(self, request: worker_pb2.ExecuteRequest, metadata: KVConnectorMetadata) -> None:
        """Adds the transfers of a step to the message that sends the step to the workers."""

    def note(self, rank: str, response: worker_pb2.ExecuteResponse) -> None:  # noqa: ARG002
        """Records the ends of transfers that a rank reports. Raises ValueError if a transfer is not
        in progress, or if the rank has already reported its end.
        """
        raise ValueError(
            "ended_tier_loads: must be empty, because the scheduler has started no load from host "
            "memory"
        )

    def take(self) -> KVTransferResults:
        """Returns the results of the transfers that ended since the last call."""
        return NO_RESULTS

    def forget(self) -> None:
        """Forgets the transfers in progress, because the pool and the workers are opened again."""


class TransferOption:
    """Transfers between the KV cache and host memory or another replica."""

    messages: type[TransferMessages] = TransferMessages
    connect: Connect | None = None
    """Creates the scheduler's side of the KV connector. None if the replica has no connector."""
    collectors: Sequence[Collector] = ()

    def __init__(self, config: SchedulerConfig, num_tier_blocks: int) -> None:
        """`num_tier_blocks` is the number of blocks in each worker's tier of host memory."""

    @staticmethod
    def role(num_tier_blocks: int) -> KVRole | None:  # noqa: ARG004
        """The direction of the KV connector's transfers. None if the replica has no connector."""
        return None

    @staticmethod
    def conflict(config: SchedulerConfig) -> str | None:  # noqa: ARG004
        """A sentence that says why transfers cannot work with `config`. None if they can."""
        return None

    @staticmethod
    def replaying(answers: LoggedAnswers) -> Connect:  # noqa: ARG004
        """The `connect` of a scheduler that replays a step log. Its KV connector returns the
        results that the log contains. Raises FailedPrecondition if this option is not installed.
        """
        raise FailedPrecondition(
            "the step log is of a scheduler with a KV connector, which this installation does not "
            "have"
        )

    def on_new_workers(self) -> None:
        """Called after each opening of the workers in which a worker is a new process."""
