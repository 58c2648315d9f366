"""Types by which the plans and outputs of steps describe transfers of keys and values between the
KV cache and a KV connector, such as the tier of host memory to which workers offload KV blocks. The
plan of a step lists the transfers that begin with the step, and its output reports the transfers
that have ended. Names follow vLLM.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NewType

from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.operations import BlockTables
from services.scheduler.core.request import Request

TierBlockId = NewType("TierBlockId", int)
"""Number, from 0, of a block in the tier of host memory."""


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
    """The ends of transfers that the workers report with the output of a step, each end once.
    `finished_recving` includes `failed_recving`. Invalid blocks could not be loaded.
    """

    finished_recving: Sequence[RequestKey] = ()
    finished_sending: Sequence[RequestKey] = ()
    failed_recving: Collection[RequestKey] = ()
    """Requests for which no block could be loaded."""
    invalid_block_ids: Collection[BlockId] = ()


NO_RESULTS = KVTransferResults()


@dataclass(frozen=True, slots=True, order=True)
class BlockTransfer:
    """A transfer of a block between KV cache and host memory. `key` identifies its contents."""

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
    """The transfers that begin with a step. Stores (copies from the KV cache to host memory) are
    complete before the step writes any block. Loads (copies from host memory to the KV cache) begin
    after the stores, and may continue while later steps run.
    """

    stores: Sequence[BlockTransfer]
    loads: Sequence[ConnectorLoad]
