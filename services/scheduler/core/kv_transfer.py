"""Transfers of keys and values, as steps and their outputs have them. Names follow vLLM.

Each step's plan lists what to load (`SchedulerOutput.loads`), and each step's output reports the
completed transfers (`KVTransferResults`).
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NewType

from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.operations import BlockTables
from services.scheduler.core.request import Request

TierBlockId = NewType("TierBlockId", int)
"""Number of a block of the workers' tier, from 0."""


class KVRole(enum.Enum):
    """The direction in which keys and values are transferred."""

    BOTH = "kv_both"
    CONSUMER = "kv_consumer"
    PRODUCER = "kv_producer"


class KVLoadFailurePolicy(enum.Enum):
    """What happens to a request if the load of some of its blocks failed."""

    RECOMPUTE = "recompute"
    """The request is computed again from the first block whose load failed."""
    FAIL = "fail"
    """The request ends with an error."""


@dataclass(frozen=True, slots=True)
class KVLoad:
    """A load of keys and values, for the last `num_tokens` of a request's computed tokens, into the
    request's blocks.
    """

    request: Request
    num_tokens: int
    is_async: bool
    blocks: BlockTables
    """The full block table of the request."""


@dataclass(frozen=True, slots=True)
class KVTransferResults:
    """Results of transfers, which the workers report with the output of each step.

    The end of each transfer is reported once. `finished_recving` includes the requests in
    `failed_recving`, because a failed load has ended too. Blocks are invalid if their load failed.
    """

    finished_recving: Sequence[RequestKey] = ()
    finished_sending: Sequence[RequestKey] = ()
    failed_recving: Collection[RequestKey] = ()
    """Requests whose load filled no block with valid data."""
    invalid_block_ids: Collection[BlockId] = ()


NO_RESULTS = KVTransferResults()


@dataclass(frozen=True, slots=True, order=True)
class BlockTransfer:
    """A block of the KV cache, a block of the workers' tier, and the key of their contents."""

    block: BlockId
    tier_block: TierBlockId
    key: bytes


@dataclass(frozen=True, slots=True)
class ConnectorLoad:
    """The blocks that one request loads."""

    request: RequestKey
    blocks: Sequence[BlockTransfer]


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """Transfers that begin with a step. Stores (copies out of the KV cache) are complete before the
    step writes anything. Loads begin after the stores, and may continue while later steps run.
    """

    stores: Sequence[BlockTransfer]
    loads: Sequence[ConnectorLoad]
