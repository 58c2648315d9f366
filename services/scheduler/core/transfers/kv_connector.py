"""The port through which keys and values come from elsewhere and go elsewhere: another tier, or
another replica. Names and rules are those of vLLM's KVConnectorBase_V1, the scheduler's side.

What moves them is the workers' side of a connector, which learns from each step's plan what to load
(`SchedulerOutput.loads`), and reports with each step's output what it has done
(`KVTransferResults`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.operations import BlockTables
from services.scheduler.core.request import Request
from services.scheduler.core.transfers.tier_index import TierBlockId


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """How many tokens behind a local hit can be loaded; and whether between steps, while the
    request waits, or within the step that needs them.
    """

    num_tokens: int
    is_async: bool


@dataclass(frozen=True, slots=True)
class KVLoad:
    """The last `num_tokens` of a request's computed tokens are loaded into its blocks."""

    request: Request
    num_tokens: int
    is_async: bool
    blocks: BlockTables
    """Its full table."""


@dataclass(frozen=True, slots=True)
class KVTransferResults:
    """Results of transfers, which the workers report with the output of each step.

    An end is reported once, and a failure not after the end of its load: `failed_recving` are also
    in `finished_recving`. Blocks are invalid if their load failed, between steps or within one.
    """

    finished_recving: Sequence[RequestKey] = ()
    finished_sending: Sequence[RequestKey] = ()
    failed_recving: Collection[RequestKey] = ()
    """Requests without one valid block of their load."""
    invalid_block_ids: Collection[BlockId] = ()


NO_RESULTS = KVTransferResults()


@dataclass(frozen=True, slots=True, order=True)
class BlockTransfer:
    """A block of the KV cache, one of the workers' tier, and the key of what they hold."""

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
    """Transfers that begin with a step. Stores are made before the step writes anything; loads
    begin then and may go on while later steps run.
    """

    stores: Sequence[BlockTransfer]
    loads: Sequence[ConnectorLoad]


class KVConnector(Protocol):
    """Knows what is stored elsewhere. Never blocks."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        """The tokens that can be loaded behind a local hit, in whole blocks, for a request that may
        be admitted now; None if that is not known yet. Asked at every attempt; changes nothing.
        """

    def update_state_after_alloc(
        self, request: Request, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        """A request has its blocks; `num_external_tokens` are loaded into them from this step on.
        Of layers that keep states the one is loaded from which the request goes on: after these
        tokens, or before the last of them if that is the last of all.
        """

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        """The first `num_tokens` of a request are known, and computed by steps that were planned
        before. Called when another block is full, and before the request gives its blocks back.
        """

    def blocks_released(self, request: Request) -> None:
        """A request holds no blocks any more: it was preempted, or it ended."""

    def build_connector_meta(self, step: int) -> KVConnectorMetadata | None:
        """The transfers that begin with the planned step; None if there are none."""

    def update_connector_output(self, step: int, results: KVTransferResults) -> None:
        """A step has run, and this was reported with its output."""

    def reset_cache(self) -> None:
        """Forgets what is stored elsewhere. No request holds blocks, and no load is under way."""

    def forget(self) -> None:
        """The pool's generation is over: no request holds blocks, no transfer is under way, and
        steps in flight may not have run.
        """

    def request_finished(self, request: Request, blocks: BlockTables) -> bool:
        """A request ended, and these blocks hold what was computed of it. Returns whether they are
        still read: then they stay its own until `finished_sending` names it.
        """

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will be free as soon as transfers end, so that a running request that
        lacks blocks should wait for them and none be preempted.
        """
