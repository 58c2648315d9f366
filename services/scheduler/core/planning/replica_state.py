"""The requests of a replica, and the blocks, batch rows and encoder outputs that they use."""

from collections.abc import Callable

from services.common.pool.ids import RequestKey
from services.common.pool.operations import BlockCopy
from services.common.replica.pause_mode import PauseMode
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv.kv_cache_manager import KVCacheManager
from services.scheduler.core.planning.encoder_cache_manager import EncoderCacheManager
from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.planning.step_builder import PlannedSteps
from services.scheduler.core.planning.transfers import Transfers
from services.scheduler.core.planning.waiting_requests import WaitingRequests
from services.scheduler.core.policies import find_policy
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.policies.retention import Retention
from services.scheduler.core.ports import KVPool
from services.scheduler.core.request import Request
from services.scheduler.core.step_costs import StepCosts


class ReplicaState:
    """The queues, running requests and resources that the scheduler's classes share."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVPool,
        connect: "Connect | None",
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.clock = clock
        self.step_costs = StepCosts()
        """Estimates how long steps take. The class that runs the steps records their durations."""
        parts = PolicyParts(config, clock, self.step_costs, self._release_held)
        self.policy = find_policy(config.policy)(parts)
        self.retention: Retention | None = getattr(self.policy, "retention", None)
        """Decides which contexts (KV blocks of ended requests of agents) stay cached. None if the
        policy leaves this to the pool.
        """
        self.queues = WaitingRequests(self.policy)
        self.running = RunningRequests()
        self.steps = PlannedSteps()
        self.rows = BatchRows(config.max_num_seqs)
        self.kv_cache_manager = KVCacheManager(config, pool, self.retention)
        self.encoder_cache = EncoderCacheManager(config.encoder_cache_size)
        self.pause_mode: PauseMode | None = None
        """The mode of the current pause. None if the engine is not paused."""
        self.num_preemptions = 0
        """Number of preemptions since the process started."""
        self.failed: dict[Request, str] = {}
        """Maps waiting requests that can never be admitted to the errors with which they will end.
        """
        self.transfers = None if connect is None else connect(self)

    @property
    def num_free_slots(self) -> int:
        """Number of requests that may be admitted. Sessions (requests with several turns) that wait
        for input count as running.
        """
        num_taken = len(self.running) + len(self.queues.between_turns)
        return max(0, self.config.max_running - num_taken)

    def _release_held(self, key: RequestKey) -> None:
        """Frees the blocks that were kept for an ended request, with the next transaction."""
        self.kv_cache_manager.pending.release(key)

    @property
    def holds_ended(self) -> bool:
        """Whether requests that have ended keep blocks."""
        return self.retention is not None and bool(self.retention.held)

    async def take_copies(self, step: int, traceparent: str) -> list[BlockCopy]:
        """Returns the block copies that the workers make before step `step`, and frees the blocks
        that the pool reserved for them. With a KV connector whose loads are not ordered with the
        steps, the blocks are freed only after the step's output has arrived, as in vLLM.
        """
        copies = sorted(self.kv_cache_manager.copies, key=lambda copy: copy.group)
        self.kv_cache_manager.copies = []
        if self.transfers is None or not self.transfers.defer_copies(copies, step):
            await self.kv_cache_manager.release_copies(len(copies), traceparent)
        return copies

    def take_out(self, request: Request) -> None:
        if request.row is None:
            self.queues.remove(request)
            self.queues.put_in_order()
        else:
            self.running.remove(request)

    def free(self, request: Request) -> None:
        """Frees a request's row and encoder outputs at once, and its blocks with the pool's next
        transaction. An ended request's blocks stay allocated if the policy keeps them, or while a
        KV transfer uses them.
        """
        context, is_held = None, False
        if self.retention is not None and request.is_finished:
            context = self.retention.ended(request)
            is_held = request.key in self.retention.held
        if self.transfers is not None and request.is_finished:
            self.transfers.ended(request, self.steps.in_flight)
        elif not is_held:
            self.kv_cache_manager.release(request, context)
        if self.transfers is not None:
            self.transfers.preempted(request)
        self.encoder_cache.free(request)
        self.rows.free(request)
        request.forget_blocks()

    def remove(self, request: Request) -> None:
        """Removes an ended request from the running requests or the queues, and frees its blocks
        and row. A waiting request may have ended because of a token that was in flight when the
        request was preempted.
        """
        self.take_out(request)
        self.free(request)


Connect = Callable[[ReplicaState], Transfers]
"""Creates the scheduler's side of a KV connector."""


class BatchRows:
    """Allocates rows (indexes of requests in the workers' batch), the last freed row first."""

    def __init__(self, num_rows: int) -> None:
        self.removed: list[int] = []
        """Freed rows that were not sent to the workers yet."""
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self, request: Request) -> None:
        request.row = self._free.pop()

    def free(self, request: Request) -> None:
        if request.row is not None:
            self._free.append(request.row)
            self.removed.append(request.row)
            request.row = None
