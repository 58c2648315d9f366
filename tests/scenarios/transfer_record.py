"""Records the transfers of a KV connector, in the format of vLLM's recorded decisions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from services.common.pool.operations import BlockTables
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_transfer import KVTransferResults
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request, RequestStatus
from tests.scenarios.record import Record

if TYPE_CHECKING:
    from tests.scenarios.stand_in_connector import StandInConnector


def begun_loads(plan: SchedulerOutput, config: SchedulerConfig) -> list[Any]:
    """The loads that a plan starts, each as a list: request id, number of tokens, whether the load
    is asynchronous, and the whole block table of the request.
    """
    return [
        [load.request.request_id, load.num_tokens, load.is_async, _listed(load.blocks, config)]
        for load in plan.loads
    ]


def reported_transfers(results: KVTransferResults, requests: Iterable[Request]) -> Record:
    """The transfer results that the workers report with the output of a step."""
    ids = {request.key: request.request_id for request in requests}
    return {
        "finished_recving": [ids[key] for key in results.finished_recving],
        "finished_sending": [ids[key] for key in results.finished_sending],
        "failed_recving": [ids[key] for key in results.failed_recving],
        "invalid_blocks": list(results.invalid_block_ids),
    }


def transfers_after_step(scheduler: Scheduler, connector: "StandInConnector") -> Record:
    """The state of transfers after a step: requests that load, requests whose sending began in the
    step, and blocks that are freed once a step in flight has ended.
    """
    sends, connector.sent = connector.sent, []
    transfers = scheduler.transfers
    loading = RequestStatus.WAITING_FOR_REMOTE_KVS
    return {
        "remote_after": sorted(
            request.request_id for request in scheduler.requests if request.status is loading
        ),
        "sends": [
            [request.request_id, _listed(blocks, scheduler.config)] for request, blocks in sends
        ],
        "deferred_frees": [] if transfers is None else transfers.deferred_frees.blocks,
    }


def _listed(blocks: BlockTables, config: SchedulerConfig) -> list[Any]:
    """The block table of each named KV-cache group. Without names, the only block table."""
    return [list(group) for group in blocks] if config.groups else list(blocks[0])
