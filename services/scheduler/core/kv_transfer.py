"""The transfers of keys and values in the plans and outputs of steps. Names follow vLLM.

A step's plan lists the loads that begin (`SchedulerOutput.loads`). A step's output reports the
transfers that have ended (`KVTransferResults`).
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NewType

from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.operations import BlockTables
from services.scheduler.core.request import Request

TierBlockId = NewType("TierBlockId", int)
"""Number, from 0, of a block in the tier of host memory to which workers offload KV blocks."""


class KVRole(enum.Enum):
    """The direction in which keys and values are transferred."""

    BOTH = "kv_both"
    CONSUMER = "kv_consumer"
    PRODUCER = "kv_producer"


class KVLoadFailurePolicy(enum.Enum):
    """What happens to a request if some of its blocks could not be loaded."""

    RECOMPUTE = "recompute"
    """The request's tokens are computed again from the first block whose load failed."""
    FAIL = "fail"
    """The request ends with an error."""


@dataclass(frozen=True, slots=True)
class KVLoad:
    """Loads the last `num_tokens` of a request's computed tokens into the request's blocks."""

    request: Request
    num_tokens: int
    is_async: bool
    blocks: BlockTables
    """The full block table of the request."""


@dataclass(frozen=True, slots=True)
class KVTransferResults:
    """The transfer results that the workers report with the output of a step.

    The end of each transfer is reported once. `finished_recving` includes the requests in
    `failed_recving`. Invalid blocks are blocks that could not be loaded.
    """

    finished_recving: Sequence[RequestKey] = ()
    finished_sending: Sequence[RequestKey] = ()
    failed_recving: Collection[RequestKey] = ()
    """Requests for which no block could be loaded."""
    invalid_block_ids: Collection[BlockId] = ()


NO_RESULTS = KVTransferResults()


@dataclass(frozen=True, slots=True, order=True)
class BlockTransfer:
    """A transfer between the KV cache and the tier. `key` identifies the block's contents."""

    block: BlockId
    tier_block: TierBlockId
    key: bytes


@dataclass(frozen=True, slots=True)
class ConnectorLoad:
    """The blocks that are loaded for one request."""

    request: RequestKey
    blocks: Sequence[BlockTransfer]


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """The transfers that begin with a step. Stores (copies from the KV cache to the tier) are
    complete before the step writes any block. Loads begin after the stores, and may continue while
    later steps run.
    """

    stores: Sequence[BlockTransfer]
    loads: Sequence[ConnectorLoad]
