"""The interface of an option that moves keys and values. Without an option, it does nothing."""

from collections.abc import Sequence

from prometheus_client.registry import Collector
from stepwell.worker.v1 import worker_pb2

from services.common.errors import FailedPrecondition
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine.replica_state import Connect
from services.scheduler.core.kv_transfer import (
    NO_RESULTS,
    KVConnectorMetadata,
    KVRole,
    KVTransferResults,
)
from services.scheduler.core.planning.transfers import LoggedAnswers


class TransferMessages:
    def __init__(self, num_ranks: int) -> None: ...

    def begin(self, metadata: KVConnectorMetadata) -> None:
        """Records the transfers that begin with a step."""

    def add(self, request: worker_pb2.ExecuteRequest, metadata: KVConnectorMetadata) -> None:
        """Adds the transfers of a step to its message."""

    def note(self, rank: str, response: worker_pb2.ExecuteResponse) -> None:  # noqa: ARG002
        """Records the ended transfers in a rank's answer. Raises ValueError if a transfer is not in
        progress, or if the rank has already reported its end.
        """
        raise ValueError("ended_tier_loads: no load is under way")

    def take(self) -> KVTransferResults:
        """Returns the transfers that ended since the last call."""
        return NO_RESULTS

    def forget(self) -> None:
        """Removes all transfers, because pool and workers are opened again."""


class TransferOption:
    """Transfers between the KV cache and another tier or replica."""

    messages: type[TransferMessages] = TransferMessages
    connect: Connect | None = None
    """Makes the transfers of a scheduler. None if the replica has none."""
    collectors: Sequence[Collector] = ()

    def __init__(self, config: SchedulerConfig, num_tier_blocks: int) -> None:
        """`num_tier_blocks` is the number of blocks in each worker's tier."""

    @staticmethod
    def role(num_tier_blocks: int) -> KVRole | None:  # noqa: ARG004
        """The direction of transfers. None if there are none."""
        return None

    @staticmethod
    def conflict(config: SchedulerConfig) -> str | None:  # noqa: ARG004
        """Why transfers cannot work with this configuration. None if they can."""
        return None

    @staticmethod
    def replaying(answers: LoggedAnswers) -> Connect:  # noqa: ARG004
        """Makes the transfers of a replay, whose connector returns the logged answers. Raises
        FailedPrecondition if the scheduler has no transfers.
        """
        raise FailedPrecondition("the log is of a scheduler with a connector, which is not here")

    def on_new_workers(self) -> None:
        """Called after the workers were opened for the first time, and after any of them was
        replaced by a new process.
        """
