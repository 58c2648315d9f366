"""A KV connector with simulated external storage, for scenarios (scripted scheduler runs)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.operations import BlockTables
from services.common.request.finish import FinishReason
from services.scheduler.core.kv_transfer import KVTransferResults
from services.scheduler.core.request import Request
from services.scheduler.options.transfers.core.kv_connector import ExternalMatch, KVConnector
from tests.scenarios.connector import ExternalTokens


@dataclass(slots=True)
class _Source:
    """The externally stored tokens of one request, and how often they were queried and loaded."""

    tokens: ExternalTokens
    num_questions: int = 0
    num_loads: int = 0
    num_local_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that has not ended. `end_step` is the step in which an asynchronous load ends, or with
    whose output a synchronous load ends.
    """

    request: RequestKey
    end_step: int
    is_async: bool
    invalid_blocks: tuple[BlockId, ...]
    fails_whole: bool


@dataclass(slots=True)
class StandInConnector(KVConnector):
    """Simulates both sides of a KV connector, in the scheduler and in the workers. The scenario
    defines which tokens are stored, which loads fail, and how long transfers take. The scenario's
    run sets `step`, the current step.
    """

    block_size: int
    sources: Mapping[RequestKey, ExternalTokens]
    send_steps: Mapping[RequestKey, int]
    """Maps a request to the number of steps after its end in which its blocks are sent. Blocks of
    aborted requests are not sent.
    """
    frees_are_awaited: bool = False
    """Whether requests that lack blocks wait for blocks that are still being sent."""
    step: int = 0
    sent: list[tuple[Request, BlockTables]] = field(default_factory=list)
    """Requests whose sending began since the last step. `transfers_after_step` empties the list."""
    _sources: dict[RequestKey, _Source] = field(default_factory=dict)
    _loads: list[_Load] = field(default_factory=list)
    _sends: dict[RequestKey, int] = field(default_factory=dict)

    @property
    def has_transfers(self) -> bool:
        """Whether a load or a send has not ended or its end has not been reported."""
        return bool(self._loads or self._sends)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        source = self._source(request)
        if source is None:
            return ExternalMatch(0, is_async=False)
        tokens = source.tokens
        source.num_questions += 1
        if source.num_questions <= tokens.num_undecided:
            return None
        source.num_local_tokens = num_computed_tokens
        longest = request.num_tokens if tokens.is_async else request.num_tokens - 1
        num_new = min(tokens.num_tokens, longest) - num_computed_tokens
        if num_new <= 0 or source.num_loads == tokens.max_loads:
            return ExternalMatch(0, is_async=False)
        return ExternalMatch(num_new, tokens.is_async)

    def update_state_after_alloc(
        self, request: Request, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        source = self._source(request)
        if source is None or num_external_tokens == 0:
            return
        tokens, size = source.tokens, self.block_size
        source.num_loads += 1
        fails = source.num_loads <= tokens.num_failing_loads
        begin = source.num_local_tokens
        filled = blocks[0][begin // size : -(-(begin + num_external_tokens) // size)]
        invalid = [filled[index] for index in tokens.failing_blocks if index < len(filled)]
        self._loads.append(
            _Load(
                request.key,
                self.step + (tokens.num_steps if tokens.is_async else 0),
                tokens.is_async,
                tuple(invalid) if fails else (),
                fails and tokens.fails_whole,
            )
        )

    def request_finished(self, request: Request, blocks: BlockTables) -> bool:
        num_steps = self.send_steps.get(request.key)
        ends = (FinishReason.STOP, FinishReason.LENGTH)
        if num_steps is None or request.finish_reason not in ends:
            return False
        self._sends[request.key] = self.step + num_steps
        self.sent.append((request, blocks))
        return True

    def has_pending_block_frees(self) -> bool:
        return self.frees_are_awaited and bool(self._sends)

    def forget(self) -> None:
        self._loads.clear()
        self._sends.clear()

    def results(self, planned_in: int) -> KVTransferResults:
        """The results of ended transfers, to be reported with the output of step `planned_in`."""
        ended = [
            load
            for load in self._loads
            if (load.end_step <= self.step if load.is_async else load.end_step == planned_in)
        ]
        self._loads = [load for load in self._loads if load not in ended]
        sent = [key for key, end in self._sends.items() if end <= self.step]
        for key in sent:
            del self._sends[key]
        return KVTransferResults(
            finished_recving=[load.request for load in ended if load.is_async],
            finished_sending=sent,
            failed_recving=[load.request for load in ended if load.fails_whole],
            invalid_block_ids=list(
                dict.fromkeys(block for load in ended for block in load.invalid_blocks)
            ),
        )

    def _source(self, request: Request) -> _Source | None:
        tokens = self.sources.get(request.key)
        if tokens is None:
            return None
        return self._sources.setdefault(request.key, _Source(tokens))
